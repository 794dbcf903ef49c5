"""Matrix products with weights in their ggml encoding: decode four rows, multiply all tokens.

A sum is made in the same order however rows and tokens are grouped, so a prompt gives the same
numbers in one chunk, in several, or token by token.
"""

from typing import Any

from numba import njit

from tamis.jit_kernels.cpu.decode import decode_of, row_bytes_of
from tamis.jit_kernels.cpu.intrinsic import load_f32, load_i32, load_i64, store_f32
from tamis.jit_kernels.cpu.tile import dots_1x1, dots_4x1, dots_4x4
from tamis.jit_kernels.ops import STEP, TILE_ROWS

R = TILE_ROWS


@njit
def panel_of(tid, n_thread, n_out):
    """The range of rows of a thread: whole tiles, as even as possible."""
    n_tile = (n_out + R - 1) // R
    return R * (n_tile * tid // n_thread), min(n_out, R * (n_tile * (tid + 1) // n_thread))


@njit
def store_sum(at, value, bias_at, bias, add):
    """Write one sum, with its bias where there is one, over or onto what is there."""
    if bias != 0:
        value += load_f32(bias_at)
    if add != 0:
        value += load_f32(at)
    store_f32(at, value)


@njit(error_model="numpy")
def multiply_tile(rows, n_row, n_in, x, x_stride, n_tok, sums, y, y_stride, bias, add):
    """The products of up to R decoded rows with all tokens, written to y."""
    for t in range(0, n_tok, R):
        n_col = min(R, n_tok - t)
        if n_row == R and n_col == R:
            dots_4x4(rows, n_in, x + x_stride * t, x_stride, sums)
        elif n_row == R:
            for j in range(n_col):
                dots_4x1(rows, n_in, x + x_stride * (t + j), x_stride, sums + 16 * j)
        else:
            for i in range(n_row):
                for j in range(n_col):
                    row = rows + 4 * n_in * i
                    dots_1x1(row, n_in, x + x_stride * (t + j), x_stride, sums + 16 * j + 4 * i)
        by_row = n_row == R and n_col == R
        for i in range(n_row):
            for j in range(n_col):
                at = sums + (16 * i + 4 * j if by_row else 16 * j + 4 * i)
                store_sum(y + y_stride * (t + j) + 4 * i, load_f32(at), bias + 4 * i, bias, add)


def matmul(type: str) -> Any:
    """Kernel of MATMUL: each thread decodes its rows once and uses them for all tokens."""
    decode, row_bytes = decode_of(type), row_bytes_of(type)

    def kernel(tid, n_thread, step, x, w, bias, y, n_in, n_out, y_stride, add, scratch):
        n_tok = load_i64(step + STEP.n_tok)
        size = row_bytes(n_in)
        rows = scratch + tid * (R * 4 * n_in + 256)
        sums = rows + R * 4 * n_in
        first, last = panel_of(tid, n_thread, n_out)
        for r in range(first, last, R):
            n_row = min(R, last - r)
            for i in range(n_row):
                decode(w + size * (r + i), n_in, rows + 4 * n_in * i)
            b = bias + 4 * r if bias != 0 else 0
            multiply_tile(
                rows, n_row, n_in, x, 4 * n_in, n_tok, sums,
                y + 4 * r, 4 * y_stride, b, add,
            )  # fmt: skip

    return kernel


def moe_matmul(type: str) -> Any:
    """Kernel of MOE_MATMUL: a token's row with the rows of each expert it was sent to."""
    decode, row_bytes = decode_of(type), row_bytes_of(type)

    def kernel(tid, n_thread, step, x, w, ids, y, n_in, n_out, n_used, x_per_slot, scratch):
        size = row_bytes(n_in)
        rows = scratch + tid * (R * 4 * n_in + 256)
        sums = rows + R * 4 * n_in
        first, last = panel_of(tid, n_thread, n_out)
        for slot in range(load_i64(step + STEP.n_tok) * n_used):
            expert = w + size * n_out * load_i32(ids + 4 * slot)
            source = x + 4 * n_in * (slot if x_per_slot != 0 else slot // n_used)
            for r in range(first, last, R):
                n_row = min(R, last - r)
                for i in range(n_row):
                    decode(expert + size * (r + i), n_in, rows + 4 * n_in * i)
                multiply_tile(
                    rows, n_row, n_in, source, 4 * n_in, 1, sums,
                    y + 4 * (n_out * slot + r), 0, 0, 0,
                )  # fmt: skip

    return kernel
