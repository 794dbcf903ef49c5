"""Blocks of weights as CUDA kernels read them, in Python: equal to the NumPy decoders."""

import importlib

import numpy as np
import pytest
from matmul_cases import weights
from on_threads import Block, as_python, local

from tamis.formats.ggml_types import GGMLType

pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
NAMES = ("linear.dequant", "lang.readers")
FLOATS = ("F32", "F16", "BF16")
NOT_WEIGHTS = ("F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K")
QUANTISED = [t.name for t in GGMLType if t.name not in (*FLOATS, *NOT_WEIGHTS)]


@pytest.mark.parametrize("type_", QUANTISED)
def test_units_are_what_the_decoder_says(type_):
    n_in = 2 * max(256, GGMLType[type_].block_size)
    data, decoded = weights(type_, np.random.default_rng(len(type_)), 3, n_in)
    modules = [importlib.import_module(f"tamis.jit_kernels.cuda.{name}") for name in NAMES]
    dequant, row = modules[0], len(data) // 3
    local.block = Block(32)
    local.block.bytes[64 : 64 + len(data)] = data
    with as_python(*modules):
        halves = dequant.halves_of(type_)
        kind = np.int8 if dequant.is_signed(type_) else np.uint8
        for r in range(3):
            found = np.full(n_in, np.nan)
            for u in range(n_in // 32):
                starts, *units = halves(64 + row * r, u)
                for start, (q, d, m) in zip(starts, units, strict=True):
                    values = np.array([int(w) for w in q], np.uint32).view(kind)
                    found[start : start + 16] = values * np.float64(d) + np.float64(m)
            # A scale and an offset are float32.
            bound = 1e-6 * np.abs(decoded[r]).max()
            np.testing.assert_allclose(found, decoded[r], rtol=1e-6, atol=bound)
