"""ENCODE against the bytes of llama.cpp's reference and of the gguf package, and its errors.

tests/data/encoded.npz has the bytes that ggml-quants.c of llama.cpp (MIT; as in llama-cpp-python
0.3.36), compiled without fused products, gives for `inputs()`.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
from guarded import in_child, runs

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops.encode import ENCODE_SCRATCH, ENCODED

KERNELS = [(ops.ENCODE, (type, weighted)) for type in ENCODED for weighted in (0, 1)]
GOLDEN = Path(__file__).parents[1] / "data" / "encoded.npz"
# Root mean square of the error of normal values, relative to them: what a type may lose at most.
LOSS = {
    "Q4_0": 0.10, "Q4_1": 0.085, "Q5_0": 0.05, "Q5_1": 0.042, "Q8_0": 0.007, "Q2_K": 0.33,
    "Q3_K": 0.17, "Q4_K": 0.08, "Q5_K": 0.04, "Q6_K": 0.021, "IQ4_NL": 0.085, "IQ4_XS": 0.085,
}  # fmt: skip
pytestmark = pytest.mark.cpu_only


def inputs():
    """Rows of many sizes, with zeros, a constant, one sign and almost nothing; an importance."""
    rng = np.random.default_rng(20261127)
    x = rng.standard_normal((4, 512)) * np.exp(rng.standard_normal((4, 512)) / 2)
    x = x.astype(np.float32)
    x[1, :256], x[2, :300], x[3, 64:80] = 0, 0.5, 1e-20
    x[3, 16:48] = -np.abs(x[3, 16:48])
    return x, (rng.random(512) ** 2 + 0.01).astype(np.float32)


def encoded(type, x, importance=None):
    """The rows of x in a type, however many threads run and wherever the buffers are."""
    out = {"rows": np.full((len(x), GGMLType[type].n_bytes(x.shape[1])), 0xEE, np.uint8)}
    fields = {"x": x, "importance": importance}
    constants = (type, int(importance is not None))
    found = list(runs(ops.ENCODE, constants, out=out, scratch=ENCODE_SCRATCH, **fields))
    return [each["rows"] for each in found]


def decoded(type, rows, n):
    return dequantize(rows.reshape(-1), GGMLType[type], (n, len(rows)))


@pytest.mark.parametrize("weighted", [0, 1])
@pytest.mark.parametrize("type", ENCODED)
@in_child
def test_the_bytes_are_those_of_llama_cpps_reference(type, weighted):
    x, importance = inputs()
    expected = np.load(GOLDEN)[f"{type}_{weighted}"]
    for rows in encoded(type, x, importance if weighted else None):
        assert np.array_equal(rows, expected)


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@in_child
def test_simple_types_are_those_of_the_gguf_package(type):
    rng = np.random.default_rng()
    for n_row, n in ((1, 32), (3, 96), (5, 1024)):
        x = (rng.standard_normal((n_row, n)) * rng.uniform(1e-4, 10)).astype(np.float32)
        expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[type])
        for rows in encoded(type, x):
            assert np.array_equal(rows, expected.reshape(rows.shape))


@pytest.mark.parametrize("type", ENCODED)
@in_child
def test_values_come_back_with_the_errors_of_the_type(type):
    rng = np.random.default_rng()
    x = (rng.standard_normal((33, 512)) * rng.uniform(1e-3, 1)).astype(np.float32)
    for rows in encoded(type, x):
        error = decoded(type, rows, 512) - x
        assert np.sqrt((error**2).mean() / (x**2).mean()) < LOSS[type]


@pytest.mark.parametrize("type", [type for type in ENCODED if type != "Q8_0"])
@in_child
def test_errors_where_importance_is_large_are_smaller(type):
    rng = np.random.default_rng()
    x = rng.standard_normal((64, 256)).astype(np.float32)
    importance = np.where(np.arange(256) % 8 == 0, 100, 0.01).astype(np.float32)
    plain, weighted = encoded(type, x)[0], encoded(type, x, importance)[0]
    chosen = importance > 1
    errors = [((decoded(type, rows, 256) - x) ** 2)[:, chosen].mean() for rows in (plain, weighted)]
    assert errors[1] < 0.9 * errors[0]
