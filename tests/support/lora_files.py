"""Adapters in GGUF files, of random values, and the same as matrices to merge."""

from pathlib import Path

import gguf
import numpy as np


def write_lora(path: Path, arch: str, shapes, *, rank=4, alpha=8.0, seed=0, dtype=np.float32):
    """A LoRA adapter of tensors (name: (n_out, n_in)); by their names, what it adds to them."""
    writer, rng = gguf.GGUFWriter(path, arch), np.random.default_rng(seed)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    added = {}
    for name, (n_out, n_in) in shapes.items():
        a = rng.standard_normal((rank, n_in)).astype(dtype) / np.asarray(n_in**0.5, dtype)
        b = rng.standard_normal((n_out, rank)).astype(dtype) / np.asarray(4, dtype)
        writer.add_tensor(f"{name}.weight.lora_a", a)
        writer.add_tensor(f"{name}.weight.lora_b", b)
        scale = alpha / rank if alpha else 1.0
        added[name] = scale * b.astype(np.float64) @ a.astype(np.float64)
    _finish(writer)
    return added


def write_control(path: Path, n_embd, layers, seed=0):
    """A control vector of some layers, whatever they are called; its rows by layer."""
    writer, rng = gguf.GGUFWriter(path, "controlvector"), np.random.default_rng(seed)
    rows = {il: rng.standard_normal(n_embd).astype(np.float32) for il in layers}
    for il, row in rows.items():
        writer.add_tensor(f"direction.{il}", row)
    _finish(writer)
    return rows


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
