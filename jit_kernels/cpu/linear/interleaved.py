"""Quantised weights in strips: the products of sixteen rows at a time, one row per lane.

A strip is sixteen rows of a matrix, divided into the blocks of their ggml type; the rows' blocks
are interleaved in the order in which vectors read them (repack.py writes them). So a scale is read
for sixteen rows at once, sums need no addition across lanes, and each vector of weights is
multiplied with all rows of activations. The arithmetic is that of gemv.py: integer weights times
planes of activations, added up over the elements that share a scale.

A block of 32 has: d f16 [16]; if the type has one, the minimum m f16 [16]; if it has fifth bits, a
uint64 for each vector of values; then the values, bytes [32 / 4 / 2, 16, 4] of nibbles or [32 / 4,
16, 4]. For blocks of 256 see each type.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STRIP, strip_block
from tamis.jit_kernels.cpu.lang import features
from tamis.jit_kernels.cpu.lang.byte_tiles import (
    OFFSET,
    add_each,
    add_rows,
    add_times,
    any_of_rows,
    as_row,
    beside,
    both,
    dot_planes,
    dot_signed_planes,
    field,
    load_bytes,
    looked_up,
    no_sums,
    nudged,
    raised,
    rows_at,
    stacked,
    store_bytes,
    store_rows,
    times_each,
    with_bits,
    with_signs,
)
from tamis.jit_kernels.cpu.lang.simd import (
    CPU,
    fma,
    load_bf16x16,
    load_f16x16,
    load_i8x16,
    load_i32x16,
    prefetch,
    shift_left,
    shift_right,
    shift_right_signed,
    splat_f32x16,
    splat_i32x16,
    store_f32x16,
    to_f32,
    vabs,
    widen,
    widen_unsigned,
)
from tamis.jit_kernels.cpu.linear.dequant import FP4_VALUES, IQ4_VALUES

PLANES, CHUNK = 128, 64  # bytes and elements of a chunk of gemv's planes
MARKS = 176  # bytes of planes and pairs of a chunk, before its marks
AHEAD = features.reads_ahead()[1]  # bytes by which weights are prefetched ahead of their use
f32 = np.float32
HALVES = 2 * STRIP  # bytes of a float16 of each row
VECTOR = 4 * STRIP  # bytes of a vector of values


class Strips(NamedTuple):
    """A type's strips. Functions are compiled; i counts units, the elements that share a scale."""

    block: int  # elements of a block
    unit: int
    most: int  # the largest |q|
    values: Any  # (block, i): unit / 4 vectors of integers q, see words.py
    scales: Any  # (block, i): d and m of sixteen rows; weights are d * q + m
    zero: int | None  # m is -zero * d; None: it is stored
    signed: bool = False  # whether values are


def around(zero: int, load: Any = load_f16x16) -> tuple[Any, int]:
    """The scales of blocks of 32 that begin with d alone, read by `load`, and their zero."""
    factor = f32(-zero)

    @njit
    def scales(block, i):
        d = load(block)
        return d, d * splat_f32x16(factor)

    return scales, zero


@njit
def from_minimum(block, i):
    """The scales of blocks of 32 that begin with d and m."""
    return load_f16x16(block), load_f16x16(block + HALVES)


@njit
def nibbles_at(at):
    """Sixteen bytes of nibbles of each row: the low ones, then the high ones."""
    x = load_bytes(at, 4)
    return beside(field(x, 0, 15), field(x, 4, 15))


def four_bit(at: int) -> Any:
    """The values of a block of 32 with nibbles at `at`."""

    @njit
    def values(block, i):
        return nibbles_at(block + at)

    return values


def five_bit(at: int) -> Any:
    """The values of a block of 32 with fifth bits at `at`, then nibbles."""

    @njit
    def values(block, i):
        return with_bits(nibbles_at(block + at + 64), block + at, 16)

    return values


@njit
def eight_bit(block, i):
    """The values of Q8_0."""
    return load_bytes(block + HALVES, 8)


iq4 = looked_up([int(v) for v in IQ4_VALUES])
fp4 = looked_up([int(v) for v in FP4_VALUES])


@njit
def iq4_nl(block, i):
    """The values of IQ4_NL."""
    return iq4(nibbles_at(block + HALVES))


@njit
def mxfp4(block, i):
    """The values of MXFP4."""
    return fp4(nibbles_at(block + HALVES))


# ---- blocks of 256 -------------------------------------------------------------------------------
# Q2_K: d, dmin, bytes [16, 16] of a scale (low nibble) and a minimum, then pairs of bits
# [2, 8, 16, 4]. Q3_K: d, bytes [16, 16] of scales, then nibbles [8, 4, 16, 4]: to put three bits
# together takes longer than to read four. IQ4_XS: d, bytes [8, 16] of scales, then nibbles
# [8, 4, 16, 4].
TWO_SCALES = 2 * HALVES
TWO_VALUES = TWO_SCALES + 16 * STRIP
SIGNED_SCALES = HALVES
THREE_VALUES = SIGNED_SCALES + 16 * STRIP
XS_VALUES = SIGNED_SCALES + 8 * STRIP
# Q4_K and Q5_K: d, dmin, then bytes [8, 16] of scales and of minima. Fifth bits: uint64 [8, 8], a
# row of them for each 32 elements. Nibbles: bytes [4, 8, 16, 4], low ones before high ones.
K_SCALES, K_MINIMA = 2 * HALVES, 2 * HALVES + 8 * STRIP
K_VALUES = K_MINIMA + 8 * STRIP
# Q6_K: d, bytes [16, 16] of scales, nibbles [2, 16, 16, 4] and the two bits above [2, 8, 16, 4].
SIX_LOW = SIGNED_SCALES + 16 * STRIP
SIX_HIGH = SIX_LOW + 128 * STRIP


@njit
def bytes_to_f32(at):
    """Sixteen unsigned bytes as floats."""
    return to_f32(widen_unsigned(widen_unsigned(load_i8x16(at))))


@njit
def k_scales(block, i):
    """The scales d * scale and -dmin * minimum."""
    d, minimum = load_f16x16(block), load_f16x16(block + HALVES)
    minima = bytes_to_f32(block + K_MINIMA + STRIP * i)
    return d * bytes_to_f32(block + K_SCALES + STRIP * i), minimum * minima * splat_f32x16(f32(-1))


@njit
def q4_k(block, i):
    """The values of Q4_K."""
    return field(load_bytes(block + K_VALUES + 8 * VECTOR * (i // 2), 8), 4 * (i % 2), 15)


@njit
def q5_k(block, i):
    """The values of Q5_K."""
    low = field(load_bytes(block + K_VALUES + 512 + 8 * VECTOR * (i // 2), 8), 4 * (i % 2), 15)
    return with_bits(low, block + K_VALUES + 64 * i, 16)


@njit
def pairs_at(at, i):
    """The pairs of bits of 16 elements: a byte has one of each 32 of 128 elements."""
    return field(
        load_bytes(at + 8 * VECTOR * (i // 8) + 4 * VECTOR * (i % 2), 4), i % 8 // 2 * 2, 3
    )


@njit
def q2_k_scales(block, i):
    """The scales d * scale and -dmin * minimum."""
    x = widen_unsigned(widen_unsigned(load_i8x16(block + TWO_SCALES + STRIP * i)))
    d = load_f16x16(block) * to_f32(x & splat_i32x16(15))
    return d, load_f16x16(block + HALVES) * to_f32(shift_right(x, 4)) * splat_f32x16(f32(-1))


@njit
def q2_k(block, i):
    """The values of Q2_K."""
    return pairs_at(block + TWO_VALUES, i)


@njit
def signed_bytes(block, i):
    """The scales after d of Q3_K, Q6_K and IQ4_XS, as integers."""
    return widen(widen(load_i8x16(block + SIGNED_SCALES + STRIP * i)))


def around_signed(zero: int) -> tuple[Any, int]:
    """The scales of blocks that begin with d and signed bytes (d times each byte); their zero."""
    factor = f32(-zero)

    @njit
    def scales(block, i):
        d = load_f16x16(block) * to_f32(signed_bytes(block, i))
        return d, d * splat_f32x16(factor)

    return scales, zero


@njit
def q3_k(block, i):
    """The values of Q3_K."""
    return field(load_bytes(block + THREE_VALUES + 4 * VECTOR * (i // 2), 4), 4 * (i % 2), 15)


@njit
def iq4_xs(block, i):
    """The values of IQ4_XS."""
    return iq4(nibbles_at(block + XS_VALUES + 4 * VECTOR * i))


@njit
def q6_k(block, i):
    """The values of Q6_K: of 128 elements, each 32 have their own nibbles and 2-bit fields."""
    half, quarter, side = i // 8, i % 8 // 2, 4 * VECTOR * (i % 2)
    low = load_bytes(block + SIX_LOW + 16 * VECTOR * half + 8 * VECTOR * (quarter % 2) + side, 4)
    high = load_bytes(block + SIX_HIGH + 8 * VECTOR * half + side, 4)
    top = raised(field(high, 2 * quarter, 3), 4)
    return both(field(low, 4 * (quarter // 2), 15), top)


# ---- codebooks, three values, 4-bit floats -------------------------------------------------------
# What the codes stand for, not the codes. TQ1_0, TQ2_0 and Q2_0: d, then pairs of bits
# [2, 8, 16, 4] ([4, 16, 4] of Q2_0's blocks of 64). IQ1: d, scales as bytes [8 or 16, 16], of
# IQ1_S with the sign of what is added; of IQ1_M uint16 [32] of these signs, a bit a row, for each
# 8 elements; then pairs. IQ2: d, scales, signs uint64 [64], a bit an element of a vector; then
# pairs, which of the magnitudes it is. IQ3: d, scales, nibbles [8, 4, 16, 4] with the sign on top.
# NVFP4, blocks of 64: f16 [4, 16], then nibbles [2, 4, 16, 4].
PAIRS_32 = SIGNED_SCALES + 8 * STRIP
NUDGES = SIGNED_SCALES + 16 * STRIP
NUDGED_PAIRS = NUDGES + 64
IQ2_SIGNS = {32: SIGNED_SCALES + 8 * STRIP, 16: SIGNED_SCALES + 16 * STRIP}  # by unit
NVFP4_VALUES = 4 * HALVES
IQ2_LEVELS = [8, 25, 43]
IQ3_LEVELS = {"IQ3_XXS": [4, 12, 20, 28, 36, 44, 52, 62], "IQ3_S": [1, 3, 5, 7, 9, 11, 13, 15]}


def times_bytes(factor: float) -> Any:
    """The scales d * byte * factor, and no minimum."""
    constant = f32(factor)

    @njit
    def scales(block, i):
        d = load_f16x16(block) * to_f32(signed_bytes(block, i)) * splat_f32x16(constant)
        return d, splat_f32x16(f32(0))

    return scales


def pairs_of_32(at: int) -> Any:
    """The values of 32 elements, pairs of bits at `at`."""

    @njit
    def values(block, i):
        return field(load_bytes(block + at + 8 * VECTOR * (i // 4), 8), i % 4 * 2, 3)

    return values


@njit
def q2_0(block, i):
    """The values of Q2_0: pairs of bits 0 and 1, or 2 and 3, of four vectors."""
    x = load_bytes(block + HALVES, 4)
    return beside(field(x, 4 * i, 3), field(x, 4 * i + 2, 3))


@njit
def iq1_s_scales(block, i):
    """The scales of IQ1_S: d * |byte|, and the offset of its values, -1, 0 and 1 plus an eighth.

    Stored values count from 0.
    """
    signed = to_f32(signed_bytes(block, i))
    d, size = load_f16x16(block), vabs(signed)
    return d * size, d * (signed * splat_f32x16(f32(0.125)) - size)


eighths = looked_up([-8, 0, 8] + 13 * [0])
iq2_levels = looked_up(IQ2_LEVELS + 13 * [0])


@njit
def iq1_m(block, i):
    """The values of IQ1_M, times 8."""
    return nudged(eighths(pairs_at(block + NUDGED_PAIRS, i)), block + NUDGES + 4 * i)


def iq2(unit: int) -> Any:
    """The values of IQ2 types whose scales cover `unit` elements."""
    signs = IQ2_SIGNS[unit]
    pairs = signs + 512

    if unit == 16:

        @njit
        def of_16(block, i):
            return with_signs(iq2_levels(pairs_at(block + pairs, i)), block + signs + 32 * i)

        return of_16
    all_of_32 = pairs_of_32(pairs)

    @njit
    def of_32(block, i):
        return with_signs(iq2_levels(all_of_32(block, i)), block + signs + 64 * i)

    return of_32


def iq3(levels: list[int]) -> Any:
    """The values of an IQ3 type."""
    signed = looked_up(levels + [-level for level in levels])

    @njit
    def values(block, i):
        return signed(nibbles_at(block + XS_VALUES + 4 * VECTOR * i))

    return values


@njit
def nvfp4(block, i):
    """The values of NVFP4."""
    return fp4(field(load_bytes(block + NVFP4_VALUES + 4 * VECTOR * (i // 2), 4), 4 * (i % 2), 15))


@njit
def nvfp4_scales(block, i):
    """The scales of NVFP4."""
    return load_f16x16(block + HALVES * i), splat_f32x16(f32(0))


OF_TYPE = {
    "Q4_0": Strips(32, 32, 15, four_bit(HALVES), *around(8)),
    "Q4_1": Strips(32, 32, 15, four_bit(2 * HALVES), from_minimum, None),
    "Q5_0": Strips(32, 32, 31, five_bit(HALVES), *around(16)),
    "Q5_1": Strips(32, 32, 31, five_bit(2 * HALVES), from_minimum, None),
    "Q8_0": Strips(32, 32, 128, eight_bit, *around(0), signed=True),
    "IQ4_NL": Strips(32, 32, 127, iq4_nl, *around(0), signed=True),
    "MXFP4": Strips(32, 32, 12, mxfp4, *around(0, load_bf16x16), signed=True),
    "Q2_K": Strips(256, 16, 3, q2_k, q2_k_scales, None),
    "Q3_K": Strips(256, 16, 15, q3_k, *around_signed(4)),
    "Q4_K": Strips(256, 32, 15, q4_k, k_scales, None),
    "Q5_K": Strips(256, 32, 31, q5_k, k_scales, None),
    "Q6_K": Strips(256, 16, 63, q6_k, *around_signed(32)),
    "IQ4_XS": Strips(256, 32, 127, iq4_xs, *around_signed(0), signed=True),
    "TQ1_0": Strips(256, 32, 3, pairs_of_32(HALVES), *around(1)),
    "TQ2_0": Strips(256, 32, 3, pairs_of_32(HALVES), *around(1)),
    "Q2_0": Strips(64, 32, 3, q2_0, *around(1)),
    "NVFP4": Strips(64, 16, 12, nvfp4, nvfp4_scales, 0, signed=True),
    "IQ1_S": Strips(256, 32, 3, pairs_of_32(PAIRS_32), iq1_s_scales, None),
    "IQ1_M": Strips(256, 16, 9, iq1_m, times_bytes(1 / 8), 0, signed=True),
    "IQ2_XXS": Strips(256, 32, 43, iq2(32), times_bytes(1 / 8), 0, signed=True),
    "IQ2_XS": Strips(256, 16, 43, iq2(16), times_bytes(1 / 8), 0, signed=True),
    "IQ2_S": Strips(256, 16, 43, iq2(16), times_bytes(1 / 8), 0, signed=True),
    "IQ3_XXS": Strips(256, 32, 62, iq3(IQ3_LEVELS["IQ3_XXS"]), times_bytes(1 / 4), 0, signed=True),
    "IQ3_S": Strips(256, 32, 15, iq3(IQ3_LEVELS["IQ3_S"]), times_bytes(1), 0, signed=True),
}


# ---- products ------------------------------------------------------------------------------------
# Strips that are multiplied at once: each word of activations is then read once for both, and
# reading it is half the work. There must be registers for the sums of both.
WIDE = 2 if CPU.avx512 else 1


def of_strips(type: str) -> tuple[Any, Any]:
    """The functions values(strip, apart, i) and scales(strip, apart, i) of WIDE strips.

    Strips are `apart` apart. The functions are like those of Strips for one; scales are rows of
    vectors, with the correction for the products' OFFSET.
    """
    _, _, _, values, scales, _, signed = OF_TYPE[type]
    row_offset = f32(-OFFSET if signed else 0)

    @njit
    def scales_of_one(strip, i):
        d, m = scales(strip, i)
        if signed:
            m += d * splat_f32x16(row_offset)
        return as_row(d), as_row(m)

    @njit
    def values_of_both(strip, apart, i):
        return stacked(values(strip, i), values(strip + apart, i))

    @njit
    def scales_of_both(strip, apart, i):
        d, m = scales_of_one(strip, i)
        other_d, other_m = scales_of_one(strip + apart, i)
        return beside(d, other_d), beside(m, other_m)

    @njit
    def values_alone(strip, apart, i):
        return values(strip, i)

    @njit
    def scales_alone(strip, apart, i):
        return scales_of_one(strip, i)

    return (values_of_both, scales_of_both) if WIDE == 2 else (values_alone, scales_alone)


def product_of(type: str, rows: int) -> Any:
    """The function add(strip, apart, n, x, y, bias, add): up to `rows` rows times WIDE strips.

    apart: the offset of the second strip, 0 if there is none. n: a multiple of 64. x: address,
    bytes apart and number of rows, as pack.pack_rows leaves few of them. y: the address of the
    first row's sixteen products, bytes apart; bias: their sixteen, or 0.
    """
    block, unit, most, _, _, _, signed = OF_TYPE[type]
    values, scales = of_strips(type)
    size, wide = strip_block(type), WIDE
    dot, n_unit = dot_signed_planes if signed else dot_planes, block // unit
    unit_bytes = STRIP * size * unit // block
    per_element = 2 if unit == 16 else 5  # of pairs: see gemv.py
    may_skip = rows > 1  # a single row is bound by memory
    half = 1 if unit == 16 else 2

    @njit(error_model="numpy")
    def product(strip, apart, n, x, y, bias, add):
        x_rows = rows_at(x[0] + 4 * n, x[1], x[2], rows)
        y_rows, y_apart = rows_at(y[0], y[1], x[2], rows), VECTOR if apart != 0 else 0
        plane, pairs, sums = 0, per_element * n // half, no_sums(rows, wide)
        marks, k = MARKS * n // CHUNK, 0
        end = strip + n // block * STRIP * size
        for _ in range(0, n, block):
            # Near its end, prefetch the strip that comes after both.
            ahead = AHEAD if strip + AHEAD < end else AHEAD + apart
            for i in range(n_unit):
                for line in range(0, unit_bytes, 64):
                    prefetch(strip + ahead + unit_bytes * i + line)
                    if wide == 2:
                        prefetch(strip + apart + ahead + unit_bytes * i + line)
                q, (d, m) = values(strip, apart, i), scales(strip, apart, i)
                if may_skip and any_of_rows(x_rows, marks + k // 32) == 0:
                    whole = dot(q, x_rows, plane, 0, most)
                else:
                    whole = dot(q, x_rows, plane, CHUNK, most)
                sums = add_times(sums, times_each(whole, x_rows, pairs), d)
                sums = add_each(sums, m, x_rows, pairs + 4)
                plane, pairs, k = plane + unit, pairs + 8, k + unit
                if plane % CHUNK == 0:  # the low bytes follow
                    plane += CHUNK
            strip += STRIP * size
        if bias != 0:
            sums = add_rows(sums, rows_at(bias, 0, rows, rows), y_apart)
        if add != 0:
            sums = add_rows(sums, y_rows, y_apart)
        store_rows(y_rows, y_apart, sums)  # the same values again if rows, or strips, occur twice

    return product


def byte_of(e: int, signed: bool) -> Any:
    """The function x -> byte e of each 32-bit lane, as floats."""
    up = 24 - 8 * e

    @njit
    def unsigned_byte(x):
        return to_f32(shift_right(shift_left(x, up), 24))

    @njit
    def signed_byte(x):
        return to_f32(shift_right_signed(shift_left(x, up), 24))

    return signed_byte if signed else unsigned_byte


def decoder_of(type: str) -> Any:
    """The function decode(strip, k, to, spare): elements k .. k + 32 as floats, f32 [32, 16].

    k is a multiple of 32; spare: 512 bytes.
    """
    block, unit, _, values, scales, _, signed = OF_TYPE[type]
    size = strip_block(type)
    first, second, third, fourth = (byte_of(e, signed) for e in range(4))

    @njit(error_model="numpy")
    def decode(strip, k, to, spare):
        at, i = strip + k // block * STRIP * size, k % block // unit
        for u in range(32 // unit):
            d, m = scales(at, i + u)
            store_bytes(spare, values(at, i + u))
            for j in range(unit // 4):
                x = load_i32x16(spare + VECTOR * j)
                store_f32x16(to, fma(first(x), d, m))
                store_f32x16(to + VECTOR, fma(second(x), d, m))
                store_f32x16(to + 2 * VECTOR, fma(third(x), d, m))
                store_f32x16(to + 3 * VECTOR, fma(fourth(x), d, m))
                to += 4 * VECTOR

    return decode
