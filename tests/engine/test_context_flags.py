"""The flags of long contexts: sizes, the budget of the KV cache, and scaled RoPE positions."""

import argparse

import numpy as np
import pytest
from stand_in_engine import FakeEngine, FakeSession
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import main
from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.engine.engine import Engine
from tamis.model.hparams import RopeScaling


def parsed(*words):
    parser = argparse.ArgumentParser()
    common.add_context_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2g", 2 << 30),
        ("64 KiB", 1 << 16),
        ("100", 100),
    ],
)
def test_sizes_have_units(text, n):
    assert common.size(text) == n


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "0.1", "1XB", "1MiB2", "9" * 400])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a size such as 512MiB"):
        common.size(text)


def test_positions_are_stretched_as_a_file_would_say(tmp_path):
    yarn = TinySpec("llama", "F32", rope_scaling="yarn", rope_factor=4.0, rope_n_ctx_orig=64)
    plain = write_tiny_model(tmp_path / "plain.gguf", TinySpec("llama", "F32"))
    own = Engine.load(write_tiny_model(tmp_path / "yarn.gguf", yarn), n_threads=1)
    flags = parsed("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "64")
    found = Engine.load(plain, n_threads=1, rope=common.rope_scaling(flags))
    assert found.hp.rope_scaling == own.hp.rope_scaling
    np.testing.assert_array_equal(found.model.rope.inv_freq, own.model.rope.inv_freq)
    unnamed = Engine.load(plain, n_threads=1, rope=RopeScaling("yarn", 4.0))
    assert unnamed.hp.rope_scaling.n_ctx_orig == unnamed.hp.n_ctx_train
    for engine in (own, found, unnamed):
        engine.close()


@pytest.mark.parametrize(
    "words",
    [
        ("--rope-scale", "4"),
        ("--rope-scaling", "yarn"),
        ("--rope-scaling", "yarn", "--rope-scale", "nan"),
        ("--rope-scaling", "linear", "--rope-scale", "inf"),
    ],
)
def test_half_a_request_is_refused(words):
    with pytest.raises(UsageError, match="--rope-scal"):
        common.rope_scaling(parsed(*words))


@pytest.mark.parametrize(
    "line",
    [
        "run -p hello",
        "bench -p 4 -n 2 -r 1",
        "perplexity -f text -c 8",
        "perplexity -f text -d 4 -n 2 --attn quest",
    ],
)
def test_commands_pass_the_budget_on(line, monkeypatch, tmp_path):
    engine, seen = FakeEngine(), []
    session = engine.session
    monkeypatch.setattr(
        engine, "session", lambda **options: (seen.append(options), session(options["n_ctx"]))[1]
    )
    monkeypatch.setattr(FakeSession, "copy", lambda self, other: None, raising=False)
    monkeypatch.setattr(common, "load_engine", lambda *_: engine)
    (tmp_path / "text").write_text("x" * 35)
    monkeypatch.chdir(tmp_path)
    flags = ["--kv-ram", "1MiB", "--kv-dir", ".", "--kv-unit", "64", "--kv-vram", "2GiB"]
    flags += ["--key-copy", "none"]
    assert main([*line.split(), *flags]) == 0
    assert len(seen) == (2 if "quest" in line else 1)
    for options in seen:
        assert (options["kv_ram"], options["kv_dir"], options["kv_unit"]) == (1 << 20, ".", 64)
        assert (options["kv_vram"], options["key_copy"]) == (1 << 31, 0)
