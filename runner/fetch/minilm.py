"""Converts MiniLM's safetensors file to GGUF: tensors by GGUF's names, vocabulary, sizes."""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

N_HEAD, EPS = 12, 1e-12  # values that shapes do not show, from the model's config.json
MEAN = 1  # pooling
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
LAYER = "encoder.layer."
ALIGNMENT, CONTROL, NORMAL = 32, 3, 1
# GGUF's types of metadata values
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


class Floats(NamedTuple):
    """A float32 tensor; the dimensions are ordered from the outer to the inner one."""

    shape: tuple[int, ...]
    data: bytes


def convert(source: Path, target: Path) -> None:
    """Write the GGUF file of a safetensors file to which vocab.txt is appended."""
    data = source.read_bytes()
    n_header = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + n_header])
    begin = 8 + n_header
    end = begin + max(e["data_offsets"][1] for k, e in header.items() if k != "__metadata__")
    tensors = {
        name: Floats(tuple(e["shape"]), data[begin + first : begin + last])
        for key, e in header.items()
        if key != "__metadata__" and (name := gguf_name(key))
        for first, last in [e["data_offsets"]]
    }
    write(target, metadata(tensors, data[end:].decode().splitlines()), tensors)


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor; "" for one that the model does not need."""
    prefix, (module, _, kind) = "", name.rpartition(".")
    if name.startswith(LAYER):
        layer, _, module = module[len(LAYER) :].partition(".")
        prefix = f"blk.{layer}."
    return f"{prefix}{NAMES[module]}.{kind}" if module in NAMES else ""


def metadata(tensors: dict[str, Floats], words: list[str]) -> dict[str, tuple[int, Any]]:
    """The metadata of the file, each key with the type of its value."""
    n_layer = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    n_ff, n_embd = tensors["blk.0.ffn_up.weight"].shape
    # A piece that starts a word has a leading U+2581, a continuation has no mark.
    pieces = [
        word if word in SPECIAL else word[2:] if word.startswith("##") else f"\u2581{word}"
        for word in words
    ]
    kinds = [CONTROL if word in SPECIAL else NORMAL for word in words]
    tokenizer: dict[str, tuple[int, Any]] = {
        "model": (_STRING, "bert"),
        "pre": (_STRING, "jina-v2-en"),
        "tokens": (_STRING, pieces),
        "token_type": (_INT32, kinds),
        "token_type_count": (_UINT32, tensors["token_types.weight"].shape[0]),
        "padding_token_id": (_UINT32, words.index("[PAD]")),
        "unknown_token_id": (_UINT32, words.index("[UNK]")),
        "bos_token_id": (_UINT32, words.index("[CLS]")),
        "seperator_token_id": (_UINT32, words.index("[SEP]")),
        "mask_token_id": (_UINT32, words.index("[MASK]")),
    }
    own: dict[str, tuple[int, Any]] = {
        "context_length": (_UINT32, tensors["position_embd.weight"].shape[0]),
        "embedding_length": (_UINT32, n_embd),
        "feed_forward_length": (_UINT32, n_ff),
        "block_count": (_UINT32, n_layer),
        "attention.head_count": (_UINT32, N_HEAD),
        "attention.layer_norm_epsilon": (_FLOAT32, EPS),
        "attention.causal": (_BOOL, False),
        "pooling_type": (_UINT32, MEAN),
    }
    return {
        "general.architecture": (_STRING, "bert"),
        "general.name": (_STRING, "all-MiniLM-L6-v2"),
        **{f"bert.{key}": value for key, value in own.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
    }


def write(path: Path, keys: dict[str, tuple[int, Any]], tensors: dict[str, Floats]) -> None:
    """Write a GGUF file of float32 tensors; the same input gives the same bytes."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
        for key, (kind, value) in keys.items():
            file.write(_text(key))
            if isinstance(value, list):
                file.write(struct.pack("<IIQ", _ARRAY, kind, len(value)))
                file.write(b"".join(_value(kind, each) for each in value))
            else:
                file.write(struct.pack("<I", kind) + _value(kind, value))
        at = 0
        for name, tensor in tensors.items():
            shape = tensor.shape[::-1]
            file.write(_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            file.write(struct.pack("<IQ", 0, at))  # the type float32, and the offset
            at += -(-len(tensor.data) // ALIGNMENT) * ALIGNMENT
        for tensor in tensors.values():
            file.write(bytes(-file.tell() % ALIGNMENT) + tensor.data)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _text(value)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)
