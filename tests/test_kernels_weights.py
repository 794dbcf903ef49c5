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
N_OUT, N_IN = 7, 512


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


def weights(type_, rng, shape=None):
    """Random rows in their encoding, and what the NumPy decoder makes of them in float64."""
    n_out, n_in = shape or (N_OUT, N_IN)
    data = np.ascontiguousarray(random_tensor(rng, (n_out, n_in), Type[type_])).view(np.uint8)
    decoded = dequantize(data.reshape(-1), GGMLType[type_], (n_in, n_out))
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


def product(backend, type_, data, x, n_out, *, bias=None, y=None):
    """x @ w.T + bias, added to y where it is given."""
    add = y is not None
    y = y if add else np.zeros((len(x), n_out), np.float32)
    run(
        backend, ops.MATMUL, type_, step=step_of(len(x)), x=x, w=data, bias=bias, y=y,
        n_in=x.shape[1], n_out=n_out, y_stride=y.shape[1], add=int(add),
        scratch=np.zeros(2 * ops.matmul_scratch(x.shape[1]), np.uint8),
    )  # fmt: skip
    return y


def rounding(x, decoded, type_):
    """The largest error that a right product may have, element by element.

    Float32 sums err by a few units of 1e-7 of the sum of magnitudes. For few rows, quantised
    weights meet activations of 15 bits: half a step of each block of 32.
    """
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(decoded).T + 10)
    if len(x) <= ops.FEW_ROWS and type_ not in ("F32", "F16", "BF16"):
        blocks = np.abs(x.astype(np.float64)).reshape(len(x), -1, 32)
        step = np.repeat(blocks.max(-1) / (127 * 128), 32, axis=1)
        bound += 0.5001 * step @ np.abs(decoded).T
    return bound


SHAPES = [(7, 512), (135, 256), (33, 96)]  # less than a tile; a group and a rest; half a chunk
MATMULS = [
    (type_, shape)
    for type_ in TYPES
    for shape in SHAPES
    if shape[1] % GGMLType[type_].block_size == 0
]


@pytest.mark.parametrize("n_tok", [1, 4, 5, 31])
@pytest.mark.parametrize(("type_", "shape"), MATMULS)
def test_matmul_is_the_product(backend, type_, shape, n_tok):
    rng = np.random.default_rng(n_tok)
    n_out, n_in = shape
    data, decoded = weights(type_, rng, shape)
    x = rng.standard_normal((n_tok, n_in)).astype(np.float32)
    bias = rng.standard_normal(n_out).astype(np.float32)
    before = rng.standard_normal((n_tok, n_out + 3)).astype(np.float32)
    exact = x.astype(np.float64) @ decoded.T
    bound = rounding(x, decoded, type_)
    y = product(backend, type_, data, x, n_out, bias=bias, y=before.copy())
    assert (np.abs(y[:, :n_out] - (before[:, :n_out] + exact + bias)) < bound).all()
    np.testing.assert_array_equal(y[:, n_out:], before[:, n_out:])
    assert (np.abs(product(backend, type_, data, x, n_out) - exact) < bound).all()
    assert (np.abs(product(backend, type_, data, x, n_out, bias=bias) - exact - bias) < bound).all()


@pytest.mark.parametrize("n_in", [5, 16, 45, 300])
@pytest.mark.parametrize("type_", ["F32", "F16", "BF16"])
def test_rows_of_floats_have_any_length(backend, type_, n_in):
    rng = np.random.default_rng(n_in)
    for n_tok in (2, 20):
        data, decoded = weights(type_, rng, (37, n_in))
        x = rng.standard_normal((n_tok, n_in)).astype(np.float32)
        difference = product(backend, type_, data, x, 37) - x.astype(np.float64) @ decoded.T
        assert (np.abs(difference) < rounding(x, decoded, type_)).all()


def test_outliers_do_not_drown_their_neighbours(backend):
    # Activations of trained models have elements a thousand times larger than the others.
    rng = np.random.default_rng(5)
    data, decoded = weights("Q8_0", rng)
    x = rng.standard_normal((1, N_IN)).astype(np.float32)
    x[0, 100] = 3000
    difference = product(backend, "Q8_0", data, x, N_OUT) - x.astype(np.float64) @ decoded.T
    assert (np.abs(difference) < rounding(x, decoded, "Q8_0")).all()
    x[:] = 0
    np.testing.assert_array_equal(product(backend, "Q8_0", data, x, N_OUT), 0)


def test_a_sum_does_not_depend_on_its_neighbours(backend):
    # Rows and tokens fall in other tiles; the bits stay, so chunking a prompt changes nothing.
    rng = np.random.default_rng(3)
    data, _ = weights("Q4_K", rng)
    x = rng.standard_normal((40, N_IN)).astype(np.float32)

    def rows(first, last):
        part = np.ascontiguousarray(x[first:last])
        return product(backend, "Q4_K", data, part, N_OUT)

    whole, few = rows(0, 40), rows(0, 4)
    np.testing.assert_array_equal(whole[:5], rows(0, 5))
    np.testing.assert_array_equal(whole[5:], rows(5, 40))
    np.testing.assert_array_equal(few[1:3], rows(1, 3))
