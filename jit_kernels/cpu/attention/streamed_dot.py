"""Dot products of a few queries with many rows; each row is read once for all queries."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.types import kv_row
from tamis.jit_kernels.cpu.attention.attend_batch import N_REGISTER
from tamis.jit_kernels.cpu.kv.kv_rows import loading_each
from tamis.jit_kernels.cpu.lang.intrinsic import load_i32, store_i32
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_products,
    addresses,
    load_column,
    load_half_each,
    neighbours,
    prefetch_each,
    store_sums,
    zero_grid,
)
from tamis.jit_kernels.cpu.lang.simd import LANES


def rows_at_once(n_query: int, n_row: int = 8) -> int:
    """Rows to multiply at once: a divisor of n_row whose accumulators fit the registers."""
    fits = [n for n in (1, 2, 4, 8) if n_row % n == 0 and n_query * n + n <= N_REGISTER]
    return max(fits, default=1)


def sweeping(size: int, n_query: int, n_row: int, type: str = "f16") -> Any:
    """The function sweep(queries, rows, ahead, out, stride): n_query queries times n_row rows.

    queries f32 [n_query, size], rows [n_row] of kv_row(type, size); out + stride * query gets n_row
    float32s. As many rows at `ahead` (any address) are prefetched.
    """
    n = rows_at_once(n_query, n_row)
    q_size, row_size, load = 4 * size, kv_row(type, size).itemsize, loading_each(type, size)

    @njit(error_model="numpy")
    def sweep(queries, rows, ahead, out, stride):
        for j in range(0, n_row, n):
            at = neighbours(rows + row_size * j, row_size, n)
            prefetch_each(neighbours(ahead + row_size * j, row_size, n), row_size)
            sums = zero_grid(n_query, n)
            for d in range(0, size, LANES):
                column = load_column(queries + 4 * d, q_size, n_query)
                sums = add_products(sums, column, load(at, d))
            store_sums(out + 4 * j, stride, sums)

    return sweep


AHEAD = 16  # rows between a prefetched one and the one being read: 32 lines of 64 float16


def picking(size: int, n_query: int) -> Any:
    """The function pick(queries, rows, picks, n, out, stride): like `sweeping`, by row index.

    picks: n int32 row indices; n is rounded up to a multiple of 8 with the last one, and as many
    float32s are written.
    """
    n_at_once = rows_at_once(n_query)
    q_size, row_size = 4 * size, 2 * size

    @njit(error_model="numpy")
    def pick(queries, rows, picks, n, out, stride):
        for i in range(n, (n + 7) // 8 * 8):
            store_i32(picks + 4 * i, load_i32(picks + 4 * (n - 1)))
        for i in range(0, n, n_at_once):
            ahead = picks + 4 * min(i + AHEAD, (n - 1) // 8 * 8)
            prefetch_each(addresses(ahead, rows, row_size, n_at_once), row_size)
            at = addresses(picks + 4 * i, rows, row_size, n_at_once)
            sums = zero_grid(n_query, n_at_once)
            for d in range(0, size, LANES):
                column = load_column(queries + 4 * d, q_size, n_query)
                sums = add_products(sums, column, load_half_each(at, 2 * d))
            store_sums(out + 4 * i, stride, sums)

    return pick


def sweeping_up_to(size: int, most: int, n_row: int, type: str) -> Any:
    """A function like `sweeping`, with the number of queries (1 to most) as the first argument.

    For some numbers more queries are read and more rows of out are written, never beyond `most`.
    """
    n_some, n_several = max(1, most // 3), max(1, 2 * most // 3)
    few, some = sweeping(size, 1, n_row, type), sweeping(size, n_some, n_row, type)
    several, many = sweeping(size, n_several, n_row, type), sweeping(size, most, n_row, type)

    @njit(error_model="numpy")
    def sweep(n, queries, rows, ahead, out, stride):
        if n == 1:
            few(queries, rows, ahead, out, stride)
        elif n <= n_some:
            some(queries, rows, ahead, out, stride)
        elif n <= n_several:
            several(queries, rows, ahead, out, stride)
        else:
            many(queries, rows, ahead, out, stride)

    return sweep
