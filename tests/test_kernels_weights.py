"""EMBED and MATMUL against NumPy float64, for every weight type, between unmapped pages."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from guarded import in_child, runs, step_of
from tiny_models import random_tensor

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels import ops

TYPES = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
]  # fmt: skip
KERNELS = [(op, (t,)) for op in (ops.EMBED, ops.MATMUL) for t in TYPES]


def weights(type_, rng, n_out, n_in):
    """Random rows in their encoding, and what the NumPy decoder makes of them in float64."""
    data = np.ascontiguousarray(random_tensor(rng, (n_out, n_in), Type[type_])).view(np.uint8)
    decoded = dequantize(data.reshape(-1), GGMLType[type_], (n_in, n_out))
    return data.reshape(-1), decoded.astype(np.float64)


def row_sizes(type_):
    """The shortest row of a type that is a multiple of 32, and a longer one."""
    block, _ = gguf.GGML_QUANT_SIZES[Type[type_]]
    return max(32, block), 512 + max(32, block)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("type_", TYPES)
@in_child
def test_embed_decodes_rows(type_, size):
    n = row_sizes(type_)[size]
    rng = np.random.default_rng((7, n))
    data, decoded = weights(type_, rng, 7, n)
    ids = np.array([6, 0, 3, 6], np.int32)
    unwritten = np.full((4, n), np.nan, np.float32)
    for found in runs(
        ops.EMBED, (type_,), out={"y": unwritten}, step=step_of(4), ids=ids, table=data, n=n,
        scale_f=1.5,
    ):  # fmt: skip
        # d * q + m in one rounding against two in the reference: a step of the largest term.
        np.testing.assert_allclose(
            found["y"], 1.5 * decoded[ids], rtol=2e-6, atol=2e-6 * np.abs(decoded).max()
        )


# Tokens, output rows (tiles, a rest, both), with a bias, added to y.
PRODUCTS = [(1, 7, 0, 0), (4, 8, 1, 0), (5, 1, 0, 1), (9, 13, 1, 1), (37, 5, 0, 1)]


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(("n_tok", "n_out", "with_bias", "add"), PRODUCTS)
@pytest.mark.parametrize("type_", TYPES)
@in_child
def test_matmul_is_the_product(type_, n_tok, n_out, with_bias, add, size):
    n_in = row_sizes(type_)[size]
    rng = np.random.default_rng((n_tok, n_out, n_in))
    data, decoded = weights(type_, rng, n_out, n_in)
    x, bias = normal(rng, n_tok, n_in), normal(rng, n_out)
    y_stride = n_out + 3
    before = normal(rng, n_tok, y_stride)
    # The last row ends with its last product.
    flat = before.reshape(-1)[: (n_tok - 1) * y_stride + n_out]
    expected = x.astype(np.float64) @ decoded.T + with_bias * bias + add * before[:, :n_out]
    # Float32 sums of n_in products err by a few units of 1e-7 of the sum of magnitudes.
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(decoded).T + 10)
    for found in runs(
        ops.MATMUL, (type_,), out={"y": flat}, scratch=ops.matmul_scratch(n_in),
        step=step_of(n_tok, 11), x=x, w=data, bias=bias if with_bias else None, n_in=n_in,
        n_out=n_out, y_stride=y_stride, add=add,
    ):  # fmt: skip
        y = np.concatenate([found["y"], before[-1, n_out:]]).reshape(n_tok, y_stride)
        assert (np.abs(y[:, :n_out] - expected) <= bound).all()
        np.testing.assert_array_equal(y[:, n_out:], before[:, n_out:])


@in_child
def test_a_sum_does_not_depend_on_its_neighbours():
    # Rows and tokens fall in other tiles; the bits stay, so chunking a prompt changes nothing.
    n_out, n_in = 7, 512
    rng = np.random.default_rng(3)
    data, _ = weights("Q4_K", rng, n_out, n_in)
    x = normal(rng, 9, n_in)

    def products(rows):
        unwritten = np.full((len(rows), n_out), np.nan, np.float32)
        return runs(
            ops.MATMUL, ("Q4_K",), out={"y": unwritten}, scratch=ops.matmul_scratch(n_in),
            step=step_of(len(rows)), x=rows, w=data, bias=None, n_in=n_in, n_out=n_out,
            y_stride=n_out, add=0,
        )  # fmt: skip

    whole = next(iter(products(x)))["y"]
    for first, last in [(0, 9), (0, 5), (5, 9), (2, 3)]:
        for found in products(x[first:last]):
            np.testing.assert_array_equal(found["y"], whole[first:last])
