"""Types whose weights are looked-up signed bytes, times a scale for each 16 or 32 of them.

These are codebooks (IQ1, IQ2, IQ3), three or two values (TQ, Q1_0, Q2_0) and NVFP4. A type defines
how 64 weights and the scales of a block are read; decoding to floats and dot products are built
from it.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tamis.formats.codebooks import grid_of
from tamis.formats.dequant import MXFP4_LEVELS
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cpu.lang.intrinsic import load_u16, load_u32
from tamis.jit_kernels.cpu.lang.lookup import (
    bits_12_to_14,
    codes_at,
    four_tripled,
    grid_rows,
    half_of_top_nibbles,
    halved_ue4m3,
    leading_digits,
    load_bits,
    negated,
    nibbles_of_eights,
    nibbles_x8,
    nibbles_x16,
    nine_bits,
    nudged,
    pairs_in_order,
    plus_or_minus,
    signs_of_shorts,
    signs_of_words,
    store_scaled,
    threes_of_shorts,
    top_nibbles_of_pairs,
    top_nibbles_x8,
)
from tamis.jit_kernels.cpu.lang.simd import (
    as_i8,
    as_i16,
    broadcast_f16_x8,
    broadcast_f16_x16,
    byte_table,
    doubled,
    join,
    lane,
    load_i8x16,
    load_i8x32,
    low_half,
    repeat,
    shift_right,
    splat_f32x8,
    splat_f32x16,
    splat_i8x64,
)

f32 = np.float32


class Coded(NamedTuple):
    """A type's blocks. Functions are compiled; j counts the 64 elements of a block."""

    values: Any  # (block, j): i8x64, none -128
    scales: Any  # (block): floats, one for each `run` elements
    run: int  # 16 or 32


# ---- codebooks of 8: signs -----------------------------------------------------------------------
iq2_xxs_rows = grid_rows(grid_of(GGMLType.IQ2_XXS), codes_at((0, 1, 2, 3, 8, 9, 10, 11)))
iq2_xs_rows = grid_rows(grid_of(GGMLType.IQ2_XS), nine_bits)
iq2_s_rows = grid_rows(grid_of(GGMLType.IQ2_S), codes_at(range(8), range(0, 16, 2), 2))


@njit
def iq2_xxs(block, j):
    """Of every 32 elements, a word of codes, then a word of signs."""
    p = block + 2 + 16 * j
    return negated(iq2_xxs_rows(p, p), signs_of_words(p + 4, p + 12))


@njit
def iq2_xxs_scales(block):
    """The scales d * (scale + 1/2) / 4."""
    scales = top_nibbles_of_pairs(block + 2) + splat_f32x8(f32(0.5))
    return scales * broadcast_f16_x8(block) * splat_f32x8(f32(0.25))


@njit
def iq2_xs(block, j):
    """A code and signs in each uint16."""
    p = block + 2 + 16 * j
    return negated(iq2_xs_rows(p, p), signs_of_shorts(p))


@njit
def iq2_s(block, j):
    """Codes, signs, upper bits of codes."""
    rows = iq2_s_rows(block + 2 + 8 * j, block + 66 + 2 * j)
    return negated(rows, load_bits(block + 34 + 8 * j))


@njit
def quarters_of(block, at):
    """The scales d * (scale + 1/2) / 4 of nibbles at `at`."""
    scales = nibbles_x16(block + at) + splat_f32x16(f32(0.5))
    return scales * broadcast_f16_x16(block) * splat_f32x16(f32(0.25))


@njit
def iq2_xs_scales(block):
    """The scales of nibbles at the end of the block."""
    return quarters_of(block, 66)


@njit
def iq2_s_scales(block):
    """The scales of nibbles at the end of the block."""
    return quarters_of(block, 74)


# ---- codebooks of 4 ------------------------------------------------------------------------------
iq3_xxs_rows = grid_rows(grid_of(GGMLType.IQ3_XXS), codes_at(range(16)))
iq3_s_rows = grid_rows(grid_of(GGMLType.IQ3_S), codes_at(range(16), range(16), 1))


@njit
def iq3_xxs(block, j):
    """Codes, then words of signs and scale."""
    p, signs = block + 2 + 16 * j, block + 66 + 8 * j
    return negated(iq3_xxs_rows(p, p), signs_of_words(signs, signs + 4))


@njit
def iq3_xxs_scales(block):
    """The scales d * (scale + 1/2) / 2."""
    scales = top_nibbles_x8(block + 66) + splat_f32x8(f32(0.5))
    return scales * broadcast_f16_x8(block) * splat_f32x8(f32(0.5))


@njit
def iq3_s(block, j):
    """Codes, upper bits of codes, signs."""
    rows = iq3_s_rows(block + 2 + 16 * j, block + 66 + 2 * j)
    return negated(rows, load_bits(block + 74 + 8 * j))


@njit
def iq3_s_scales(block):
    """The scales d * (2 * scale + 1)."""
    scales = nibbles_x8(block + 106)
    return (scales + scales + splat_f32x8(f32(1))) * broadcast_f16_x8(block)


# ---- codebooks of 8 with three values: eight times them, plus or minus one -----------------------
EIGHTS = 8 * grid_of(GGMLType.IQ1_S)
iq1_s_rows = grid_rows(EIGHTS, codes_at(range(8), (0, 3, 6, 9, 16, 19, 22, 25), 3))
iq1_m_rows = grid_rows(EIGHTS, codes_at(range(8), range(0, 32, 4), 3))


@njit
def iq1_s(block, j):
    """Codes, then a word of 32 elements: upper bits, scale and what is added."""
    p = block + 34 + 4 * j
    down = (load_u16(p) >> 15) * 15 | (load_u16(p + 2) >> 15) * 240
    return nudged(iq1_s_rows(block + 2 + 8 * j, p), down)


@njit
def iq1_s_scales(block):
    """The scales d * (2 * scale + 1) / 8."""
    scales = bits_12_to_14(block + 34)
    scales = (scales + scales + splat_f32x8(f32(1))) * broadcast_f16_x8(block)
    return scales * splat_f32x8(f32(0.125))


@njit
def iq1_m(block, j):
    """Codes, then nibbles of upper bits and what is added."""
    p = block + 32 + 4 * j
    down = load_u32(p) >> 3 & 0x11111111  # moves bit 4 i to bit i
    down = (down | down >> 3) & 0x03030303
    down = (down | down >> 6) & 0x000F000F
    return nudged(iq1_m_rows(block + 8 * j, p), down | down >> 12)


@njit
def iq1_m_scales(block):
    """The scales d * (2 * scale + 1) / 8; d is the upper nibbles of the scales' words."""
    scales = threes_of_shorts(block + 48)
    scales = (scales + scales + splat_f32x16(f32(1))) * half_of_top_nibbles(block + 48)
    return scales * splat_f32x16(f32(0.125))


# ---- three values, two values --------------------------------------------------------------------
@njit
def tq2_0(block, j):
    """64 values of TQ2_0: the 2-bit fields 0 and 1 (j even) or 2 and 3 (j odd) of 32 bytes."""
    low = as_i16(load_i8x32(block + 32 * (j // 2)))
    if j % 2 == 1:
        low = shift_right(low, 4)
    fields = as_i8(join(low, shift_right(low, 2)))
    return (fields & splat_i8x64(3)) - splat_i8x64(1)


@njit
def tripled(x):
    """Bytes times 3, which moves the next digit to the front."""
    return x + x + x


@njit
def tq1_0(block, j):
    """Five digits of 32 bytes, five of 16, four of 4."""
    first, second = load_i8x32(block), load_i8x16(block + 32)
    if j == 0:
        return leading_digits(join(first, tripled(first)))
    if j == 1:
        ninth = tripled(tripled(first))
        return leading_digits(join(ninth, tripled(ninth)))
    if j == 2:
        last = tripled(tripled(tripled(tripled(first))))
        return leading_digits(join(last, join(second, tripled(second))))
    ninth = tripled(tripled(second))
    rest = join(tripled(tripled(ninth)), four_tripled(block + 48))
    return leading_digits(join(join(ninth, tripled(ninth)), rest))


@njit
def tq2_0_scales(block):
    """The block's d as the scale of all."""
    return broadcast_f16_x8(block + 64)


@njit
def tq1_0_scales(block):
    """The block's d as the scale of all."""
    return broadcast_f16_x8(block + 52)


@njit
def q1_0(block, j):
    """A bit each."""
    return plus_or_minus(load_bits(block + 2 + 8 * j))


@njit
def q2_0(block, j):
    """Two bits each."""
    return pairs_in_order(block + 2)


@njit
def first_half(block):
    """The d before the values, four times."""
    return low_half(broadcast_f16_x8(block))


# ---- 4-bit floats --------------------------------------------------------------------------------
fp4_values = byte_table([int(v) for v in MXFP4_LEVELS])


@njit
def nvfp4(block, j):
    """Nibbles after the four scales."""
    return fp4_values(nibbles_of_eights(block + 4))


@njit
def nvfp4_scales(block):
    """A byte each."""
    return halved_ue4m3(block)


CODED = {
    "IQ1_S": Coded(iq1_s, iq1_s_scales, 32),
    "IQ1_M": Coded(iq1_m, iq1_m_scales, 16),
    "IQ2_XXS": Coded(iq2_xxs, iq2_xxs_scales, 32),
    "IQ2_XS": Coded(iq2_xs, iq2_xs_scales, 16),
    "IQ2_S": Coded(iq2_s, iq2_s_scales, 16),
    "IQ3_XXS": Coded(iq3_xxs, iq3_xxs_scales, 32),
    "IQ3_S": Coded(iq3_s, iq3_s_scales, 32),
    "TQ1_0": Coded(tq1_0, tq1_0_scales, 32),
    "TQ2_0": Coded(tq2_0, tq2_0_scales, 32),
    "Q1_0": Coded(q1_0, first_half, 32),
    "Q2_0": Coded(q2_0, first_half, 16),
    "NVFP4": Coded(nvfp4, nvfp4_scales, 16),
}


# --- built from these ---------------------------------------------------------------------------
@njit
def two_lanes(x, i):
    """Lane i of x 8 times, lane i + 1 as often."""
    return join(splat_f32x8(lane(x, i)), splat_f32x8(lane(x, i + 1)))


@njit
def four_lanes(x, i):
    """Lanes i to i + 3 of x, each 4 times."""
    low, high = doubled(lane(x, i), lane(x, i + 1)), doubled(lane(x, i + 2), lane(x, i + 3))
    return join(repeat(low, 0, 2, 8), repeat(high, 0, 2, 8))


def spread_of(run: int) -> Any:
    """The function (scales, j): of 64 elements, a lane for each four."""
    if run == 16:

        @njit
        def of_sixteens(scales, j):
            return four_lanes(scales, 4 * j)

        return of_sixteens

    @njit
    def of_thirty_twos(scales, j):
        return two_lanes(scales, 2 * j)

    return of_thirty_twos


def decoder_of(type: str) -> Any:
    """The function decode(row, n, out) of one of CODED."""
    values, scales, run = CODED[type]
    spread, chunks, size = spread_of(run), GGMLType[type].block_size // 64, GGMLType[type].type_size

    def decode(p, n, out):
        for _ in range(n // (64 * chunks)):
            factors = scales(p)
            for j in range(chunks):
                store_scaled(out, values(p, j), spread(factors, j))
                out += 256
            p += size

    return decode
