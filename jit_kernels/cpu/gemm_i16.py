"""Tiles of int16 for CPUs with VNNI, which multiply and add two pairs of them in a lane at once.

DEPTH elements of a row share a scale: x = s * v with whole numbers of 14 bits, sign included, so
that the int32 sum of DEPTH products cannot overflow. The error is at most a 16382nd of the largest
of those elements, for activations as for weights.

A block is int16 [MR, DEPTH], then scales f32 [16]; a panel int16 [DEPTH / 2, NR, 2], then scales
f32 [NR].
"""

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.grid import (
    add_outer,
    add_scaled_words,
    broadcast_column,
    load_grid,
    load_row,
    load_word_row,
    store_grid,
    zero_word_grid,
)
from tamis.jit_kernels.cpu.intrinsic import load_f32, store_f32, store_i16
from tamis.jit_kernels.cpu.panel import DEPTH, MR, NR, NV, ROW, WORD_ROW, clear, transpose_words
from tamis.jit_kernels.cpu.simd import (
    LANES,
    hmax,
    load_f,
    load_f32x16,
    round_i32,
    shift_left,
    splat_f,
    splat_f32x16,
    splat_i32x16,
    store_f32x16,
    store_i32x16,
    store_low_words,
    vabs,
    vmax,
    where_less,
    zero_f,
    zero_f32x16,
)
from tamis.jit_kernels.ops import STRIP

X_ROW = 2 * DEPTH
SCALES = DEPTH // 2 * WORD_ROW  # where a panel's are
BLOCK, PANEL = MR * X_ROW + 64, SCALES + WORD_ROW  # bytes
LARGEST = np.float32(8191)
assert DEPTH * 8191 * 8191 < 2**31
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)


@njit(error_model="numpy")
def shorten(x, to):
    """Write DEPTH floats as whole numbers up to LARGEST; their scale. to may be x."""
    top = zero_f()
    for k in range(0, DEPTH, LANES):
        top = vmax(vabs(load_f(x + 4 * k)), top)
    most = hmax(top)
    factor = splat_f(LARGEST / most if most > ZERO else ZERO)
    for k in range(0, DEPTH, LANES):
        store_low_words(to + 2 * k, round_i32(load_f(x + 4 * k) * factor))
    return most / LARGEST


@njit(error_model="numpy")
def shorten_part(x, n, to):
    """The same for n < DEPTH floats; zeros follow."""
    clear(to, 2 * DEPTH)
    most = ZERO
    for k in range(n):
        most = max(most, abs(load_f32(x + 4 * k)))
    factor = LARGEST / most if most > ZERO else ZERO
    for k in range(n):
        store_i16(to + 2 * k, np.int64(np.floor(load_f32(x + 4 * k) * factor + HALF)))
    return most / LARGEST


@njit(error_model="numpy")
def pack_row(x, n, block, i):
    """Row i of a block: n <= DEPTH floats, then zeros."""
    row = block + X_ROW * i
    scale = shorten(x, row) if n == DEPTH else shorten_part(x, n, row)
    store_f32(block + MR * X_ROW + 4 * i, scale)


@njit(error_model="numpy")
def pack_panel(rows, panel):
    """The panel of NR decoded rows, ROW bytes apart; they may be used up."""
    for i in range(NR):
        row = rows + ROW * i
        store_f32(panel + SCALES + 4 * i, shorten(row, row))
    for k in range(0, DEPTH // 2, LANES):
        transpose_words(rows + 4 * k, panel + WORD_ROW * k)


@njit(error_model="numpy")
def pack_strip(floats, panel, first):
    """STRIP of a panel's rows, from `first` on: f32 [DEPTH, STRIP]."""
    most = zero_f32x16()
    for k in range(DEPTH):
        most = vmax(vabs(load_f32x16(floats + 4 * STRIP * k)), most)
    store_f32x16(panel + SCALES + 4 * first, most * splat_f32x16(ONE / LARGEST))
    zero = zero_f32x16()
    factor = where_less(zero, most, splat_f32x16(LARGEST) / most, zero)
    for k in range(0, DEPTH, 2):
        row = floats + 4 * STRIP * k
        even = round_i32(load_f32x16(row) * factor) & splat_i32x16(0xFFFF)
        odd = shift_left(round_i32(load_f32x16(row + 4 * STRIP) * factor), 16)
        store_i32x16(panel + WORD_ROW * (k // 2) + 4 * first, even | odd)


@njit(error_model="numpy")
def add_tile(panel, block, y, stride):
    """Add the products of a block's and a panel's rows to MR rows of NR floats at y."""
    words = zero_word_grid(MR, NV)
    for k in range(DEPTH // 2):
        words = add_outer(words, block + 4 * k, X_ROW, load_word_row(panel + WORD_ROW * k, NV))
    x_scales, w_scales = broadcast_column(block + MR * X_ROW, 4, MR), load_row(panel + SCALES, NV)
    sums = load_grid(y, stride, MR, NV)
    store_grid(y, stride, add_scaled_words(sums, words, x_scales, w_scales))
