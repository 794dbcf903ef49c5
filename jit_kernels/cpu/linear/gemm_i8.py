"""Tiles of int8: integer weights of strips, times activations of 8 bits.

DEPTH elements of a row of activations share a scale, x = s * v with -127 <= v <= 127. If one is
much larger than the elements of the row's other blocks, its neighbours would lose their bits: up to
OUTLIERS of DEPTH elements are left out (v = 0) and multiplied as floats, each with its column of
weights. The choice depends on the row alone, and a row's outliers are added in the order of k, so a
sum does not depend on the rows that are packed beside it.

A block is int8 [MR, DEPTH]; scales f32 [R], R: MR or a little more; sums s * v f32 [R]; sums of v
int32 [3, R], of all, of the first and of the last sixteen; then the number of channels with an
outlier in some row, int32; these channels, int32 [SLOTS], ascending; their elements f32 [SLOTS, R],
0 in rows where they are not outliers. A panel is bytes [DEPTH / 4, NR, 4], then scales f32 [NR],
then minima f32 [NR] or the scales of the second sixteen. If a CPU multiplies matrices (I8MM), the
bytes are [DEPTH / 8, NR, 8].
"""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STRIP, strip_block
from tamis.jit_kernels.cpu.lang.byte_tiles import offset_bytes, store_eights, store_spaced
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, store_f32, store_i32
from tamis.jit_kernels.cpu.lang.register_tiles import (
    BYTE_OFFSET,
    add_outer_bytes,
    add_outer_eights,
    add_outer_in_shorts,
    add_products,
    add_scaled_twice,
    add_scaled_words,
    broadcast_column,
    broadcast_words,
    load_byte_row,
    load_grid,
    load_row,
    load_word_row,
    neighbours,
    paired,
    plus_row,
    store_grid,
    times_row,
    unpaired,
)
from tamis.jit_kernels.cpu.lang.simd import (
    CPU,
    LANES,
    hmax,
    hsum,
    load_f,
    round_i32,
    splat_f,
    store_f,
    store_f32x16,
    store_low_bytes,
    vabs,
    vmax,
    zero_f,
)
from tamis.jit_kernels.cpu.linear.interleaved import OF_TYPE
from tamis.jit_kernels.cpu.linear.panel import DEPTH, NR, NV, WORD_ROW, block_at, clear

# Sums of floats and of words fill the registers: 32 of 512 bits, 16 of 256.
MR, R = (7, 8) if CPU.avx512 else (4, 4) if CPU.i8mm else (3, 4)
OUTLIERS = 2  # most outliers among a row's DEPTH elements
SLOTS = OUTLIERS * MR
# an outlier is larger than this times the mean of the blocks' largest elements
SHARE = np.float32(2)
SCALES = DEPTH * MR
SUMS, WHOLE = SCALES + 4 * R, SCALES + 8 * R
COUNT = WHOLE + 12 * R
CHANNELS = COUNT + 4
VALUES = CHANNELS + 4 * SLOTS
BLOCK = -(-(VALUES + 4 * R * SLOTS) // 64) * 64
W_SCALES, W_MINIMA = DEPTH // 4 * WORD_ROW, (DEPTH // 4 + 1) * WORD_ROW
PANEL = W_MINIMA + WORD_ROW
IN_TURN = 4  # blocks that a panel is multiplied with while it is in the first-level cache
ZERO, LARGEST = np.float32(0), np.float32(127)


# ---- activations ---------------------------------------------------------------------------------
@njit(error_model="numpy")
def largest_of(x):
    """The largest magnitude of DEPTH floats."""
    top = zero_f()
    for k in range(0, DEPTH, LANES):
        top = vmax(vabs(load_f(x + 4 * k)), top)
    return hmax(top)


@njit(error_model="numpy")
def add_outlier(block, channel, i, value):
    """Store an element of row i that is left out of a block."""
    count, slot = load_i32(block + COUNT), 0
    while slot < count and load_i32(block + CHANNELS + 4 * slot) < channel:
        slot += 1
    if slot == count or load_i32(block + CHANNELS + 4 * slot) != channel:
        for j in range(count, slot, -1):
            store_i32(block + CHANNELS + 4 * j, load_i32(block + CHANNELS + 4 * (j - 1)))
            for r in range(R):
                at = block + VALUES + 4 * (R * j + r)
                store_f32(at, load_f32(at - 4 * R))
        store_i32(block + CHANNELS + 4 * slot, channel)
        for r in range(R):
            store_f32(block + VALUES + 4 * (R * slot + r), ZERO)
        store_i32(block + COUNT, count + 1)
    store_f32(block + VALUES + 4 * (R * slot + i), value)


@njit(error_model="numpy")
def without_outliers(x, top, limit, block, i, rest):
    """Write DEPTH floats without those above the limit; returns the largest remaining one."""
    for k in range(0, DEPTH, LANES):
        store_f(rest + 4 * k, load_f(x + 4 * k))
    for _ in range(OUTLIERS):
        if top > limit:
            k = 0
            while abs(load_f32(rest + 4 * k)) != top:
                k += 1
            add_outlier(block, k, i, load_f32(rest + 4 * k))
            store_f32(rest + 4 * k, ZERO)
            top = largest_of(rest)
    return top


@njit(error_model="numpy")
def shorten(x, top, block, i):
    """Write DEPTH floats as row i of a block; top: the largest of them."""
    factor = splat_f(LARGEST / top if top > ZERO else ZERO)
    scale, half, total = top / LARGEST, np.int32(0), np.int32(0)
    for k in range(0, DEPTH, LANES):
        whole = round_i32(load_f(x + 4 * k) * factor)
        store_low_bytes(block + DEPTH * i + k, whole)
        total += hsum(whole)
        if k + LANES == DEPTH // 2:
            half = total
    store_f32(block + SCALES + 4 * i, scale)
    store_f32(block + SUMS + 4 * i, np.float32(total) * scale)
    store_i32(block + WHOLE + 4 * i, total)
    store_i32(block + WHOLE + 4 * R + 4 * i, half)
    store_i32(block + WHOLE + 8 * R + 4 * i, total - half)


@njit(error_model="numpy")
def pack_row(x, n, blocks, slice_size, i, spare):
    """Row i of the blocks of n floats, a multiple of DEPTH; spare: 4 * n / DEPTH + 128 bytes."""
    tops, total = spare + 4 * DEPTH, ZERO
    for u in range(n // DEPTH):
        top = largest_of(x + 4 * DEPTH * u)
        store_f32(tops + 4 * u, top)
        total += top
    limit = SHARE * total / np.float32(n // DEPTH)
    for u in range(n // DEPTH):
        at, top = x + 4 * DEPTH * u, load_f32(tops + 4 * u)
        block = block_at(blocks, slice_size, DEPTH * u, BLOCK)
        if top > limit:
            top = without_outliers(at, top, limit, block, i, spare)
            at = spare
        shorten(at, top, block, i)


@njit(error_model="numpy")
def start_blocks(n_block, n_row, block):
    """Write blocks without outliers, and zeros where n_row rows do not fill them."""
    for i in range(n_block):
        if n_row < MR:
            clear(block + BLOCK * i, BLOCK)
        store_i32(block + BLOCK * i + COUNT, 0)


# ---- weights -------------------------------------------------------------------------------------
def strip_writer(type: str) -> Any:
    """The function write(strip, k, panel, first, spare): STRIP of a panel's rows, from `first` on.

    It writes elements k .. k + DEPTH of a strip.
    """
    block, unit, _, values, scales, zero, signed = OF_TYPE[type]
    strip_size, n_unit = STRIP * strip_block(type), DEPTH // unit
    assert zero is not None or n_unit == 1
    offset, in_eights = signed and BYTE_OFFSET, CPU.i8mm
    assert not in_eights or NR == STRIP

    @njit(error_model="numpy")
    def write(strip, k, panel, first, spare):
        at, i = strip + k // block * strip_size, k % block // unit
        for u in range(n_unit):
            d, m = scales(at, i + u)
            store_f32x16(panel + W_SCALES + WORD_ROW * u + 4 * first, d)
            if zero is None:
                store_f32x16(panel + W_MINIMA + 4 * first, m)
            x = values(at, i + u)
            to = panel + WORD_ROW * (unit // 4) * u + 4 * first
            if in_eights:
                store_eights(to, x)
            else:
                store_spaced(to, WORD_ROW, offset_bytes(x) if offset else x)

    return write


def tiles_of(type: str) -> Any:
    """The function add(panels, blocks, n, y, stride): adds n products to MR rows of NR floats at y.

    type: of the strips that the panels are made of.
    """
    _, unit, most, _, _, middle, is_signed = OF_TYPE[type]
    n_step, in_shorts = unit // 4, CPU.avx2 and not CPU.vnni and most < 127
    minima, n_unit, signed = middle is None, DEPTH // unit, int(is_signed)
    zero = (middle or 0) + (BYTE_OFFSET if is_signed else 0)
    at_once = n_unit == 2 and CPU.avx512 and CPU.vnni
    below_zero, negative, in_eights = -zero, int(is_signed and not BYTE_OFFSET), CPU.i8mm

    @njit(error_model="numpy")
    def add_outliers(sums, panel, block):
        for c in range(load_i32(block + COUNT)):
            k = load_i32(block + CHANNELS + 4 * c)
            if in_eights:
                at = panel + 2 * WORD_ROW * (k // 8) + 4 * (k // 4 % 2)
                q = load_byte_row(at, 8 * (k % 4), NV, zero, negative, 2)
            else:
                at = panel + WORD_ROW * (k // 4)
                q = load_byte_row(at, 8 * (k % 4), NV, zero, negative, 1)
            w = times_row(q, load_row(panel + W_SCALES + WORD_ROW * (k // unit), NV))
            if minima:
                w = plus_row(w, load_row(panel + W_MINIMA, NV))
            sums = add_products(sums, broadcast_column(block + VALUES + 4 * R * c, 4, MR), w)
        return sums

    def adder_of(u: int) -> Any:
        """One for each unit: a function with one caller is inlined, its grids stay in registers."""
        whole, first = WHOLE + (4 * R * (1 + u) if n_unit == 2 else 0), unit // 4 * u
        w_scales = W_SCALES + WORD_ROW * u

        @njit(error_model="numpy")
        def add_unit(sums, panel, block):
            words = broadcast_words(block + whole, MR, NV, below_zero)
            for k in range(first, first + unit // 4):
                row = load_word_row(panel + WORD_ROW * k, NV)
                words = add_outer_bytes(words, block + 4 * k, DEPTH, row, signed)
            x_scales = broadcast_column(block + SCALES, 4, MR)
            return add_scaled_words(sums, words, x_scales, load_row(panel + w_scales, NV))

        @njit(error_model="numpy")
        def add_unit_in_shorts(sums, panel, block):
            words = broadcast_words(block + whole, MR, NV, below_zero)
            rows, step = neighbours(block + 4 * first, DEPTH, MR), panel + WORD_ROW * first
            words = add_outer_in_shorts(words, rows, step, n_step, most, signed)
            x_scales = broadcast_column(block + SCALES, 4, MR)
            return add_scaled_words(sums, words, x_scales, load_row(panel + w_scales, NV))

        @njit(error_model="numpy")
        def add_unit_in_eights(sums, panel, block):
            words = paired(broadcast_words(block + whole, MR, NV, below_zero))
            for k in range(first, first + unit // 4, 2):
                words = add_outer_eights(words, block + 4 * k, DEPTH, panel + WORD_ROW * k)
            x_scales, w_row = (
                broadcast_column(block + SCALES, 4, MR),
                load_row(panel + w_scales, NV),
            )
            return add_scaled_words(sums, unpaired(words), x_scales, w_row)

        if in_shorts:
            return add_unit_in_shorts
        return add_unit_in_eights if in_eights else add_unit

    @njit(error_model="numpy")
    def add_both(sums, panel, block):
        words = broadcast_words(block + WHOLE + 4 * R, MR, NV, below_zero)
        others = broadcast_words(block + WHOLE + 8 * R, MR, NV, below_zero)
        for k in range(n_step):
            row = load_word_row(panel + WORD_ROW * k, NV)
            words = add_outer_bytes(words, block + 4 * k, DEPTH, row, signed)
        for k in range(n_step, 2 * n_step):
            row = load_word_row(panel + WORD_ROW * k, NV)
            others = add_outer_bytes(others, block + 4 * k, DEPTH, row, signed)
        w, v = load_row(panel + W_SCALES, NV), load_row(panel + W_MINIMA, NV)
        return add_scaled_twice(sums, words, others, broadcast_column(block + SCALES, 4, MR), w, v)

    add_first, add_second = adder_of(0), adder_of(1)

    @njit(error_model="numpy")
    def add_tiles(panel, block, n, y, stride):
        sums = load_grid(y, stride, MR, NV)
        for _ in range(n):
            if at_once:
                sums = add_both(sums, panel, block)
            else:
                sums = add_first(sums, panel, block)
                if n_unit == 2:
                    sums = add_second(sums, panel, block)
            if minima:
                x_sums = broadcast_column(block + SUMS, 4, MR)
                sums = add_products(sums, x_sums, load_row(panel + W_MINIMA, NV))
            if load_i32(block + COUNT) > 0:
                sums = add_outliers(sums, panel, block)
            panel += PANEL
            block += BLOCK
        store_grid(y, stride, sums)

    return add_tiles
