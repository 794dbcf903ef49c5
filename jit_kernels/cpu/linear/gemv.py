"""Dot products of one row of weights with one row of activations, for every ggml type.

Quantised weights are multiplied with activations as integers. A row of activations is stored as
`planes`, 128 bytes for 64 elements: a block of 32 is v * dx with integers v = 128 * high + low of
15 bits, so that two products of bytes give the exact sum of u * v; its error is a 32000th of the
block's largest element, far below that of a float16 KV cache. After the planes of all n elements
come `pairs`, two f32 for every 16 elements, then two for every 32 (the sizes of blocks with a scale
of their own in the weights): dx, and the sum of v times dx, which multiplies a constant added to
all weights of the block. Then comes a byte for each 32: its mark, 1 if v has low bits.

planes: high int8 [64]; low int8 [64].

If many rows share a step, only blocks of 32 that are larger than a limit keep all bits. Others have
8: v = 128 * high. Their low planes are zeros, which products may skip.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cpu.lang.intrinsic import (
    bits_f32,
    load_f16,
    load_f32,
    load_u8,
    load_u16,
    load_u32,
    store_f32,
    store_u8,
)
from tamis.jit_kernels.cpu.lang.simd import (
    CPU,
    LANES,
    alternating_lanes,
    as_i8,
    as_i16,
    bits_to_bytes,
    broadcast_f16_x8,
    broadcast_f16_x16,
    byte_table,
    bytes_of,
    dot_i8,
    dot_u8,
    doubled,
    doubled_halves,
    even_lanes,
    fma,
    hmax,
    hsum,
    hsum_two,
    join,
    lane,
    load_brain,
    load_f,
    load_f32x4,
    load_f32x8,
    load_f32x16,
    load_half,
    load_i8x16,
    load_i8x32,
    load_i8x64,
    nibbles,
    nibbles_in_place,
    nibbles_of_two,
    nibbles_of_two_in_place,
    odd_lanes,
    pairs_of_halves,
    prefetch,
    round_i32,
    shift_left,
    shift_right,
    shift_right_signed,
    sixteenth_of_odd_runs,
    splat_f32x8,
    splat_f32x16,
    splat_i8x16,
    splat_i8x64,
    splat_i32x16,
    store_low_bytes_x16,
    to_f32,
    two_eights,
    vabs,
    vmax,
    widen,
    widen_unsigned,
    zero_f,
    zero_f32x4,
    zero_f32x8,
    zero_f32x16,
    zero_i32x16,
)
from tamis.jit_kernels.cpu.linear.codebook import CODED, four_lanes, spread_of, two_lanes
from tamis.jit_kernels.cpu.linear.dequant import FP4_VALUES, IQ4_VALUES

CHUNK, PLANES = 64, 128  # elements of a step and bytes of their planes
AHEAD = 3072  # bytes by which weights are prefetched ahead of their use
FULL, SHORT = np.float32(127 * 128), np.float32(127)  # the largest v, and the largest high
ALL_BITS = np.float32(-1)
f32 = np.float32


# ---- activations ---------------------------------------------------------------------------------
@njit(error_model="numpy")
def split_block(x, high, limit, mark):
    """Write the planes of 32 elements and their mark.

    Returns dx and the sums of both halves times dx.
    """
    a, b, low = load_f32x16(x), load_f32x16(x + 64), high + CHUNK
    top = hmax(vmax(vabs(a), vabs(b)))
    keeps, half = top > limit, splat_i32x16(64)
    scale = splat_f32x16((FULL if keeps else SHORT) / top if top > f32(0) else f32(0))
    v, w = round_i32(a * scale), round_i32(b * scale)
    if not keeps:
        v, w = shift_left(v, 7), shift_left(w, 7)
    store_u8(mark, keeps)
    v_high, w_high = shift_right_signed(v + half, 7), shift_right_signed(w + half, 7)
    store_low_bytes_x16(high, v_high)
    store_low_bytes_x16(high + 16, w_high)
    store_low_bytes_x16(low, v - shift_left(v_high, 7))
    store_low_bytes_x16(low + 16, w - shift_left(w_high, 7))
    dx = top / FULL
    return dx, f32(hsum(v)) * dx, f32(hsum(w)) * dx


@njit(error_model="numpy")
def write_planes(x, n, out, share, limit):
    """Write planes, pairs and marks of elements share[0] .. share[1] of n f32; multiples of 64.

    limit: blocks whose largest element is at most this keep 8 bits; ALL_BITS: all bits are kept.
    """
    sixteens = out + n // CHUNK * PLANES
    blocks = sixteens + n // 2
    marks = blocks + n // 4
    for i in range(share[0] // 32, share[1] // 32):
        high = out + i // 2 * PLANES + i % 2 * 32
        dx, one, other = split_block(x + 128 * i, high, limit, marks + i)
        for at, sum in ((sixteens + 16 * i, one), (sixteens + 16 * i + 8, other)):
            store_f32(at, dx)
            store_f32(at + 4, sum)
        store_f32(blocks + 8 * i, dx)
        store_f32(blocks + 8 * i + 4, one + other)


# ---- one chunk -----------------------------------------------------------------------------------
@njit
def product(u, planes):
    """Integer sums of u * v, in lanes of four; u: up to 127 unless CPU.mixed_bytes."""
    high = dot_u8(zero_i32x16(), u, load_i8x64(planes))
    return to_f32(dot_u8(shift_left(high, 7), u, load_i8x64(planes + CHUNK)))


if CPU.vnni:  # its products of unsigned and signed bytes do not saturate
    OFFSET = f32(128)

    @njit
    def signed_product(w, planes):
        """Sums of (w + OFFSET) * v; w: signed bytes, not -128."""
        return product(w ^ splat_i8x64(-128), planes)

else:
    OFFSET = f32(0)

    @njit
    def signed_product(w, planes):
        """Sums of (w + OFFSET) * v; w: signed bytes, not -128."""
        high = dot_i8(zero_i32x16(), w, load_i8x64(planes))
        return to_f32(dot_i8(shift_left(high, 7), w, load_i8x64(planes + CHUNK)))


@njit
def same(total):
    """The lanes, unchanged."""
    return total


if CPU.mixed_bytes:
    # High nibbles are not shifted, so that they count 16 times; their sums are divided at the end.
    split, split_of_two = nibbles_in_place, nibbles_of_two_in_place

    @njit
    def evened_fours(total):
        """Sums over `split_of_two`, corrected to sums over nibbles."""
        return sixteenth_of_odd_runs(total, 4)

    @njit
    def evened_eights(total):
        """Sums over `split`, corrected to sums over nibbles."""
        return sixteenth_of_odd_runs(total, 8)

else:
    split, split_of_two, evened_fours, evened_eights = nibbles, nibbles_of_two, same, same


# ---- types with blocks of 32 ---------------------------------------------------------------------
class Blocks(NamedTuple):
    """The functions that define a type with blocks of 32 in its dot product. All are compiled.

    Scales of blocks times the pairs of the activations are (d * dx, m * sum) for each; m is a
    minimum of the weights, or d again if all weights share the offset `second`.
    """

    size: int  # bytes of a block
    of_two: Any  # (row): d and m of two blocks, interleaved
    of_four: Any
    values: Any  # (row, planes): the sums of u * v of a chunk, in lanes of four
    second: float | np.floating = 1.0  # the factor of m * sum
    even: Any = same  # the correction of the lanes after the sum over all chunks


def pair_of_blocks(blocks: Blocks) -> Any:
    """The dot products of two rows of a type with blocks of 32: two chunks a step.

    It takes two rows because short rows would spend a third of their time on the sum of the lanes.
    """
    size, of_two, of_four, values, _, even = blocks
    chunk_size, second = 2 * size, f32(blocks.second)

    def pair(row, other, n, planes):
        a, b, pairs = zero_f32x16(), zero_f32x16(), planes + 5 * n // 2
        rest_a, rest_b = zero_f32x8(), zero_f32x8()
        for _ in range(n // (2 * CHUNK)):
            prefetch(row + AHEAD)
            prefetch(row + AHEAD + 64)
            prefetch(other + AHEAD)
            prefetch(other + AHEAD + 64)
            scales_a, scales_b = of_four(row), of_four(other)
            scales_a *= load_f32x8(pairs)
            scales_b *= load_f32x8(pairs)
            rest_a += scales_a
            rest_b += scales_b
            a = fma(two_eights(scales_a, 0), values(row, planes), a)
            b = fma(two_eights(scales_b, 0), values(other, planes), b)
            row, other, planes = row + chunk_size, other + chunk_size, planes + PLANES
            a = fma(two_eights(scales_a, 4), values(row, planes), a)
            b = fma(two_eights(scales_b, 4), values(other, planes), b)
            row, other, planes = row + chunk_size, other + chunk_size, planes + PLANES
            pairs += 32
        if n % (2 * CHUNK) != 0:
            last_a, last_b = of_two(row) * load_f32x4(pairs), of_two(other) * load_f32x4(pairs)
            rest_a += join(last_a, zero_f32x4())
            rest_b += join(last_b, zero_f32x4())
            a = fma(two_eights(last_a, 0), values(row, planes), a)
            b = fma(two_eights(last_b, 0), values(other, planes), b)
        seconds = alternating_lanes(f32(0), second)
        a = fma(join(rest_a, zero_f32x8()), seconds, even(a))
        b = fma(join(rest_b, zero_f32x8()), seconds, even(b))
        both = hsum_two(a, b)
        return lane(both, 0), lane(both, 8)

    return pair


def halves_first(load: Any, size: int) -> tuple[Any, Any]:
    """The functions of_two and of_four for blocks of `size` bytes that start with a scale."""

    @njit
    def of_two(row):
        return load(row, size, 2)

    @njit
    def of_four(row):
        return load(row, size, 4)

    return of_two, of_four


def four_bit(at: int, size: int) -> Any:
    """The values of blocks with 16 bytes of nibbles at `at`."""
    other = size + at

    @njit
    def values(row, planes):
        return product(split_of_two(row + at, row + other), planes)

    return values


def five_bit(at: int, size: int) -> Any:
    """The values of blocks with 32 fifth bits at `at`, then 16 bytes of nibbles."""
    low = at + 4

    @njit
    def values(row, planes):
        high = load_u32(row + at) | load_u32(row + size + at) << 32
        low_bits = nibbles_of_two(row + low, row + size + low)
        return product(low_bits | bits_to_bytes(high, 16), planes)

    return values


def indexed(table: Any, at: int, size: int) -> Any:
    """The values of blocks with 16 bytes of nibbles at `at` that are looked up in a table."""
    other = size + at

    @njit
    def values(row, planes):
        return signed_product(table(nibbles_of_two(row + at, row + other)), planes)

    return values


@njit
def eight_bit(row, planes):
    """The values of Q8_0's blocks."""
    return signed_product(join(load_i8x32(row + 2), load_i8x32(row + 36)), planes)


@njit
def power_of_two(e):
    """2^(e - 128), a subnormal float where e < 2."""
    return bits_f32((e - 1) << 23) if e >= 2 else bits_f32(0x00200000 << e)


@njit
def two_powers(row):
    """The scales of two MXFP4 blocks, each twice."""
    return doubled(power_of_two(load_u8(row)), power_of_two(load_u8(row + 17)))


@njit
def four_powers(row):
    """The scales of four MXFP4 blocks, each twice."""
    return join(two_powers(row), two_powers(row + 34))


iq4_values = byte_table([int(v) for v in IQ4_VALUES])
fp4_values = byte_table([int(v) for v in FP4_VALUES])
BLOCKS_OF_32 = {
    # d * (q - 8), d * q + m, d * (q - 16), d * q + m, d * q, d * table[q], 2^(e - 128) * table[q]
    "Q4_0": Blocks(18, *halves_first(doubled_halves, 18), four_bit(2, 18), -8, evened_fours),
    "Q4_1": Blocks(20, *halves_first(pairs_of_halves, 20), four_bit(4, 20), 1, evened_fours),
    "Q5_0": Blocks(22, *halves_first(doubled_halves, 22), five_bit(2, 22), -16),
    "Q5_1": Blocks(24, *halves_first(pairs_of_halves, 24), five_bit(4, 24)),
    "Q8_0": Blocks(34, *halves_first(doubled_halves, 34), eight_bit, -OFFSET),
    "IQ4_NL": Blocks(18, *halves_first(doubled_halves, 18), indexed(iq4_values, 2, 18), -OFFSET),
    "MXFP4": Blocks(17, two_powers, four_powers, indexed(fp4_values, 1, 17), -OFFSET),
}


# ---- types with blocks of 256: four steps --------------------------------------------------------
@njit
def words(x):
    """Unsigned bytes as 32-bit lanes."""
    return widen_unsigned(widen_unsigned(x))


@njit
def stacked(x):
    """32 bytes, then the same shifted right by one bit, as 16-bit lanes.

    Bits move between neighbouring bytes, but do not reach bit 0 in three more shifts by two.
    """
    lanes = as_i16(x)
    return join(lanes, shift_right(lanes, 1))


@njit
def quarter(x, odd):
    """Two of the four 2-bit fields of 32 bytes, as 16-bit lanes: field 2 * odd, then the next."""
    lanes = as_i16(x)
    if odd:
        lanes = shift_right(lanes, 4)
    return join(lanes, shift_right(lanes, 2))


LOW_6, LOW_4, LOW_2 = 0x3F3F3F3F, 0x0F0F0F0F, 0x03030303


@njit
def bytes_to_f32(word):
    """The eight unsigned bytes of a word as floats."""
    return to_f32(widen_unsigned(widen_unsigned(bytes_of(word))))


@njit
def scales_k(p):
    """The 8 scales of the 12 bytes that Q4_K and Q5_K share."""
    a, c = load_u32(p), load_u32(p + 8)
    return bytes_to_f32((a & LOW_6) | ((c & LOW_4) | ((a >> 6) & LOW_2) << 4) << 32)


@njit
def minima_k(p):
    """The 8 minima of the same bytes."""
    b, c = load_u32(p + 4), load_u32(p + 8)
    return bytes_to_f32((b & LOW_6) | (((c >> 4) & LOW_4) | ((b >> 6) & LOW_2) << 4) << 32)


@njit
def scales_iq4_xs(highs, lows):
    """Eight scales of 6 bits minus 32: 4 bits of each in lows, 2 in highs, lowest first."""
    low = (lows | lows << 16) & 0x0000FFFF0000FFFF
    low = (low | low << 8) & 0x00FF00FF00FF00FF
    low = (low | low << 4) & 0x0F0F0F0F0F0F0F0F
    high = (highs | highs << 24) & 0x000000FF000000FF
    high = (high | high << 12) & 0x000F000F000F000F
    high = (high | high << 6) & 0x0303030303030303
    return bytes_to_f32(low | high << 4) - splat_f32x8(f32(32))


def dot_iq4_xs(row, n, planes):
    """Blocks of 32 with d * (scale - 32) * table[q]."""
    total, rest, pairs = zero_f32x16(), zero_f32x8(), planes + 5 * n // 2
    for _ in range(n // 256):
        both = load_f32x16(pairs)
        scales = scales_iq4_xs(load_u16(row + 2), load_u32(row + 4)) * broadcast_f16_x8(row)
        rest = fma(scales, odd_lanes(both), rest)
        scales = scales * even_lanes(both)
        for j in range(4):
            prefetch(row + 34 * j + AHEAD)
            weights = iq4_values(nibbles_of_two(row + 8 + 32 * j, row + 24 + 32 * j))
            total = fma(two_lanes(scales, 2 * j), signed_product(weights, planes), total)
            planes += PLANES
        row, pairs = row + 136, pairs + 64
    return hsum(total) - OFFSET * hsum(rest)


def dot_q4_k(row, n, planes):
    """Blocks of 32 with d * scale * q - dmin * minimum."""
    total, rest, pairs = zero_f32x16(), zero_f32x8(), planes + 5 * n // 2
    for _ in range(n // 256):
        both = load_f32x16(pairs)
        scales = scales_k(row + 4) * broadcast_f16_x8(row) * even_lanes(both)
        minima = minima_k(row + 4) * broadcast_f16_x8(row + 2)
        rest = fma(minima, odd_lanes(both), rest)
        for j in range(4):
            prefetch(row + 32 * j + AHEAD)
            values = product(split(load_i8x32(row + 16 + 32 * j)), planes)
            total = fma(two_lanes(scales, 2 * j), values, total)
            planes += PLANES
        row, pairs = row + 144, pairs + 64
    return hsum(evened_eights(total)) - hsum(rest)


def dot_q5_k(row, n, planes):
    """The dot product of Q5_K: as Q4_K, with 32 bytes of fifth bits; bit i is for block i."""
    total, rest, pairs = zero_f32x16(), zero_f32x8(), planes + 5 * n // 2
    for _ in range(n // 256):
        both = load_f32x16(pairs)
        scales = scales_k(row + 4) * broadcast_f16_x8(row) * even_lanes(both)
        minima = minima_k(row + 4) * broadcast_f16_x8(row + 2)
        rest = fma(minima, odd_lanes(both), rest)
        tops = stacked(load_i8x32(row + 16))
        for j in range(4):
            prefetch(row + 48 * j + AHEAD)
            top = as_i8(shift_left(tops, 4)) & splat_i8x64(16)
            values = product(nibbles(load_i8x32(row + 48 + 32 * j)) | top, planes)
            total = fma(two_lanes(scales, 2 * j), values, total)
            tops, planes = shift_right(tops, 2), planes + PLANES
        row, pairs = row + 176, pairs + 64
    return hsum(total) - hsum(rest)


@njit
def firsts(pairs):
    """The dx of 16 blocks of 16."""
    return join(even_lanes(load_f32x16(pairs)), even_lanes(load_f32x16(pairs + 64)))


@njit
def seconds(pairs):
    """The sums of 16 blocks of 16."""
    return join(odd_lanes(load_f32x16(pairs)), odd_lanes(load_f32x16(pairs + 64)))


def dot_q2_k(row, n, planes):
    """Blocks of 16 with d * (scale & 15) * q - dmin * (scale >> 4)."""
    total, rest, pairs = zero_f32x16(), zero_f32x16(), planes + 2 * n
    for _ in range(n // 256):
        both = load_i8x16(row)
        scales = to_f32(words(both & splat_i8x16(15))) * broadcast_f16_x16(row + 80)
        scales = scales * firsts(pairs)
        minima = to_f32(words(shift_right(both, 4))) * broadcast_f16_x16(row + 82)
        rest = fma(minima, seconds(pairs), rest)
        for j in range(4):
            quants = as_i8(quarter(load_i8x32(row + 16 + 32 * (j // 2)), j % 2))
            values = product(quants & splat_i8x64(3), planes)
            total = fma(four_lanes(scales, 4 * j), values, total)
            planes += PLANES
        row, pairs = row + 84, pairs + 128
    return hsum(total) - hsum(rest)


@njit
def scales_q3_k(p):
    """The 16 scales of 6 bits of 12 bytes, minus 32."""
    a, b, c = load_u32(p), load_u32(p + 4), load_u32(p + 8)
    low = (a & LOW_4) | (c & LOW_2) << 4
    low |= ((b & LOW_4) | ((c >> 2) & LOW_2) << 4) << 32
    high = ((a >> 4) & LOW_4) | ((c >> 4) & LOW_2) << 4
    high |= (((b >> 4) & LOW_4) | ((c >> 6) & LOW_2) << 4) << 32
    return to_f32(words(join(bytes_of(low), bytes_of(high)))) - splat_f32x16(f32(32))


def dot_q3_k(row, n, planes):
    """Blocks of 16 with d * (scale - 32) * (q - 4): 2 bits of q and, inverted, the third."""
    total, rest, pairs = zero_f32x16(), zero_f32x16(), planes + 2 * n
    for _ in range(n // 256):
        scales = scales_q3_k(row + 96) * broadcast_f16_x16(row + 108)
        rest = fma(scales, seconds(pairs), rest)
        scales = scales * firsts(pairs)
        tops = stacked(load_i8x32(row))
        for j in range(4):
            quants = as_i8(quarter(load_i8x32(row + 32 + 32 * (j // 2)), j % 2))
            top = as_i8(shift_left(tops, 2)) & splat_i8x64(4)
            values = product((quants & splat_i8x64(3)) | top, planes)
            total = fma(four_lanes(scales, 4 * j), values, total)
            tops, planes = shift_right(tops, 2), planes + PLANES
        row, pairs = row + 110, pairs + 128
    return hsum(total) - f32(4) * hsum(rest)


def dot_q6_k(row, n, planes):
    """Blocks of 16 with d * scale * (q - 32): 4 bits of q, then the other 2."""
    total, rest, pairs = zero_f32x16(), zero_f32x16(), planes + 2 * n
    for _ in range(n // 256):
        scales = to_f32(widen(widen(load_i8x16(row + 192)))) * broadcast_f16_x16(row + 208)
        rest = fma(scales, seconds(pairs), rest)
        scales = scales * firsts(pairs)
        for j in range(4):
            prefetch(row + 48 * j + AHEAD)
            low = as_i16(load_i8x64(row + 64 * (j // 2)))
            low = as_i8(shift_right(low, 4) if j % 2 else low) & splat_i8x64(15)
            high = quarter(load_i8x32(row + 128 + 32 * (j // 2)), j % 2)
            high = as_i8(shift_left(high, 4)) & splat_i8x64(48)
            total = fma(four_lanes(scales, 4 * j), product(low | high, planes), total)
            planes += PLANES
        row, pairs = row + 210, pairs + 128
    return hsum(total) - f32(32) * hsum(rest)


# ---- types of codebook.py ------------------------------------------------------------------------
@njit
def eight_pairs(pairs):
    """The dx and sums of 8 blocks of 32."""
    both = load_f32x16(pairs)
    return even_lanes(both), odd_lanes(both)


@njit
def four_pairs(pairs):
    """The dx and sums of 4 blocks."""
    both = load_f32x8(pairs)
    return even_lanes(both), odd_lanes(both)


@njit
def sixteen_pairs(pairs):
    """The dx and sums of 16 blocks of 16."""
    return firsts(pairs), seconds(pairs)


PAIRS = {
    16: (sixteen_pairs, zero_f32x16),
    8: (eight_pairs, zero_f32x8),
    4: (four_pairs, zero_f32x4),
}  # by the number of elements of a scale


def dot_coded(type: str) -> Any:
    """The dot product with a row of a type of codebook.py."""
    values, scales_of, run = CODED[type]
    block, size = GGMLType[type].block_size, GGMLType[type].type_size
    spread, chunks, n_scale = spread_of(run), block // CHUNK, block // run
    (pairs_of, none), pairs_bytes = PAIRS[n_scale], 8 * n_scale
    per_element = 4 if run == 16 else 5  # half-bytes before the pairs: see above

    @njit
    def plus(total, scales, row, planes, j):
        return fma(spread(scales, j), signed_product(values(row, j), planes + PLANES * j), total)

    def dot(row, n, planes):
        total, rest, pairs = zero_f32x16(), none(), planes + per_element * n // 2
        for _ in range(n // block):
            dx, sums = pairs_of(pairs)
            scales = scales_of(row)
            rest = fma(scales, sums, rest)
            scales = scales * dx
            prefetch(row + AHEAD)
            if size > 64:
                prefetch(row + AHEAD + 64)
            # Unrolled by hand: LLVM estimates lookups as too long to unroll a loop of them.
            total = plus(total, scales, row, planes, 0)
            if chunks > 1:
                total = plus(total, scales, row, planes, 1)
            if chunks > 2:
                total = plus(total, scales, row, planes, 2)
                total = plus(total, scales, row, planes, 3)
            row, pairs, planes = row + size, pairs + pairs_bytes, planes + PLANES * chunks
        return hsum(total) - OFFSET * hsum(rest)

    return dot


# ---- float types: activations are not converted
# ----------------------------------------------------
def dot_floats(load: Any, size: int, load_one: Any) -> Any:
    """The dot product with a row of floats of `size` bytes; any n."""

    def dot(row, n, x):
        a, b = zero_f(), zero_f()
        pairs = n // (2 * LANES) * (2 * LANES)
        for i in range(0, pairs, 2 * LANES):
            at, xs = row + size * i, x + 4 * i
            a = fma(load(at), load_f(xs), a)
            b = fma(load(at + size * LANES), load_f(xs + 4 * LANES), b)
        total = hsum(a + b)
        for i in range(pairs, n):
            total += load_one(row + size * i) * load_f32(x + 4 * i)
        return total

    return dot


@njit
def load_one_brain(p):
    """The bfloat16 at p as float32."""
    return bits_f32(load_u16(p) << 16)


FLOATS = {
    "F32": (load_f, 4, load_f32),
    "F16": (load_half, 2, load_f16),
    "BF16": (load_brain, 2, load_one_brain),
}
BLOCKS_OF_256 = {
    "Q2_K": dot_q2_k,
    "Q3_K": dot_q3_k,
    "Q4_K": dot_q4_k,
    "Q5_K": dot_q5_k,
    "Q6_K": dot_q6_k,
    "IQ4_XS": dot_iq4_xs,
}


def pair_of(dot: Any) -> Any:
    """The dot products of two rows, given that of one."""
    one = njit(error_model="numpy")(dot)

    def pair(row, other, n, prepared):
        first = second = f32(0)
        for _ in range(2):  # a loop, so that the compiler optimises only one copy
            first, second = second, one(row, n, prepared)
            row = other
        return first, second

    return pair


def pair_of_type(type: str) -> Any:
    """The function pair(row, other row, n, x) -> two f32 of a ggml type's name.

    x: n f32 for types of floats, else their planes, and n a multiple of 64.
    """
    if type in FLOATS:
        pair = pair_of(dot_floats(*FLOATS[type]))
    elif type in BLOCKS_OF_32:
        pair = pair_of_blocks(BLOCKS_OF_32[type])
    else:
        pair = pair_of(dot_coded(type) if type in CODED else BLOCKS_OF_256[type])
    return njit(error_model="numpy")(pair)
