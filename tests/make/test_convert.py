"""Files converted from safetensors: the bytes that llama.cpp's converter writes, and errors."""

import hashlib
import json
import struct

import numpy as np
import pytest
from checkpoints import cases, make, values, write_safetensors

from tamis.cli import main
from tamis.formats.gguf import GGUFFile
from tamis.formats.safetensors import SafetensorsError, read
from tamis.make.checkpoint.general import parts, title
from tamis.make.checkpoint.hashes import HASHES
from tamis.make.checkpoint.source import ConvertError, Source
from tamis.make.convert.writing import convert, planned

CASES = cases()
SMALL = "llama_plain"


@pytest.mark.parametrize("name", CASES)
def test_a_folder_becomes_the_file_that_llamacpp_writes(name, tmp_path):
    case, out = CASES[name], tmp_path / "out.gguf"
    folder = make(tmp_path / name, case)
    plan = planned(folder, case["outtype"], pre=case["pre"])
    seen = []
    convert(plan, out, n_threads=1, each=lambda done, total: seen.append((done, total)))
    assert hashlib.sha256(out.read_bytes()).hexdigest() == case["sha256"]
    assert seen[-1] == (plan.n_bytes, plan.n_bytes)


def test_the_command_writes_a_file_and_says_what_it_is(tmp_path, capsys):
    folder, out = make(tmp_path / SMALL, CASES[SMALL]), tmp_path / "out.gguf"
    arguments = ["convert", str(folder), str(out), "--pre", "qwen2"]
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"{out} would have" in said
    assert "of llama: 15 BF16, 5 F32" in said
    assert not out.exists()
    assert main([*arguments, "--json", "--outtype", "f16"]) == 0
    report = json.loads(capsys.readouterr().out)
    with GGUFFile(out) as file:
        assert {t.name: t.type.name for t in file.tensors.values()} == report["tensors"]
        assert file.metadata["general.architecture"] == report["architecture"] == "llama"
    assert main(arguments) != 0
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("known", "expected"), [("smollm2", "smollm"), ("qwen2.5-coder-0.5b", "qwen2")]
)
def test_a_vocabulary_is_recognised_by_what_becomes_of_a_text(
    known, expected, tmp_path, model_path
):
    with GGUFFile(model_path(known)) as file:
        tokens, kinds = (
            file.metadata["tokenizer.ggml.tokens"],
            file.metadata["tokenizer.ggml.token_type"],
        )
        merges = list(file.metadata["tokenizer.ggml.merges"])
        bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", False))
        texts = list(tokens)
    added = [
        {"id": id, "content": text, "special": int(kind) == 3}
        for id, (text, kind) in enumerate(zip(texts, kinds, strict=True))
        if int(kind) != 1
    ]
    special = {token["content"] for token in added}
    vocab = {text: id for id, text in enumerate(texts) if text not in special}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    case = dict(CASES[SMALL])
    config = json.loads(case["files"]["config.json"]) | {"vocab_size": len(texts)}
    case["files"] = {
        "config.json": json.dumps(config),
        "tokenizer.json": json.dumps({"model": model, "added_tokens": added}),
        "tokenizer_config.json": json.dumps({"add_bos_token": bos}),
    }
    plan = planned(make(tmp_path / "x", case), "auto")
    assert plan.keys["tokenizer.ggml.pre"][12:].decode() == expected
    assert expected in HASHES.values()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda f, c: c.update(architectures=["FooForCausalLM"]),
            "FooForCausalLM is no architecture",
        ),
        (lambda f, c: c.pop("architectures"), "has no `architectures`"),
        (lambda f, c: c.update(quantization_config={"quant_method": "awq"}), "quantized by 'awq'"),
        (lambda f, c: c.update(num_hidden_layers=1), "is no tensor of LlamaForCausalLM"),
        (lambda f, c: c.update(vocab_size=10), "tokens, config.json 10"),
        (lambda f, c: (f / "tokenizer.json").unlink(), "no tokenizer.json with a vocabulary"),
        (lambda f, c: (f / "tokenizer.json").write_text("{"), "tokenizer.json is no JSON"),
        (lambda f, c: (f / "model.safetensors").unlink(), "has no model*.safetensors"),
        (lambda f, c: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "is a pickle"),
        (
            lambda f, c: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}})
            ),
            "lacks model-1.safetensors, 1 of 2 parts",
        ),
        (
            lambda f, c: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model.safetensors"}})
            ),
            "model.safetensors has no a, one of 1 tensors",
        ),
        (
            lambda f, c: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "../model.safetensors"}})
            ),
            "outside of the folder",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(change, expected, tmp_path):
    folder = make(tmp_path / SMALL, CASES[SMALL])
    config = json.loads((folder / "config.json").read_text())
    change(folder, config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConvertError) as found:
        planned(folder, "auto", pre="qwen2")
    assert expected in str(found.value)


def test_a_vocabulary_that_is_not_recognised_needs_a_name(tmp_path, capsys):
    folder = make(tmp_path / SMALL, CASES[SMALL])
    assert main(["convert", str(folder), str(tmp_path / "out.gguf")]) != 0
    assert "--pre qwen2" in capsys.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "out.gguf"), "--pre", "qwen9"]) != 0
    assert "'qwen9' is no pre-tokenizer" in capsys.readouterr().err


def test_missing_experts_are_an_error(tmp_path):
    case = dict(CASES["mixtral"])
    case["tensors"] = {
        k: [t for t in v if ".experts.2.w1" not in t[0]] for k, v in case["tensors"].items()
    }
    with pytest.raises(ConvertError, match="11 tensors, expected three of 4"):
        planned(make(tmp_path / "x", case), "auto", pre="qwen2")


@pytest.mark.parametrize(
    ("type", "bits", "expected"),
    [
        ("F8_E4M3", [0x00, 0x01, 0x38, 0x7E, 0xFE, 0x08], [0, 2**-9, 1, 448, -448, 2**-6]),
        ("F8_E5M2", [0x00, 0x01, 0x3C, 0x7B, 0xFB, 0x04], [0, 2**-16, 1, 57344, -57344, 2**-14]),
        ("BF16", [0x80, 0x3F, 0x00, 0xC0], [1.0, -2.0]),
        ("F64", list(struct.pack("<d", 0.1)), [np.float32(0.1)]),
        ("I64", list(struct.pack("<q", -3)), [-3]),
        ("I32", list(struct.pack("<2i", -3, 1 << 20)), [-3, 1 << 20]),
        ("I16", list(struct.pack("<2h", -3, 1 << 10)), [-3, 1 << 10]),
        ("I8", [0xFD, 3], [-3, 3]),
        ("U64", list(struct.pack("<Q", 1 << 40)), [1 << 40]),
        ("U32", list(struct.pack("<2I", 3, 1 << 31)), [3, 1 << 31]),
        ("U16", list(struct.pack("<2H", 3, 1 << 15)), [3, 1 << 15]),
        ("U8", [3, 0xFF], [3, 255]),
        ("BOOL", [0, 1], [0, 1]),
        ("F32", list(struct.pack("<2f", 0.5, -3)), [0.5, -3]),
        ("F16", list(struct.pack("<2e", 0.5, -3)), [0.5, -3]),
    ],
)
def test_values_of_each_type(type, bits, expected, tmp_path):
    path = tmp_path / "x.safetensors"
    width = len(bits) // len(expected)
    entry = {"dtype": type, "shape": [len(expected)], "data_offsets": [0, len(bits)]}
    text = json.dumps({"x": entry, "__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(bits))
    stored = read([path])["x"]
    assert stored.n_bytes == width * len(expected)
    assert stored.values().tolist() == pytest.approx(expected, abs=0)
    assert np.isnan(read_e4m3(tmp_path, 0x7F))


def read_e4m3(folder, byte):
    path = folder / "nan.safetensors"
    text = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes([byte]))
    return read([path])["x"].values()[0]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "its header has 0 bytes"),
        (struct.pack("<Q", 1 << 40) + b"{}", "its header has 1099511627776 bytes"),
        (struct.pack("<Q", 2) + b"{,", "is no safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
    ],
)
def test_a_damaged_header_is_an_error(data, expected, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(SafetensorsError) as found:
        read([path])
    assert expected in str(found.value)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "the bytes 8 to 16 of 8"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "is of type F4"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "needs dtype, shape"),
        ([1], "needs dtype, shape"),
    ],
)
def test_a_damaged_entry_is_an_error(entry, expected, tmp_path):
    path = tmp_path / "x.safetensors"
    text = json.dumps({"x": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(SafetensorsError) as found:
        read([path])
    assert expected in str(found.value)


def test_a_name_in_two_files_is_an_error(tmp_path):
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        write_safetensors(path, [["x", "F32", [2]]])
    with pytest.raises(SafetensorsError, match=r"x is in a\.safetensors and in b\.safetensors"):
        read(paths)


def test_scales_multiply_blocks(tmp_path):
    case = CASES["llama_fp8"]
    source = Source(make(tmp_path / "x", case))
    name = "model.layers.0.self_attn.k_proj.weight"
    tables = {entry[0]: entry for entry in case["tensors"]["model.safetensors"]}
    scale_name, type, shape = tables[f"{name}_scale_inv"]
    scales = np.frombuffer(values(scale_name, type, shape), np.float32).reshape(shape)
    x = source.tensors[name].load()
    raw = source.stored[name].values()
    assert x[9, 40] == raw[9, 40] * scales[0, 1]
    assert scale_name not in source.tensors


@pytest.mark.parametrize(
    ("name", "n_params", "expected"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 76e8, "Qwen Qwen2.5 Instruct - 7B"),
        ("Mistral-7B-v0.3", 72e8, "- Mistral - v0.3 7B"),
        ("Phi-3-mini-128k-instruct", 38e8, "- Phi-3 128k-instruct - mini"),
        ("gemma", 1e3, "- - - - -"),
        ("a model of mine", 1e3, "- - - - -"),
    ],
)
def test_parts_of_names(name, n_params, expected):
    # As the package gguf of llama.cpp splits these names.
    found = parts(name, int(n_params))
    assert " ".join(part or "-" for part in found[1:]) == expected
    assert found.name == name.split("/")[-1]
    assert title("qwen2.5-7b-instruct") == "Qwen2.5 7b Instruct"
