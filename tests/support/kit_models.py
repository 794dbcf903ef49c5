"""Tiny random models of every architecture, from specs of metadata and tensor shapes.

tests/data/archs/specs.json.gz has llama.cpp's metadata and shapes by name; llama_cpp_logits.npz
what llama.cpp answers, float32 [N_TOK, n_vocab], for weights and ids drawn from SEED here. Those of
more_specs.json.gz were written from what its loader asks for; "scaled": what is multiplied after it
was drawn, by the end of its name, so that scores are not so large that a float16 key's bits matter.
Those of pooled_specs.json.gz have what embeds or ranks: golden(name + " pooled") is what stands for
the whole text. Those of variants.json.gz are specs of others with fewer keys chosen or more experts
to choose from; "n_tok": of those that need more tokens, how many. Those of fresh_specs.json.gz are
of shapes that fresh_shapes.py found or was asked for; their logits are float16.
"""

import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

FOLDER = Path(__file__).parents[1] / "data" / "archs"
SEED, N_TOK = 7, 96
Array = np.ndarray[Any, Any]


@cache
def specs() -> dict[str, Any]:
    """arch, kv (types and value by key) and tensors (name, ggml shape, type) of each model."""
    names = ("specs", "more_specs", "pooled_specs", "variants", "fresh_specs")
    files = [FOLDER / f"{name}.json.gz" for name in names]
    found = [json.loads(gzip.decompress(file.read_bytes())) for file in files]
    return {name: spec for each in found for name, spec in each.items()}


def golden(name: str) -> Array:
    """llama.cpp's logits, float32 [N_TOK, n_vocab], or of an encoder its rows."""
    names = ("more_logits", "pooled_logits", "variants_logits", "fresh_logits")
    for file in (*names, "llama_cpp_logits"):
        with np.load(FOLDER / f"{file}.npz") as found:
            if name in found:
                return found[name]
    raise KeyError(name)


def token_ids(name: str) -> list[int]:
    """What llama.cpp was asked about."""
    spec = specs()[name]
    uniform = _uniform("ids", spec.get("n_tok", N_TOK), np.float64)
    return (3 + uniform * (_n_vocab(spec) - 3)).astype(int).tolist()


def write_kit_model(
    name: str, path: Path, changed: dict[str, Any] | None = None, without: str = "no tensor"
) -> Path:
    """Write the model of this name, the same bytes everywhere; changed: values of some keys.

    without: part of the names of tensors that are left out.
    """
    spec = specs()[name]
    writer = gguf.GGUFWriter(path, spec["arch"])
    for key, (types, old) in spec["kv"].items():
        value = (changed or {}).get(key.removeprefix(f"{spec['arch']}."), old)
        element = gguf.GGUFValueType(types[1]) if len(types) == 2 else None
        writer.add_key_value(key, value, gguf.GGUFValueType(types[0]), element)
    _write_vocab(writer, _n_vocab(spec))
    for tensor, shape, type_ in spec["tensors"]:
        if without in tensor:
            continue
        if type_ == gguf.GGMLQuantizationType.I32:
            writer.add_tensor(tensor, _experts_of_tokens(spec, tensor, shape))
            continue
        values = _values(tensor, shape)
        for end, factor in spec.get("scaled", {}).items():
            if tensor.endswith(end):
                values = (values * np.float32(factor)).astype(np.float32)
        writer.add_tensor(tensor, values.astype(np.float16) if type_ == 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _experts_of_tokens(spec: dict[str, Any], name: str, shape: list[int]) -> Array:
    """The experts that each token's id chooses, no one twice."""
    n_expert = spec["kv"][f"{spec['arch']}.expert_count"][1]
    order = _uniform(name, n_expert * shape[1], np.float64).reshape(shape[1], n_expert)
    return np.argsort(order, axis=1)[:, : shape[0]].astype(np.int32)


def _n_vocab(spec: dict[str, Any]) -> int:
    return next(shape[1] for name, shape, _ in spec["tensors"] if name == "token_embd.weight")


def _write_vocab(writer: gguf.GGUFWriter, n: int) -> None:
    tokens = [b"<s>", b"</s>", "Ċ".encode(), *(f"tok{i}".encode() for i in range(3, n))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (n - 2))
    writer.add_token_merges(["t o"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _uniform(name: str, n: int, dtype: Any) -> Array:
    digest = hashlib.sha256(f"{SEED}:{name}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    return np.random.Generator(np.random.PCG64(seed)).random(n, dtype=dtype)


def _values(name: str, shape: list[int]) -> Array:
    """Of the size that trained ones have: norms near 1, matrices that keep a row's length."""
    uniform = _uniform(name, int(np.prod(shape)), np.float32)
    z = ((uniform - np.float32(0.5)) * np.float32(12**0.5)).astype(np.float32)
    if "norm" in name and name.endswith("weight"):
        z = 1 + np.float32(0.2) * z
    elif name.endswith(("ssm_a", "ssm_a.weight")):
        z = -np.exp(z)
    elif name.startswith("rope_f"):
        z = 1 + np.abs(z)
    elif name.endswith("ssm_d") or "sinks" in name:
        z = 1 + np.float32(0.5) * z
    elif name.endswith("bias") or len(shape) == 1:
        z = np.float32(0.2) * z
    elif not name.startswith("token_embd"):
        z = z * np.float32(1.5 / shape[0] ** 0.5)
    return z.reshape(shape[::-1])
