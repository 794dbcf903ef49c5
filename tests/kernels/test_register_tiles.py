"""Grids of vectors against NumPy, at every level the CPU can run."""

import numpy as np
import pytest
from levels import EMULATED, call, run_at
from numba import njit

from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_bytes,
    add_outer,
    add_outer_eights,
    add_outer_in_shorts,
    add_products,
    add_scaled_twice,
    add_scaled_words,
    addresses,
    broadcast_column,
    broadcast_words,
    load_byte_row,
    load_column,
    load_grid,
    load_half_each,
    load_half_row,
    load_row,
    load_word_row,
    neighbours,
    paired,
    prefetch_each,
    scale_rows,
    store_folded,
    store_grid,
    store_sums,
    transposed,
    unpaired,
    zero_grid,
    zero_word_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    count_i,
    load_f,
    load_i,
    splat_f,
    splat_i,
    store_f,
    store_i,
    where_less,
)
from tamis.jit_kernels.cpu.runtime.compiler import OPTIONS


@pytest.fixture(params=["generic", "avx2", "avx512", *EMULATED])
def level(request):
    return request.param


def run(kernel, *arrays):
    call(njit(**OPTIONS)(kernel), *arrays)


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def check_matrix_product():
    """out [3, 2 * LANES] = 2 * out + x [3, 5] @ y [5, 2 * LANES] with y in float16."""
    x, y = floats(3, 5), floats(5, 2 * LANES).astype(np.float16)
    start, two = floats(3, 2 * LANES), np.full(1, 2, np.float32)
    out = start.copy()
    x_size, y_size, out_size = 20, 4 * LANES, 8 * LANES

    def kernel(x, y, two, out):
        factor = broadcast_column(two, 0, 3)
        sums = scale_rows(load_grid(out, out_size, 3, 2), factor)
        for k in range(5):
            row = load_half_row(y + y_size * k, 2)
            sums = add_products(sums, broadcast_column(x + 4 * k, x_size, 3), row)
        store_grid(out, out_size, sums)

    run(kernel, x, y, two, out)
    want = 2 * start + x.astype(np.float64) @ y.astype(np.float64)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)  # six roundings


def test_a_matrix_product(level):
    run_at(level, check_matrix_product)


def check_outer_products():
    """out [3, 2 * LANES] += x [3, 5] @ y, rows of out six floats further apart than needed."""
    x, y, start = floats(3, 5), floats(5, 2 * LANES), floats(3, 2 * LANES + 6)
    out, x_size, y_size = start.copy(), 20, 8 * LANES

    def kernel(x, y, out, out_size):
        sums = load_grid(out, out_size, 3, 2)
        for k in range(5):
            sums = add_outer(sums, x + 4 * k, x_size, load_row(y + y_size * k, 2))
        store_grid(out, out_size, sums)

    compiled = njit(**OPTIONS)(kernel)
    call(compiled, x, y, out, 4 * out.shape[1])
    want = start.astype(np.float64)
    want[:, : 2 * LANES] += x.astype(np.float64) @ y
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_outer_products(level):
    run_at(level, check_outer_products)


def check_words():
    """out += scales * (x int16 [3, 4] @ y int16 [4, 2 * LANES]), y in pairs of rows.

    twice: each half of the four products has scales of its own.
    """
    rng = np.random.default_rng(1)
    x = rng.integers(-4095, 4096, (3, 4)).astype(np.int16)
    y = rng.integers(-8191, 8192, (4, 2 * LANES)).astype(np.int16)
    pairs = np.ascontiguousarray(y.reshape(2, 2, 2 * LANES).transpose(0, 2, 1))
    x_scales, y_scales, start = floats(3), floats(2, 2 * LANES), floats(3, 2 * LANES)
    out, twice, row, x_size = start.copy(), start.copy(), 8 * LANES, 8

    def kernel(x, pairs, x_scales, y_scales, out, twice):
        words = zero_word_grid(3, 2)
        for k in range(2):
            words = add_outer(words, x + 4 * k, x_size, load_word_row(pairs + row * k, 2))
        column, scales = broadcast_column(x_scales, 4, 3), load_row(y_scales, 2)
        grid = add_scaled_words(load_grid(out, row, 3, 2), words, column, scales)
        store_grid(out, row, grid)
        first = add_outer(zero_word_grid(3, 2), x, x_size, load_word_row(pairs, 2))
        last = add_outer(zero_word_grid(3, 2), x + 4, x_size, load_word_row(pairs + row, 2))
        grid, next = load_grid(twice, row, 3, 2), load_row(y_scales + row, 2)
        store_grid(twice, row, add_scaled_twice(grid, first, last, column, scales, next))

    run(kernel, x, pairs, x_scales, y_scales, out, twice)
    products = [x[:, i : i + 2].astype(np.int64) @ y[i : i + 2].astype(np.int64) for i in (0, 2)]
    column = x_scales[:, None].astype(np.float64)
    want = start + sum(products) * column * y_scales[0]
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=10)  # products near 1e8
    want = start + (products[0] * y_scales[0] + products[1] * y_scales[1].astype(float)) * column
    np.testing.assert_allclose(twice, want, rtol=1e-6, atol=10)


def test_products_of_words(level):
    run_at(level, check_words)


def check_bytes():
    """Dot products of 3 rows of signed bytes with 4 rows of up to 127 that lie four by four."""
    rng, n = np.random.default_rng(2), 2 * LANES
    x = rng.integers(-127, 128, (3, n)).astype(np.int8)
    y = rng.integers(0, 128, (4, n)).astype(np.uint8)
    x[0], y[0] = 127, 127
    each = np.repeat(x.reshape(3, -1, 1, 4), 4, axis=2).copy()
    woven, out = y.reshape(4, -1, 4).swapaxes(0, 1).copy(), np.zeros((3, 4), np.int32)
    row = 4 * n

    def kernel(x, y, out):
        sums = zero_word_grid(3, 1)
        for d in range(0, 8 * LANES, 4 * LANES):
            sums = add_bytes(sums, x + d, row, y + d)
        store_folded(out, 16, sums)

    run(kernel, each, woven, out)
    np.testing.assert_array_equal(out, x.astype(int) @ y.astype(int).T)


def test_products_of_bytes(level):
    run_at(level, check_bytes)


def check_products_in_shorts(most):
    """Eight words of the largest bytes: sums in 16 bits do not wrap; and random ones."""
    rng, n = np.random.default_rng(most), 8
    x = rng.integers(-127, 128, (3, 4 * n)).astype(np.int8)
    x[0], x[1] = 127, -127
    w = rng.integers(0, most + 1, (2, n, 2 * LANES, 4))
    w[:, :, ::2] = most
    w[1] *= rng.choice([-1, 1], w[1].shape)
    w[1, :, ::4] = -most
    bytes_, out = w.astype(np.int8), np.zeros((2, 3, 2 * LANES), np.float32)
    ones = np.ones(2 * LANES, np.float32)
    before = rng.integers(-1000, 1000, (3, 1)).astype(np.int32)
    size = 8 * LANES

    def kernel(x, w, before, ones, out):
        column, row, nothing = broadcast_column(ones, 4, 3), load_row(ones, 2), zero_grid(3, 2)
        words, rows = broadcast_words(before, 3, 2, 1), neighbours(x, 32, 3)
        plain = add_outer_in_shorts(words, rows, w, 8, most, 0)
        signed = add_outer_in_shorts(words, rows, w + 8 * size, 8, most, 1)
        store_grid(out, size, add_scaled_words(nothing, plain, column, row))
        store_grid(out + 3 * size, size, add_scaled_words(nothing, signed, column, row))

    run(kernel, x, bytes_, before, ones, out)
    rows = x.reshape(3, n, 4).astype(int)
    np.testing.assert_array_equal(out, before + np.einsum("rkb,skjb->srj", rows, w))


@pytest.mark.parametrize("most", [3, 15, 31, 63, 126])
@pytest.mark.parametrize("of", ["avx2", "avx512"])
def test_products_in_shorts(of, most):
    run_at(of, check_products_in_shorts, most)


def check_products_of_eights():
    """Four rows of sixteen signed bytes with rows of weights, eight elements of each together."""
    rng, n_row = np.random.default_rng(6), 2 * LANES
    x = rng.integers(-127, 128, (4, 16)).astype(np.int8)
    w = rng.integers(-128, 128, (n_row, 16)).astype(np.int8)
    x[0], w[0] = 127, -128
    start = np.array([-1000, 5, 0, 70000], np.int32)
    woven, row, step = w.reshape(n_row, 2, 8).swapaxes(0, 1).copy(), 4 * n_row, 8 * n_row
    out, column = np.zeros((4, n_row), np.float32), np.zeros((2, n_row), np.float32)

    def kernel(x, w, start, ones, out, column):
        factors, row_of_ones = broadcast_column(ones, 4, 4), load_row(ones, 2)
        words = paired(broadcast_words(start, 4, 2, 1))
        for i in range(2):
            words = add_outer_eights(words, x + 8 * i, 16, w + step * i)
        sums = add_scaled_words(zero_grid(4, 2), unpaired(words), factors, row_of_ones)
        store_grid(out, row, sums)
        store_grid(column, row, load_byte_row(w, 16, 2, 3, 1, 2))
        store_grid(column + row, row, load_byte_row(w + 4, 0, 2, 0, 0, 2))

    ones = np.ones(n_row, np.float32)
    call(njit(**OPTIONS)(kernel), x, woven, start, ones, out, column)
    np.testing.assert_array_equal(out, start[:, None] + x.astype(int) @ w.T.astype(int))
    np.testing.assert_array_equal(column[0], w[:, 2].astype(int) - 3)
    np.testing.assert_array_equal(column[1], w[:, 4].view(np.uint8))


def test_products_of_eights(level):
    run_at(level, check_products_of_eights)


def check_dot_products():
    """Dot products of 3 queries with the float16 keys 5, 0, 6 and 2 of a table."""
    q, table = floats(3, 2 * LANES), floats(7, 2 * LANES).astype(np.float16)
    picks, out = np.array([9, 5, 0, 6, 2], np.int32), np.zeros((3, 4), np.float32)
    q_size, row_size = 8 * LANES, 4 * LANES

    def kernel(q, table, picks, out):
        keys = addresses(picks + 4, table, row_size, 4)
        prefetch_each(neighbours(table, row_size, 7), row_size)  # changes nothing
        sums = zero_grid(3, 4)
        for d in range(0, 2 * LANES, LANES):
            column = load_column(q + 4 * d, q_size, 3)
            sums = add_products(sums, column, load_half_each(keys, 2 * d))
        store_sums(out, 16, sums)

    run(kernel, q, table, picks, out)
    want = q.astype(np.float64) @ table[picks[1:]].T.astype(np.float64)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)  # sums of 32 numbers near 1


def test_dot_products_with_rows_of_a_table(level):
    run_at(level, check_dot_products)


def check_neighbours():
    """Dot products of 2 queries with the rows 2, 3, 4 and 5 of a table."""
    q, table = floats(2, LANES), floats(7, LANES).astype(np.float16)
    out, q_size, row_size = np.zeros((2, 4), np.float32), 4 * LANES, 2 * LANES

    def kernel(q, table, out):
        rows, sums = neighbours(table + 2 * row_size, row_size, 4), zero_grid(2, 4)
        for d in range(0, LANES, LANES):
            sums = add_products(sums, load_column(q, q_size, 2), load_half_each(rows, 2 * d))
        store_sums(out, 16, sums)

    run(kernel, q, table, out)
    want = q.astype(np.float64) @ table[2:6].T.astype(np.float64)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)  # sums of 16 numbers near 1


def test_dot_products_with_neighbouring_rows(level):
    run_at(level, check_neighbours)


def check_transpose():
    x = floats(LANES, LANES)
    out, size = np.zeros_like(x), 4 * LANES

    def kernel(x, out):
        store_grid(out, size, transposed(load_row(x, LANES)))

    run(kernel, x, out)
    np.testing.assert_array_equal(out, x.T)


def test_transpose(level):
    run_at(level, check_transpose)


def check_choice():
    x = floats(LANES)
    out, counts = np.zeros_like(x), np.zeros(LANES, np.int32)

    def kernel(x, out, counts):
        store_f(out, where_less(load_f(x), splat_f(0.0), splat_f(-1.0), load_f(x)))
        store_i(counts, where_less(count_i(), splat_i(3), count_i(), splat_i(7)))
        store_i(counts, load_i(counts) + splat_i(1))

    run(kernel, x, out, counts)
    np.testing.assert_array_equal(out, np.where(x < 0, np.float32(-1), x))
    np.testing.assert_array_equal(counts, np.where(np.arange(LANES) < 3, np.arange(LANES), 7) + 1)


def test_lanes_are_chosen_by_comparison(level):
    run_at(level, check_choice)
