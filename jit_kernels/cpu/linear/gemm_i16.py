"""Tiles of int16 for CPUs with VNNI, which multiply and add two pairs of them in a lane at once.

DEPTH elements of a row share a scale: x = s * v with integers of 14 bits, sign included, so that
the int32 sum of DEPTH products cannot overflow. The error is at most a 16382nd of the largest of
those elements, for activations as for weights.

Weights in strips are integers already, times a scale, plus a minimum if the type has one: these are
exact, and a minimum is multiplied with the sum of a row's DEPTH elements.

A block is int16 [MR, DEPTH], then scales f32 [16], then sums f32 [16]; a panel int16 [DEPTH / 2,
NR, 2], then scales f32 [NR], then minima f32 [NR].
"""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STRIP, strip_block
from tamis.jit_kernels.cpu.lang.byte_tiles import shorts, signed_shorts, store_spaced, times_words
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, store_f32, store_i16
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_outer,
    add_products,
    add_scaled_words,
    broadcast_column,
    load_grid,
    load_row,
    load_word_row,
    store_grid,
    zero_word_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    hmax,
    hsum,
    load_f,
    load_f16x16,
    load_f32x16,
    round_i32,
    shift_left,
    splat_f,
    splat_f32x16,
    splat_i32x16,
    store_f32x16,
    store_i32x16,
    store_low_words,
    to_f32,
    vabs,
    vmax,
    zero_f,
)
from tamis.jit_kernels.cpu.linear.interleaved import OF_TYPE, decoder_of, signed_bytes
from tamis.jit_kernels.cpu.linear.panel import (
    DEPTH,
    MR,
    NR,
    NV,
    ROW,
    WORD_ROW,
    block_at,
    clear,
    transpose_words,
)

X_ROW, ROW_OF_STRIP = 2 * DEPTH, 4 * STRIP
X_SCALES, X_SUMS = MR * X_ROW, MR * X_ROW + 64  # their offsets in a block
SCALES, MINIMA = DEPTH // 2 * WORD_ROW, (DEPTH // 2 + 1) * WORD_ROW  # their offsets in a panel
BLOCK, PANEL = X_SUMS + 64, MINIMA + WORD_ROW  # bytes
IN_TURN = 1  # blocks that a panel is multiplied with one after another
LARGEST = np.float32(8191)
assert DEPTH * 8191 * 8191 < 2**31
ZERO, ONE, HALF, TINY = np.float32(0), np.float32(1), np.float32(0.5), np.float32(1e-30)


@njit(error_model="numpy")
def shorten(x, to):
    """Write DEPTH floats as integers up to LARGEST; returns their scale and their sum.

    to may be x.
    """
    top = zero_f()
    for k in range(0, DEPTH, LANES):
        top = vmax(vabs(load_f(x + 4 * k)), top)
    most = hmax(top)
    factor, total = splat_f(LARGEST / most if most > ZERO else ZERO), zero_f()
    for k in range(0, DEPTH, LANES):
        whole = round_i32(load_f(x + 4 * k) * factor)
        store_low_words(to + 2 * k, whole)
        total += to_f32(whole)
    scale = most / LARGEST
    return scale, hsum(total) * scale


@njit(error_model="numpy")
def shorten_part(x, n, to):
    """Do the same for n < DEPTH floats, padded with zeros."""
    clear(to, 2 * DEPTH)
    most = ZERO
    for k in range(n):
        most = max(most, abs(load_f32(x + 4 * k)))
    factor, total = LARGEST / most if most > ZERO else ZERO, np.int64(0)
    for k in range(n):
        whole = np.int64(np.floor(load_f32(x + 4 * k) * factor + HALF))
        store_i16(to + 2 * k, whole)
        total += whole
    scale = most / LARGEST
    return scale, np.float32(total) * scale


@njit(error_model="numpy")
def pack_row(x, n, blocks, slice_size, i, spare):
    """Write row i of the blocks of n floats, padded with zeros."""
    for k in range(0, n, DEPTH):
        block, rest = block_at(blocks, slice_size, k, BLOCK), min(DEPTH, n - k)
        row, at = block + X_ROW * i, x + 4 * k
        scale, total = shorten(at, row) if rest == DEPTH else shorten_part(at, rest, row)
        store_f32(block + X_SCALES + 4 * i, scale)
        store_f32(block + X_SUMS + 4 * i, total)


@njit(error_model="numpy")
def start_blocks(n_block, n_row, block):
    """Write zeros where n_row rows do not fill the blocks."""
    if n_row < MR:
        clear(block, n_block * BLOCK)


@njit(error_model="numpy")
def pack_panel(rows, panel):
    """Write the panel of NR decoded rows, ROW bytes apart, which may be overwritten."""
    for i in range(NR):
        row = rows + ROW * i
        store_f32(panel + SCALES + 4 * i, shorten(row, row)[0])
    for k in range(0, DEPTH // 2, LANES):
        transpose_words(rows + 4 * k, panel + WORD_ROW * k)


def strip_writer(type: str) -> Any:
    """The function write(strip, k, panel, first, spare): STRIP of a panel's rows, from `first` on.

    It writes elements k .. k + DEPTH of a strip, whose values are integers; spare: 2560 bytes.
    """
    block, unit, _, values, scales, zero, signed = OF_TYPE[type]
    strip_size, minima, middle = STRIP * strip_block(type), zero is None, zero or 0

    @njit(error_model="numpy")
    def write(strip, k, panel, first, spare):
        at, i = strip + k // block * strip_size, k % block // unit
        d, m = scales(at, i)
        store_f32x16(panel + SCALES + 4 * first, d)
        if minima:
            store_f32x16(panel + MINIMA + 4 * first, m)
        words = signed_shorts(values(at, i)) if signed else shorts(values(at, i), middle)
        store_spaced(panel + 4 * first, WORD_ROW, words)

    @njit(error_model="numpy")
    def write_scaled(strip, k, panel, first, spare):
        at, i = strip + k // block * strip_size, k % block // unit
        store_f32x16(panel + SCALES + 4 * first, load_f16x16(at))
        for half in range(2):
            words = times_words(shorts(values(at, i + half), middle), signed_bytes(at, i + half))
            store_spaced(panel + WORD_ROW * 8 * half + 4 * first, WORD_ROW, words)

    decode = decoder_of(type)

    @njit(error_model="numpy")
    def write_rounded(strip, k, panel, first, spare):
        """Write elements with two minima or scales of other forms, rounded by `shorten`."""
        decode(strip, k, spare, spare + DEPTH * ROW_OF_STRIP)
        top = splat_f32x16(ZERO)
        for j in range(DEPTH):
            top = vmax(vabs(load_f32x16(spare + ROW_OF_STRIP * j)), top)
        factor = splat_f32x16(LARGEST) / vmax(top, splat_f32x16(TINY))
        store_f32x16(panel + SCALES + 4 * first, top * splat_f32x16(ONE / LARGEST))
        store_f32x16(panel + MINIMA + 4 * first, splat_f32x16(ZERO))
        for j in range(0, DEPTH, 2):
            low = round_i32(load_f32x16(spare + ROW_OF_STRIP * j) * factor)
            high = round_i32(load_f32x16(spare + ROW_OF_STRIP * (j + 1)) * factor)
            words = (low & splat_i32x16(0xFFFF)) | shift_left(high, 16)
            store_i32x16(panel + WORD_ROW * (j // 2) + 4 * first, words)

    if unit == DEPTH:
        return write
    return write_rounded if minima or signed else write_scaled


def tiles_of(type: str | None) -> Any:
    """The function add(panels, blocks, n, y, stride): adds n products to MR rows of NR floats at y.

    type: of the strips that the panels are made of; None: of decoded rows.
    """
    minima = type is not None and OF_TYPE[type].zero is None

    @njit(error_model="numpy")
    def add_tile(panel, block, y, stride):
        words = zero_word_grid(MR, NV)
        for k in range(DEPTH // 2):
            words = add_outer(words, block + 4 * k, X_ROW, load_word_row(panel + WORD_ROW * k, NV))
        x_scales = broadcast_column(block + X_SCALES, 4, MR)
        w_scales = load_row(panel + SCALES, NV)
        sums = add_scaled_words(load_grid(y, stride, MR, NV), words, x_scales, w_scales)
        if minima:
            x_sums = broadcast_column(block + X_SUMS, 4, MR)
            sums = add_products(sums, x_sums, load_row(panel + MINIMA, NV))
        store_grid(y, stride, sums)

    @njit(error_model="numpy")
    def add_tiles(panels, blocks, n, y, stride):
        for i in range(n):
            add_tile(panels + PANEL * i, blocks + BLOCK * i, y, stride)

    return add_tiles
