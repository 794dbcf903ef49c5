"""Models split, merged and edited: every byte of what stays is that of the original."""

import json

import numpy as np
import pytest

from tamis.cli import main
from tamis.formats import gguf_writer
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFFile
from tamis.formats.gguf_writer import NewTensor, record
from tamis.make import copies

KEYS = {
    "general.architecture": record("str", "llama"),
    "general.name": record("str", "ä model"),
    "a.i8": record("i8", "-3"),
    "a.f64": record("f64", "1e300"),
    "a.words": record("[str]", '["one", "two", ""]'),
    "a.flags": record("[bool]", "[true, false]"),
    "a.numbers": record("[u16]", "[1, 65535]"),
}


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture
def model(tmp_path):
    """A file of seven tensors of different types and sizes, and its path."""
    return make(tmp_path / "model.gguf", KEYS)


def make(path, keys, n_tensor=7, seed=0):
    rng = np.random.default_rng(seed)
    types = (GGMLType.F32, GGMLType.Q4_K, GGMLType.I32, GGMLType.Q8_0)
    tensors = [NewTensor(f"blk.{i}.w", (256, i + 1), types[i % 4]) for i in range(n_tensor)]
    data = [[rng.bytes(t.n_bytes)] for t in tensors]
    with open(path, "wb") as out:
        gguf_writer.write(out, keys, tensors, data)
    return path


def content(path):
    """All keys, as they stand in the file, and all tensors."""
    with GGUFFile(path) as file:
        tensors = {t.name: (t.shape, t.type, file.data(t.name).tobytes()) for t in
                   file.tensors.values()}  # fmt: skip
        return gguf_writer.records(file), tensors


def test_a_written_file_has_the_keys_and_tensors_in_their_order(model):
    keys, tensors = content(model)
    assert list(keys.items()) == list(KEYS.items())
    assert list(tensors) == [f"blk.{i}.w" for i in range(7)]
    with GGUFFile(model) as file:
        assert file.metadata["general.name"] == "ä model"
        assert list(file.metadata["a.words"]) == ["one", "two", ""]
        assert file.metadata["a.flags"].tolist() == [True, False]
        assert file.metadata["a.numbers"].dtype == np.uint16


def test_the_gguf_package_reads_what_is_written(model):
    from gguf import GGUFReader

    reader = GGUFReader(model)
    assert [t.name for t in reader.tensors] == [f"blk.{i}.w" for i in range(7)]
    assert reader.fields["a.numbers"].contents() == [1, 65535]
    with GGUFFile(model) as file:
        for tensor in reader.tensors:
            assert tensor.data.tobytes() == file.data(tensor.name).tobytes()


@pytest.mark.parametrize("flags", [["--max-tensors", "2"], ["--max-size", "2KiB"],
                                   ["--max-tensors", "3", "--no-tensor-first-split"]])  # fmt: skip
def test_parts_are_one_model_and_merge_to_the_same_file(model, tmp_path, flags, capsys):
    assert main(["split", str(model), str(tmp_path / "p"), *flags, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.glob("p-*"))
    assert main(["split", str(model), str(tmp_path / "p"), *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == plan
    assert [(tmp_path / row["path"]).stat().st_size for row in plan] == [r["bytes"] for r in plan]
    assert len(plan) >= 3
    assert ("--no-tensor-first-split" in flags) == (plan[0]["tensors"] == 0)
    keys, tensors = content(plan[-1]["path"])  # any part opens all
    assert tensors == content(model)[1]
    assert {key: keys[key] for key in KEYS} == KEYS
    out = tmp_path / "whole.gguf"
    assert main(["merge", plan[1]["path"], str(out)]) == 0
    assert out.read_bytes() == model.read_bytes()


@pytest.mark.parametrize("kind", ["u16", "u32", "u64"])
def test_an_alignment_holds_in_all_parts(tmp_path, kind):
    keys = KEYS | {"general.alignment": record(kind, "128")}
    model = make(tmp_path / "model.gguf", keys)
    with GGUFFile(model) as file:
        assert all(t.offset % 128 == 0 for t in file.tensors.values())
        paths = copies.split(file, str(tmp_path / "p"), copies.planned(file, 3), quiet)
    assert content(paths[0])[1] == content(model)[1]


def test_a_failure_leaves_no_part(model, tmp_path):
    with GGUFFile(model) as file:
        parts = copies.planned(file, 2)

        def full(done, total):
            if done > total // 2:
                raise OSError(28, "No space left on device")

        with pytest.raises(OSError, match="No space"):
            copies.split(file, str(tmp_path / "p"), parts, full)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_nothing_is_written_over(model, tmp_path, capsys):
    before = model.read_bytes()
    (tmp_path / "p-00002-of-00004.gguf").write_bytes(b"mine")
    assert main(["split", str(model), str(tmp_path / "p"), "--max-tensors", "2"]) == 1
    assert "exists: name a new file" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 2
    link = tmp_path / "dangling.gguf"
    link.symlink_to(tmp_path / "nowhere")
    for out in (model, link):
        assert main(["edit", str(model), str(out), "--remove", "a.i8"]) == 1
        assert "exists" in capsys.readouterr().err
    assert model.read_bytes() == before
    assert not (tmp_path / "nowhere").exists()
    assert main(["merge", str(model), str(tmp_path / "o.gguf")]) == 1
    assert "is one file already" in capsys.readouterr().err


def test_an_edit_changes_what_is_named_and_nothing_else(model, tmp_path):
    out, template = tmp_path / "out.gguf", tmp_path / "chat.jinja"
    template.write_text("{{ messages }}\n")
    flags = ["--set", "general.name=str:new: name", "--set", "a.new=[i32]:[1, -2]", "--remove",
             "a.f64", "--set", "a.on=bool:true", "--set-file",
             f"tokenizer.chat_template={template}"]  # fmt: skip
    assert main(["edit", str(model), str(out), *flags]) == 0
    keys, tensors = content(out)
    assert tensors == content(model)[1]
    same = [key for key in KEYS if key not in ("general.name", "a.f64")]
    assert [keys[key] for key in same] == [KEYS[key] for key in same]
    assert list(keys)[:2] == list(KEYS)[:2]
    assert "a.f64" not in keys
    with GGUFFile(out) as file:
        assert file.metadata["general.name"] == "new: name"
        assert file.metadata["a.new"].tolist() == [1, -2]
        assert file.metadata["a.on"] is True
        assert file.metadata["tokenizer.chat_template"] == "{{ messages }}\n"


@pytest.mark.parametrize(("flags", "message"), [
    ([], "nothing to change"),
    (["--set", "a.b=7"], "expected KEY=TYPE:VALUE"),
    (["--set", "a.b=u3:7"], "'u3' is no type of a value: expected one of u8,"),
    (["--set", "a.b=u8:256"], "256 is no value of the type u8"),
    (["--set", "a.b=u8:-1"], "-1 is no value of the type u8"),
    (["--set", "a.b=i32:1.5"], "'1.5' is no value of the type i32"),
    (["--set", "a.b=bool:maybe"], "'maybe' is no value of the type bool"),
    (["--set", "a.b=[i32]:1"], "'1' is not a JSON list"),
    (["--set", "a.b=[i32]:[true]"], "True is no value of the type i32"),
    (["--set", "A b=u8:1"], "'A b' is no key"),
    (["--set", "split.count=u16:3"], "split.count cannot be set"),
    (["--set", "general.alignment=u32:24"], "a power of two from 8"),
    (["--set", "general.alignment=str:32"], "must be a u32"),
    (["--remove", "a.gone"], "the file has no key 'a.gone'"),
    (["--remove", "general.architecture"], "cannot be removed"),
    (["--set-file", "a.b=/nowhere/x"], "/nowhere/x: No such file"),
])  # fmt: skip
def test_a_wrong_change_is_refused_and_writes_nothing(model, tmp_path, flags, message, capsys):
    assert main(["edit", str(model), str(tmp_path / "out.gguf"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_data_of_another_size_is_an_error(tmp_path):
    tensors = [NewTensor("w", (32,), GGMLType.F32)]
    with (
        open(tmp_path / "x", "wb") as out,
        pytest.raises(ValueError, match="w got 4 bytes, its shape and type need 128"),
    ):
        gguf_writer.write(out, KEYS, tensors, [[b"1234"]])
    for data in ([], [[b"1234" * 32]] * 2):
        with open(tmp_path / "x", "wb") as out, pytest.raises(ValueError, match="zip"):
            gguf_writer.write(out, KEYS, tensors, data)
