"""EMBED and MATMUL against NumPy float64, for every weight type, between unmapped pages."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from guarded import in_child, runs, step_of
from matmul_cases import check_product, in_strips, normal, packed, rounding, step_size, weights
from oracle import gelu_tanh, rms_norm, silu

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.cpu.linear.pack import SHARE

TYPES = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
]  # fmt: skip
KERNELS = [(op, (t,)) for op in (ops.EMBED, ops.MATMUL) for t in TYPES] + [
    (ops.PACK_ROWS, (form, source))
    for form in ("float", "quantised", "bytes")
    for source in ("rows", "norm", "silu", "gelu")
]
# Tiles of int16 differ by where a type has its scales and minima, not by the codes of its values.
EXACT = [ops.strip_type(t, exact=True) for t in ("Q4_1", "Q8_0", "Q3_K", "Q4_K", "IQ2_XS")]
IN_STRIPS = [t for t in ops.STRIP_TYPES if t in EXACT or not t.endswith("exact")]
KERNELS += [(ops.REPACK, (t,)) for t in set(ops.STRIP_TYPES.values())]
KERNELS += [(ops.MATMUL, (t,)) for t in IN_STRIPS]


def row_sizes(type_):
    """The shortest row of a type that is a multiple of 32, and a longer one."""
    block = GGMLType[type_].block_size
    return max(32, block), 512 + max(32, block)


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
        n_id=1, scale=1.5,
    ):  # fmt: skip
        # d * q + m in one rounding against two in the reference: a step of the largest term.
        np.testing.assert_allclose(
            found["y"], 1.5 * decoded[ids], rtol=2e-6, atol=2e-6 * np.abs(decoded).max()
        )


@pytest.mark.parametrize("n_tok", [1, 4, 17])
@pytest.mark.parametrize("type_", ["F32", "Q8_0"])
@pytest.mark.parametrize("source", ["norm", "silu", "gelu"])
@in_child
def test_rows_are_normed_or_gated_before_they_are_packed(source, type_, n_tok):
    # Products with the unit matrix are the rows that were packed; the first two are skipped.
    n = 160
    rng = np.random.default_rng((n_tok, len(source)))
    x = 3 * normal(rng, 2 + n_tok, n)
    other = normal(rng, n) if source == "norm" else normal(rng, 2 + n_tok, n)
    wide = x[2:].astype(np.float64)
    if source == "norm":
        expected = rms_norm(wide, other, 1e-3)
    else:
        expected = {"silu": silu, "gelu": gelu_tanh}[source](wide) * other[2:]
    unit = np.eye(n, dtype=np.float32)
    data = (unit if type_ == "F32" else quantize(unit, Type.Q8_0)).reshape(-1).view(np.uint8)
    decoded = dequantize(data, GGMLType[type_], (n, n)).astype(np.float64)
    bound = rounding(expected, decoded, type_, n_tok) + 3e-6 * np.abs(expected) + 1e-6
    rows = packed(x, type_, source, other, 2)
    unwritten = np.full((n_tok, n), np.nan, np.float32)
    for found in runs(
        ops.MATMUL, (type_,), out={"y": unwritten}, scratch=ops.matmul_scratch(n),
        step=step_of(n_tok), packed=rows, w=data, bias=None, n_in=n, n_out=n, y_stride=n, add=0,
    ):  # fmt: skip
        assert (np.abs(found["y"] - expected @ decoded.T) <= bound).all()


# Tokens, output rows (under a tile, a group and a rest, half a chunk), with a bias, added to y.
PRODUCTS = [
    (1, 7, 0, 0), (1, 135, 1, 1), (4, 33, 1, 0), (17, 1, 0, 1), (23, 13, 1, 1),
    (37, 135, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(("n_tok", "n_out", "with_bias", "add"), PRODUCTS)
@pytest.mark.parametrize("type_", TYPES)
@in_child
def test_matmul_is_the_product(type_, n_tok, n_out, with_bias, add, size):
    n_in = row_sizes(type_)[size]
    rng = np.random.default_rng((n_tok, n_out, n_in))
    data, decoded = weights(type_, rng, n_out, n_in)
    check_product(type_, data, decoded, normal(rng, n_tok, n_in), with_bias=with_bias, add=add)


# Tokens, strips, with a bias, added to y: each number of rows at once, under and over a tile.
STRIP_PRODUCTS = [
    (1, 3, 0, 0), (3, 1, 1, 1), (4, 2, 0, 1), (7, 5, 1, 0), (17, 3, 1, 1), (37, 5, 0, 1),
]  # fmt: skip


@pytest.mark.cpu_only
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("type_", IN_STRIPS)
@in_child
def test_strips_give_the_product_of_their_rows(type_, size):
    ggml_type = ops.STRIP_TYPES[type_]
    n_in = max(64, row_sizes(ggml_type)[0]) + 512 * size
    for n_tok, n_strip, with_bias, add in STRIP_PRODUCTS:
        rng = np.random.default_rng((n_tok, n_strip, n_in))
        n_out = ops.STRIP * n_strip
        data, decoded = weights(ggml_type, rng, n_out, n_in)
        strips = in_strips(ggml_type, data, n_out, n_in)
        x = normal(rng, n_tok, n_in)
        check_product(type_, strips, decoded, x, with_bias=with_bias, add=add)


@in_child
def test_threads_share_rows_of_x_where_units_of_weights_are_uneven():
    # Four units of 32 rows: three threads take eight of a half each.
    rng = np.random.default_rng(9)
    data, decoded = weights("Q8_0", rng, 115, 64)
    check_product("Q8_0", data, decoded, normal(rng, 131, 64), with_bias=1, add=1)


@pytest.mark.parametrize("n_in", [5, 16, 45, 300])
@pytest.mark.parametrize("type_", ["F32", "F16", "BF16"])
@in_child
def test_rows_of_floats_have_any_length(type_, n_in):
    rng = np.random.default_rng(n_in)
    for n_tok in (2, 20):
        data, decoded = weights(type_, rng, 37, n_in)
        check_product(type_, data, decoded, normal(rng, n_tok, n_in))


@in_child
def test_outliers_do_not_drown_their_neighbours():
    # Activations of trained models have elements a thousand times larger than the others.
    rng = np.random.default_rng(5)
    data, decoded = weights("Q8_0", rng, 7, 512)
    x = normal(rng, 1, 512)
    x[0, 100] = 3000
    check_product("Q8_0", data, decoded, x)


@in_child
def test_nothing_times_weights_is_zero():
    n_out, n_in = 7, 512
    data, _ = weights("Q8_0", np.random.default_rng(6), n_out, n_in)
    for y in products("Q8_0", data, np.zeros((1, n_in), np.float32), n_out):
        np.testing.assert_array_equal(y, 0)


@pytest.mark.cpu_only
@in_child
def test_each_32_elements_of_each_row_have_a_scale():
    # A row of weights is about 1 in one place: the product is the row itself, to half a step.
    rng = np.random.default_rng(5)
    x = normal(rng, 17, 160) * np.float32(10) ** rng.integers(-20, 21, (17, 160 // 32)).repeat(
        32, axis=1
    ).astype(np.float32)
    x[rng.random(17) < 0.2] = 0
    data = quantize(np.eye(160, dtype=np.float32), Type.Q8_0).reshape(-1)
    one = dequantize(data, GGMLType.Q8_0, (160, 160))[0, 0]
    for y in products("Q8_0", data, x, 160):
        assert (np.abs(y / one - x) <= 0.51 * step_size(x)).all()


def check_neighbours(type_, data, n_out, n_in, few):
    """Rows and tokens fall in other tiles; the bits stay, so chunking a prompt changes nothing.

    few: rows that are multiplied as few of them. Some have elements that are much larger.
    """
    rng = np.random.default_rng(3)
    x = normal(rng, 40, n_in)
    x[rng.random(x.shape) < 0.01] *= 30
    for first, last, parts in [(0, 40, [(0, 17), (17, 40)]), (0, few, [(1, 3), (2, few)])]:
        whole = next(iter(products(type_, data, x[first:last], n_out)))
        for a, b in parts:
            for y in products(type_, data, x[a:b], n_out):
                np.testing.assert_array_equal(y, whole[a - first : b - first])


@pytest.mark.cpu_only
@in_child
def test_many_rows_keep_outliers_and_what_is_beside_them():
    # Of 32 elements two may be a thousand times larger: the others keep steps of their own size.
    rng = np.random.default_rng(8)
    for type_ in ("Q8_0", "Q4_K", "Q6_K"):
        n_in = 512
        data, decoded = weights(type_, rng, 32, n_in)
        strips, x = in_strips(type_, data, 32, n_in), normal(rng, 37, n_in)
        steps = step_size(x, 127)
        for t in range(len(x)):  # the same channels in most rows, others in some
            at = [70 + t % 3, 85, 300]
            x[t, at] = 1000 * rng.choice([-1, 1], 3) * (1 + rng.random(3))
        expected = x.astype(np.float64) @ decoded.T
        bound = 1e-6 * np.abs(x).astype(np.float64) @ np.abs(decoded).T
        bound += 0.5001 * steps @ np.abs(decoded).T
        for y in products(ops.strip_type(type_), strips, x, 32):
            assert (np.abs(y - expected) <= bound).all()


@pytest.mark.cpu_only  # a GPU multiplies few rows and many by kernels of other orders of sums
@in_child
def test_a_sum_does_not_depend_on_its_neighbours():
    data, _ = weights("Q4_K", np.random.default_rng(3), 7, 512)
    check_neighbours("Q4_K", data, 7, 512, 4)


@pytest.mark.cpu_only
@in_child
def test_nor_does_a_sum_in_strips():
    data, _ = weights("Q4_K", np.random.default_rng(3), 48, 512)
    check_neighbours("Q4_Kx16", in_strips("Q4_K", data, 48, 512), 48, 512, 7)


@pytest.mark.cpu_only
@in_child
def test_blocks_of_several_sequences_keep_8_bits_or_all():
    # 5 to 16 rows of a batch's step: blocks larger than SHARE times the mean keep all bits.
    rng = np.random.default_rng(9)
    for type_ in ("Q8_0", "Q4_K", "Q6_K"):
        data, decoded = weights(type_, rng, 48, 512)
        strips, x = in_strips(type_, data, 48, 512), normal(rng, 16, 512)
        for t in range(len(x)):  # the same channels in most rows, others in some
            x[t, [70 + 32 * (t % 5 == 0), 300]] *= 1000
        tops = np.abs(x).reshape(16, -1, 32).max(-1)
        large = np.repeat(tops > SHARE * tops.mean(1, keepdims=True), 32, axis=1)
        assert large.any(1).all()
        steps = np.where(large, step_size(x, 127 * 128), step_size(x, 127))
        bound = 1e-6 * np.abs(x).astype(np.float64) @ np.abs(decoded).T
        bound += 0.5001 * steps @ np.abs(decoded).T
        in_x16, whole = ops.strip_type(type_), None
        for y in products(in_x16, strips, x, 48, exact_rows=4):
            assert (np.abs(y - x.astype(np.float64) @ decoded.T) <= bound).all()
            whole = y
        for first, last in ((0, 5), (3, 10), (2, 15)):  # whatever rows are beside them
            for y in products(in_x16, strips, x[first:last], 48, exact_rows=4):
                np.testing.assert_array_equal(y, whole[first:last])
        few, many = (next(products(in_x16, strips, x[:n], 48, exact_rows=4)) for n in (4, 16))
        np.testing.assert_array_equal(few, next(products(in_x16, strips, x[:4], 48)))
        assert (many[:4] != few).any()


def products(type_, data, x, n_out, exact_rows=0):
    """x @ w.T, once for each way of `runs`."""
    unwritten = np.full((len(x), n_out), np.nan, np.float32)
    for found in runs(
        ops.MATMUL, (type_,), out={"y": unwritten}, scratch=ops.matmul_scratch(x.shape[1]),
        step=step_of(len(x)), packed=packed(x, type_, exact_rows=exact_rows), w=data, bias=None,
        n_in=x.shape[1], n_out=n_out, y_stride=n_out, add=0,
    ):  # fmt: skip
        yield found["y"]
