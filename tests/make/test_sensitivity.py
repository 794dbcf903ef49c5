"""Types chosen by measurement: within a size, or within a divergence of the answers."""

import json

import numpy as np
import pytest
from checkpoints import cases, make

from tamis.cli import main
from tamis.engine.engine import Engine
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFFile
from tamis.make import mixes
from tamis.make.convert.writing import convert, planned
from tamis.make.importance import NONE, Importance
from tamis.make.quantize import Encoder, n_bytes
from tamis.make.sensitivity import NARROW, Sensitivity


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small model in F32, and a text."""
    folder = tmp_path_factory.mktemp("models")
    plan = planned(make(folder / "x", cases()["qwen3"]), "f32", pre="qwen2")
    convert(plan, folder / "tiny.gguf", n_threads=1)
    (folder / "text.txt").write_text("the cat sat on the mat and saw that it was flat " * 4)
    return folder


@pytest.fixture(scope="module")
def measured(folder):
    """The sensitivities of that model on 24 tokens."""
    engine = Engine.load(folder / "tiny.gguf", n_threads=1)
    ids = np.random.default_rng(0).integers(3, 360, 24)
    found = Sensitivity(engine, ids, Encoder(1), NONE)
    found.measure()
    yield found
    engine.close()


def test_every_matrix_is_measured_and_smaller_types_cost_more(measured, folder):
    with GGUFFile(folder / "tiny.gguf") as file:
        assert measured.options.keys() == {n for n, t in file.tensors.items() if len(t.shape) > 1}
    for name, options in measured.options.items():
        assert [o.type for o in options] == list(NARROW), name
        costs = [o.kl for o in options]
        assert costs[0] > costs[1] > costs[-1] >= 0, name
        assert [o.n_bytes for o in options] == sorted(o.n_bytes for o in options)


def test_a_size_is_kept_and_used(measured, folder):
    with GGUFFile(folder / "tiny.gguf") as file:
        small = n_bytes(file, {n: o[0].type for n, o in measured.options.items()} | kept(file))
        large = n_bytes(file, {n: o[-1].type for n, o in measured.options.items()} | kept(file))
        limit = (small + large) // 2
        found = measured.smallest(limit)
        assert 0.97 * limit < found.n_bytes <= limit
        assert n_bytes(file, found.types) == found.n_bytes
    least, most = measured.smallest(small), measured.smallest(large)
    assert most.kl < found.kl < least.kl
    assert len({*found.types.values()} - {GGMLType.F32}) > 1
    with pytest.raises(ValueError, match="with the smallest types the model has"):
        measured.smallest(small - 1)


def kept(file):
    return {n: t.type for n, t in file.tensors.items() if len(t.shape) == 1}


def test_a_divergence_is_kept(measured):
    least = measured.smallest(1 << 30).kl
    limit = 20 * least
    found = measured.nearest(limit)
    assert 0.2 * limit < found.kl <= limit
    assert found.kl == pytest.approx(measured.divergence(found.types))
    with pytest.raises(ValueError, match="is wanted: allow more"):
        measured.nearest(least / 100)


def test_importance_weighs_errors(folder):
    with Engine.load(folder / "tiny.gguf", n_threads=1) as engine:
        name = "blk.0.ffn_up.weight"
        weights = np.ones((1, 64), np.float32)
        weights[:, :8] = 100
        ids = np.arange(3, 20)
        plain, weighed = (
            Sensitivity(engine, ids, Encoder(1), given)
            for given in (NONE, Importance({name: weights}, "test"))
        )
        plain.measure()
        weighed.measure()
        assert plain.options[name] != weighed.options[name]
        assert plain.options["blk.1.ffn_up.weight"] == weighed.options["blk.1.ffn_up.weight"]


def test_the_command_says_what_it_chose_and_what_it_costs(folder, tmp_path, capsys):
    model, out = folder / "tiny.gguf", tmp_path / "out.gguf"
    text = ["--text", str(folder / "text.txt"), "-t", "1"]
    limit = ["--target-size", "90KiB"]
    assert main(["quantize", str(model), str(out), *limit, *text, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "would have" in said
    assert "nats a token" in said
    assert not out.exists()
    assert main(["quantize", str(model), str(out), *limit, *text, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] <= 90 << 10
    assert report["kl"] > 0
    with GGUFFile(out) as file:
        assert {t.name: t.type.name for t in file.tensors.values()} == report["tensors"]
        types = {t.name: t.type for t in file.tensors.values()}
        assert file.metadata["general.file_type"] == mixes.MIXES[mixes.nearest(types)].number


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "name one of TYPE, --target-size and --max-kl"),
        (["Q4_0", "--max-kl", "0.1"], "name one of TYPE, --target-size and --max-kl"),
        (["--max-kl", "0.1"], "add --text FILE"),
        (["--max-kl", "0.1", "--text", "x", "--pure"], "leave out the flags that choose them"),
    ],
)
def test_wrong_flags_are_errors(arguments, expected, folder, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(folder / "tiny.gguf"), str(out), *arguments]) != 0
    assert expected in capsys.readouterr().err
