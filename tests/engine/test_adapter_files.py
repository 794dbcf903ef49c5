"""What a file of an adapter must have, and which matrices it is of: every message, no model."""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from tamis.engine.adapters import AdapterError, ControlVector, Lora, Pair, _Deltas
from tamis.jit_kernels.contract.types import QTensor

ONES = np.ones((4, 4), np.float32)
KINDS = {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32}


def write_file(path, tensors, **keys):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in ({"general.type": "adapter", "adapter.type": "lora"} | keys).items():
        if value is not None:
            writer.add_key_value(key, value, KINDS[type(value)])
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HALVES = {"x.weight.lora_a": ONES[:2], "x.weight.lora_b": ONES[:, :2]}


@pytest.mark.parametrize(
    ("tensors", "keys", "said"),
    [
        (HALVES, {"general.type": "model"}, "general.type is 'model', expected 'adapter'"),
        (HALVES, {"general.type": None}, "general.type is None, expected 'adapter'"),
        (HALVES, {"adapter.type": "control"}, "adapter.type is 'control', expected 'lora'"),
        (HALVES | {"x.weight": ONES}, {}, "tensor x.weight is none of NAME.weight.lora_a and _b"),
        (HALVES | {"y.lora_a": ONES}, {}, "tensor y.lora_a is none of NAME"),
        (HALVES | {"y.weight.lora_c": ONES}, {}, "tensor y.weight.lora_c is none of NAME"),
        ({"x.weight.lora_a": ONES[:2]}, {}, "x has one half of a pair"),
        (HALVES | {"x.weight.lora_b": ONES[:, :3]}, {}, r"x has lora_a \(2, 4\) and lora_b \(4, 3"),
        (HALVES | {"x.weight.lora_b": ONES[0]}, {}, r"x has lora_a \(2, 4\) and lora_b \(4,\)"),
        (HALVES | {"x.weight.lora_a": ONES[:2].astype(np.int32)}, {}, "lora_a is of type I32, exp"),
        (HALVES | {"x.weight.lora_a": ONES[:2] * np.inf}, {}, "has values that are no finite num"),
        (HALVES, {"adapter.lora.alpha": "8"}, "adapter.lora.alpha is '8', expected a finite num"),
        ({}, {}, "the adapter has no tensors"),
    ],
)
def test_what_is_wrong_with_an_adapters_file_is_said(tmp_path, tensors, keys, said):
    path = write_file(tmp_path / "a.gguf", tensors, **keys)
    with pytest.raises(AdapterError, match=said):
        Lora.load(path)


def test_an_adapters_file_is_read_as_it_says(tmp_path):
    found = Lora.load(write_file(tmp_path / "a.gguf", HALVES, **{"adapter.lora.alpha": 3.0}))
    assert (found.arch, found.alpha, found.pairs.keys()) == ("llama", 3.0, {"x"})
    assert (found.pairs["x"].a.shape, found.pairs["x"].b.shape) == ((2, 4), (4, 2))
    assert Lora.load(write_file(tmp_path / "b.gguf", HALVES)).alpha == 0.0


@pytest.mark.parametrize("lengths", [(), (4, 3)])
def test_directions_are_some_and_of_one_length(tmp_path, lengths):
    tensors = {f"direction.{i + 1}": ONES[0][:n] for i, n in enumerate(lengths)}
    with pytest.raises(AdapterError, match="a control vector has directions of one length"):
        ControlVector.load(write_file(tmp_path / "c.gguf", tensors))


def matrices(**whole):
    """Tensors of a layer, by the names that the file has for them."""
    data = QTensor(np.zeros(4, np.uint8), "F32", 1, 1)
    return {
        name: SimpleNamespace(data=data, whole=f"blk.0.{of}.weight", label=name, name=name)
        for name, of in whole.items()
    }


@pytest.mark.parametrize(
    ("layer", "name", "found"),
    [
        ({"ffn_gate": "ffn_gate", "ffn_up": "ffn_up"}, "ffn_up", ["ffn_up"]),
        ({"ffn_gate": "ffn_up", "ffn_up": "ffn_up"}, "ffn_up", ["ffn_gate", "ffn_up"]),
        ({"ffn_gate": "ffn_up", "ffn_up": "ffn_up"}, "ffn_gate", None),
        (dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn_qkv"), "attn_qkv",
         ["attn_q", "attn_k", "attn_v"]),
        (dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn_qkv"), "attn_q", None),
        ({n: n for n in ("attn_q", "attn_k", "attn_v")}, "attn_k", ["attn_k"]),
        ({n: n for n in ("attn_q", "attn_k", "attn_v")}, "attn_qkv", None),
    ],
)  # fmt: skip
def test_an_adapter_is_of_the_matrices_that_the_file_has(layer, name, found):
    """A file that has fused some has an adapter of all of their rows, and of none alone."""
    layer = matrices(**layer)
    weights = SimpleNamespace(output=SimpleNamespace(whole="token_embd.weight"), blk=[layer])
    deltas = _Deltas(SimpleNamespace(weights=weights))
    lora = Lora("a.gguf", "llama", 0.0, {}, {})
    if found is None:
        with pytest.raises(AdapterError, match=f"adapts blk.0.{name}, which is no matrix"):
            deltas._of(lora, f"blk.0.{name}")
    else:
        assert deltas._of(lora, f"blk.0.{name}") == (0, [layer[n] for n in found])
    with pytest.raises(AdapterError, match="adapts output, which is no matrix"):
        deltas._of(lora, "output")  # it is the table of tokens
    weights.output.whole = "output.weight"
    assert deltas._of(lora, "output") == (None, [weights.output])


def test_rows_of_a_fused_matrix_are_those_of_its_parts_in_order():
    parts = "attn_q", "attn_k", "attn_v"
    layer = matrices(**dict.fromkeys(parts, "attn_qkv"))
    weights = SimpleNamespace(output=SimpleNamespace(whole="token_embd.weight"), blk=[layer])
    deltas, lora = _Deltas(SimpleNamespace(weights=weights)), Lora("a.gguf", "llama", 0.0, {}, {})
    a, b = np.float32([[5]]), np.float32([[1], [2], [3]])
    deltas.add(lora, "blk.0.attn_qkv", Pair(a, b), 2.0)
    found = {key: [(p.a.tolist(), p.b.tolist()) for p in of] for key, of in deltas._pairs.items()}
    assert found == {(0, part): [([[5]], [[2 * i + 2]])] for i, part in enumerate(parts)}
    assert deltas.names == dict.fromkeys(parts, lora)
    with pytest.raises(AdapterError, match=r"is adapted as \[2, 1\], the model has \[3, 1\]"):
        deltas.add(lora, "blk.0.attn_qkv", Pair(a, b[:2]), 2.0)
