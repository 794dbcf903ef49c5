"""LoRA adapters of PEFT: the bytes that llama.cpp's convert_lora_to_gguf.py writes, and errors."""

import hashlib
import json

import numpy as np
import pytest
from checkpoints import cases, make, write_safetensors

from tamis.cli import main
from tamis.engine.adapters import Adapters, Lora
from tamis.engine.engine import Engine
from tamis.formats.gguf import GGUFFile
from tamis.make.checkpoint.source import ConvertError
from tamis.make.convert.lora import planned
from tamis.make.convert.writing import convert
from tamis.make.convert.writing import planned as planned_model

RANK = 4
# The matrices that adapters of these cases change, and the first half of the SHA-256 of
# llama.cpp's file. In Qwen 3.5
# rows and columns of linear layers get another order.
ADAPTERS = {
    "llama": (
        ("q_proj", "k_proj", "down_proj"),
        "a039a5eb8b6533d8fd2b71af357beb85",
    ),
    "qwen35_mtp": (
        ("in_proj_qkv", "out_proj", "q_proj"),
        "b6b95a78360ac3eed1a3ee8a6dfc5fd6",
    ),
}


def adapter(folder, name):
    """Write the adapter of a case."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8}))
    tensors = []
    for full, _, shape in cases()[name]["tensors"]["model.safetensors"]:
        stem = full.removesuffix(".weight")
        if stem.endswith(ADAPTERS[name][0]) and stem.startswith("model."):
            start = f"base_model.model.{stem}.lora_"
            tensors += [[f"{start}A.weight", "F32", [RANK, shape[1]]]]
            tensors += [[f"{start}B.weight", "F32", [shape[0], RANK]]]
    write_safetensors(folder / "adapter_model.safetensors", sorted(tensors))
    return folder


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_becomes_the_file_that_llamacpp_writes(name, tmp_path, capsys):
    base, out = make(tmp_path / "base", cases()[name]), tmp_path / "out.gguf"
    for file in base.glob("*.safetensors"):
        file.unlink()  # the config is enough
    source = adapter(tmp_path / "tiny-lora", name)
    assert main(["convert-lora", str(source), str(out), "--base", str(base), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert hashlib.sha256(out.read_bytes()).hexdigest()[:32] == ADAPTERS[name][1]
    with GGUFFile(out) as file:
        assert 2 * report["matrices"] == len(file.tensors)


def test_the_engine_adds_the_adapter(tmp_path):
    base = make(tmp_path / "base", cases()["llama"])
    convert(planned_model(base, "f32", pre="llama-bpe"), tmp_path / "m.gguf", n_threads=1)
    plan = planned(adapter(tmp_path / "lora", "llama"), base, "f32")
    convert(plan, tmp_path / "lora.gguf", n_threads=1)
    with Engine.load(tmp_path / "m.gguf", n_threads=1) as engine:
        plain = engine.session(n_ctx=64).prefill([5, 6, 7]).copy()
        lora = Lora.load(tmp_path / "lora.gguf")
        found = engine.session(n_ctx=64, adapters=Adapters(((lora, 1.0),))).prefill([5, 6, 7])
    assert np.abs(plain - found).max() > 1e-3
    assert lora.alpha == 8


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "F32", [4, 64]]], "only"),
        ([["base_model.model.model.embed_tokens.weight", "F32", [4, 64]]], "neither lora_A nor"),
        ([], "has no lora_A and lora_B"),
        (
            [
                ["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "F32", [4, 64]],
                ["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight", "F32", [96, 5]],
            ],
            "they do not fit",
        ),
    ],
)
def test_what_is_wrong_with_an_adapter_is_said(tensors, expected, tmp_path):
    base, source = make(tmp_path / "base", cases()["llama"]), adapter(tmp_path / "lora", "llama")
    write_safetensors(source / "adapter_model.safetensors", tensors)
    with pytest.raises(ConvertError, match=expected):
        planned(source, base, "f32")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(ConvertError, match="is of no LoRA adapter"):
        planned(source, base, "f32")
