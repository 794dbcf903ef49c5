"""EMBED and MATMUL against NumPy float64, for every weight type and awkward sizes."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tiny_models import random_tensor

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels import ops
from tamis.jit_kernels.backend import Backend
from tamis.jit_kernels.program import Program

TYPES = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
]  # fmt: skip
N_OUT, N_IN = 7, 512  # one whole tile of four rows and a rest


@pytest.fixture(scope="module")
def backend():
    backend = Backend(2)
    program = Program()
    specs = [(op, t) for op in (ops.EMBED, ops.MATMUL) for t in TYPES]
    for op, type_ in specs:
        program.add(op, (type_,), **dict.fromkeys(op.fields, 0))
    backend.load(program.specs)
    yield backend
    backend.close()


def weights(type_, rng):
    """Random rows in their encoding, and what the NumPy decoder makes of them in float64."""
    data = np.ascontiguousarray(random_tensor(rng, (N_OUT, N_IN), Type[type_])).view(np.uint8)
    decoded = dequantize(data.reshape(-1), GGMLType[type_], (N_IN, N_OUT))
    return data.reshape(-1), decoded.astype(np.float64)


def run(backend, op, type_, **fields):
    program = Program()
    program.add(op, (type_,), **fields)
    backend.run(backend.link(program))


def step_of(n_tok):
    return np.array([n_tok, 0, 0], np.int64)


@pytest.mark.parametrize("type_", TYPES)
def test_embed_decodes_rows(backend, type_):
    rng = np.random.default_rng(7)
    data, decoded = weights(type_, rng)
    ids = np.array([6, 0, 3], np.int32)
    y = np.full((3, N_IN), np.nan, np.float32)
    run(backend, ops.EMBED, type_, step=step_of(3), ids=ids, table=data, y=y, n=N_IN, scale_f=2.0)
    # d * q + m in one rounding against two in the reference: a float32 step of the largest term.
    np.testing.assert_allclose(y, 2 * decoded[ids], rtol=2e-6, atol=2e-6 * np.abs(decoded).max())


@pytest.mark.parametrize("n_tok", [1, 4, 7])
@pytest.mark.parametrize("type_", TYPES)
def test_matmul_is_the_product(backend, type_, n_tok):
    rng = np.random.default_rng(n_tok)
    data, decoded = weights(type_, rng)
    x = rng.standard_normal((n_tok, N_IN)).astype(np.float32)
    bias = rng.standard_normal(N_OUT).astype(np.float32)
    before = rng.standard_normal((n_tok, N_OUT + 3)).astype(np.float32)
    y = before.copy()
    run(
        backend, ops.MATMUL, type_, step=step_of(n_tok), x=x, w=data, bias=bias, y=y, n_in=N_IN,
        n_out=N_OUT, y_stride=N_OUT + 3, add=1,
        scratch=np.zeros(2 * ops.matmul_scratch(N_IN), np.uint8),
    )  # fmt: skip
    expected = before[:, :N_OUT] + x.astype(np.float64) @ decoded.T + bias
    # Float32 sums of 512 products err by a few units of 1e-7 of the sum of magnitudes.
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(decoded).T + 10)
    assert (np.abs(y[:, :N_OUT] - expected) < bound).all()
    np.testing.assert_array_equal(y[:, N_OUT:], before[:, N_OUT:])


def test_a_sum_does_not_depend_on_its_neighbours(backend):
    # Rows and tokens fall in other tiles; the bits stay, so chunking a prompt changes nothing.
    rng = np.random.default_rng(3)
    data, _ = weights("Q4_K", rng)
    x = rng.standard_normal((9, N_IN)).astype(np.float32)

    def product(rows):
        y = np.zeros((len(rows), N_OUT), np.float32)
        run(
            backend, ops.MATMUL, "Q4_K", step=step_of(len(rows)), x=rows, w=data, bias=None, y=y,
            n_in=N_IN, n_out=N_OUT, y_stride=N_OUT, add=0,
            scratch=np.zeros(2 * ops.matmul_scratch(N_IN), np.uint8),
        )  # fmt: skip
        return y

    whole = product(x)
    np.testing.assert_array_equal(whole[:5], product(x[:5]))
    np.testing.assert_array_equal(whole[5:], product(np.ascontiguousarray(x[5:])))
    np.testing.assert_array_equal(whole[2:3], product(np.ascontiguousarray(x[2:3])))
