"""Dot products of one row of weights with one row of activations, for every ggml type.

Quantised weights meet activations as integers. A row of activations is stored as `planes`, 128
bytes for 64 elements: a block of 32 is v * dx with whole numbers v = 128 * high + low of 15 bits,
so that two products of bytes give the exact sum of u * v; its error is a 32000th of the block's
largest element, far below that of float16 keys and values. After the planes of all n elements come
`pairs`, two f32 for every block that has a scale of its own in the weights, 32 or 16 elements: dx,
and the sum of v times dx, which is what a constant added to all weights of the block contributes.

planes: high int8 [64]; low int8 [64].
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.decode import FP4_VALUES, IQ4_VALUES
from tamis.jit_kernels.cpu.intrinsic import (
    bits_f32,
    load_f16,
    load_f32,
    load_u8,
    load_u16,
    load_u32,
    store_f32,
)
from tamis.jit_kernels.cpu.simd import (
    CPU,
    LANES,
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
    join,
    lane,
    load_brain,
    load_f,
    load_f32x4,
    load_f32x16,
    load_half,
    load_i8x16,
    load_i8x32,
    load_i8x64,
    nibbles,
    nibbles_of_two,
    odd_lanes,
    prefetch,
    repeat,
    round_i32,
    shift_left,
    shift_right,
    shift_right_signed,
    splat_f32x8,
    splat_f32x16,
    splat_i8x16,
    splat_i8x64,
    splat_i32x16,
    store_low_bytes_x16,
    to_f32,
    two_eights,
    two_pairs_of_halves,
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

CHUNK, PLANES = 64, 128  # elements of a step and bytes of their planes
AHEAD = 1536  # bytes that weights are asked for ahead of their use
FULL = np.float32(127 * 128)  # the largest v
f32 = np.float32


# ---- activations ---------------------------------------------------------------------------------
@njit(error_model="numpy")
def split_block(x, high):
    """Write the planes of 32 elements; dx and the sums of both halves times dx."""
    a, b, low = load_f32x16(x), load_f32x16(x + 64), high + CHUNK
    top = hmax(vmax(vabs(a), vabs(b)))
    scale = splat_f32x16(FULL / top if top > f32(0) else f32(0))
    half = splat_i32x16(64)
    v, w = round_i32(a * scale), round_i32(b * scale)
    v_high, w_high = shift_right_signed(v + half, 7), shift_right_signed(w + half, 7)
    store_low_bytes_x16(high, v_high)
    store_low_bytes_x16(high + 16, w_high)
    store_low_bytes_x16(low, v - shift_left(v_high, 7))
    store_low_bytes_x16(low + 16, w - shift_left(w_high, 7))
    dx = top / FULL
    return dx, f32(hsum(v)) * dx, f32(hsum(w)) * dx


def planes_of(block: int) -> Any:
    """The function (x, n, out) that writes planes and pairs of n f32, a multiple of 64.

    block: elements that share a scale in the weights, 32 or 16.
    """

    @njit(error_model="numpy")
    def write_planes(x, n, out):
        pairs = out + n // CHUNK * PLANES
        for i in range(n // 32):
            high = out + i // 2 * PLANES + i % 2 * 32
            dx, first, second = split_block(x + 128 * i, high)
            store_f32(pairs, dx)
            if block == 32:
                store_f32(pairs + 4, first + second)
            else:
                store_f32(pairs + 4, first)
                store_f32(pairs + 8, dx)
                store_f32(pairs + 12, second)
            pairs += 256 // block

    return write_planes


# ---- one chunk -----------------------------------------------------------------------------------
@njit
def product(u, planes):
    """Sums of u * v, in whole numbers, by lane of four bytes; u: unsigned bytes up to 128."""
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


# Scales of two blocks, from the weights, times the pairs of the activations, are
# (d * dx, m * sum, d * dx, m * sum); m is a minimum of the weights, or d again where an offset that
# all weights share is put in at the end.
@njit
def added(total, scales, values):
    """The total plus a chunk's sums."""
    return fma(two_eights(scales), values, total)


@njit
def finished(total, rest, offset):
    """The row's product: offset times the second of each pair, summed in rest, is added."""
    return hsum(total) + offset * (lane(rest, 1) + lane(rest, 3))


# ---- types with blocks of 32: two blocks a step --------------------------------------------------
def dot_q4_0(row, n, planes):
    """Weights d * (q - 8)."""
    total, rest, pairs = zero_f32x16(), zero_f32x4(), planes + 2 * n
    for _ in range(n // CHUNK):
        prefetch(row + AHEAD)
        scales = doubled_halves(row, row + 18) * load_f32x4(pairs)
        total = added(total, scales, product(nibbles_of_two(row + 2, row + 20), planes))
        rest += scales
        row, planes, pairs = row + 36, planes + PLANES, pairs + 16
    return finished(total, rest, f32(-8))


def dot_q4_1(row, n, planes):
    """Weights d * q + m."""
    total, rest, pairs = zero_f32x16(), zero_f32x4(), planes + 2 * n
    for _ in range(n // CHUNK):
        prefetch(row + AHEAD)
        scales = two_pairs_of_halves(row, row + 20) * load_f32x4(pairs)
        total = added(total, scales, product(nibbles_of_two(row + 4, row + 24), planes))
        rest += scales
        row, planes, pairs = row + 40, planes + PLANES, pairs + 16
    return finished(total, rest, f32(1))


@njit
def five_bits(p, q, high_p, high_q):
    """Nibbles of 16 bytes at p and at q with their fifth bits, 32 at high_p and at high_q."""
    high = load_u32(high_p) | load_u32(high_q) << 32
    return nibbles_of_two(p, q) | bits_to_bytes(high, 16)


def dot_q5_0(row, n, planes):
    """Weights d * (q - 16)."""
    total, rest, pairs = zero_f32x16(), zero_f32x4(), planes + 2 * n
    for _ in range(n // CHUNK):
        prefetch(row + AHEAD)
        scales = doubled_halves(row, row + 22) * load_f32x4(pairs)
        u = five_bits(row + 6, row + 28, row + 2, row + 24)
        total = added(total, scales, product(u, planes))
        rest += scales
        row, planes, pairs = row + 44, planes + PLANES, pairs + 16
    return finished(total, rest, f32(-16))


def dot_q5_1(row, n, planes):
    """Weights d * q + m."""
    total, rest, pairs = zero_f32x16(), zero_f32x4(), planes + 2 * n
    for _ in range(n // CHUNK):
        prefetch(row + AHEAD)
        scales = two_pairs_of_halves(row, row + 24) * load_f32x4(pairs)
        u = five_bits(row + 8, row + 32, row + 4, row + 28)
        total = added(total, scales, product(u, planes))
        rest += scales
        row, planes, pairs = row + 48, planes + PLANES, pairs + 16
    return finished(total, rest, f32(1))


def dot_q8_0(row, n, planes):
    """Weights d * q."""
    total, rest, pairs = zero_f32x16(), zero_f32x4(), planes + 2 * n
    for _ in range(n // CHUNK):
        prefetch(row + AHEAD)
        scales = doubled_halves(row, row + 34) * load_f32x4(pairs)
        values = signed_product(join(load_i8x32(row + 2), load_i8x32(row + 36)), planes)
        total = added(total, scales, values)
        rest += scales
        row, planes, pairs = row + 68, planes + PLANES, pairs + 16
    return finished(total, rest, -OFFSET)


iq4_values = byte_table([int(v) for v in IQ4_VALUES])
fp4_values = byte_table([int(v) for v in FP4_VALUES])


def dot_iq4_nl(row, n, planes):
    """Weights d * table[q]."""
    total, rest, pairs = zero_f32x16(), zero_f32x4(), planes + 2 * n
    for _ in range(n // CHUNK):
        scales = doubled_halves(row, row + 18) * load_f32x4(pairs)
        weights = iq4_values(nibbles_of_two(row + 2, row + 20))
        total = added(total, scales, signed_product(weights, planes))
        rest += scales
        row, planes, pairs = row + 36, planes + PLANES, pairs + 16
    return finished(total, rest, -OFFSET)


@njit
def power_of_two(e):
    """2^(e - 128), a subnormal float where e < 2."""
    return bits_f32((e - 1) << 23) if e >= 2 else bits_f32(0x00200000 << e)


def dot_mxfp4(row, n, planes):
    """2^(e - 128) * table[q]."""
    total, rest, pairs = zero_f32x16(), zero_f32x4(), planes + 2 * n
    for _ in range(n // CHUNK):
        scales = doubled(power_of_two(load_u8(row)), power_of_two(load_u8(row + 17)))
        scales = scales * load_f32x4(pairs)
        weights = fp4_values(nibbles_of_two(row + 1, row + 18))
        total = added(total, scales, signed_product(weights, planes))
        rest += scales
        row, planes, pairs = row + 34, planes + PLANES, pairs + 16
    return finished(total, rest, -OFFSET)


# ---- types with blocks of 256: four steps --------------------------------------------------------
def dot_iq4_xs(row, n, planes):
    """Blocks of 32 with d * (scale - 32) * table[q]."""
    total, rest, pairs = zero_f32x16(), zero_f32x4(), planes + 2 * n
    for _ in range(n // 256):
        d, highs, lows = load_f16(row), load_u16(row + 2), load_u32(row + 4)
        for j in range(4):
            first = (lows >> (8 * j)) & 15 | ((highs >> (4 * j)) & 3) << 4
            second = (lows >> (8 * j + 4)) & 15 | ((highs >> (4 * j + 2)) & 3) << 4
            scales = doubled(d * f32(first - 32), d * f32(second - 32)) * load_f32x4(pairs)
            weights = iq4_values(nibbles_of_two(row + 8 + 32 * j, row + 24 + 32 * j))
            total = added(total, scales, signed_product(weights, planes))
            rest += scales
            planes, pairs = planes + PLANES, pairs + 16
        row += 136
    return finished(total, rest, -OFFSET)


@njit
def words(x):
    """Unsigned bytes as 32-bit lanes."""
    return widen_unsigned(widen_unsigned(x))


@njit
def stacked(x):
    """32 bytes, then the same shifted right by one bit, as 16-bit lanes.

    Bits move between neighbouring bytes, but not to bit 0 in three more shifts by two.
    """
    lanes = as_i16(x)
    return join(lanes, shift_right(lanes, 1))


@njit
def quarter(x, odd):
    """32 bytes of four 2-bit fields as 16-bit lanes: field 2 * odd lowest, then the next one."""
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
def two_lanes(x, i):
    """Lane i of x 8 times, lane i + 1 as often."""
    return join(splat_f32x8(lane(x, i)), splat_f32x8(lane(x, i + 1)))


@njit
def four_lanes(x, i):
    """Lanes i to i + 3 of x, each 4 times."""
    low, high = doubled(lane(x, i), lane(x, i + 1)), doubled(lane(x, i + 2), lane(x, i + 3))
    return join(repeat(low, 0, 2, 8), repeat(high, 0, 2, 8))


def dot_q4_k(row, n, planes):
    """Blocks of 32 with d * scale * q - dmin * minimum."""
    total, rest, pairs = zero_f32x16(), zero_f32x8(), planes + 2 * n
    for _ in range(n // 256):
        both = load_f32x16(pairs)
        scales = scales_k(row + 4) * broadcast_f16_x8(row) * even_lanes(both)
        minima = minima_k(row + 4) * broadcast_f16_x8(row + 2)
        rest = fma(minima, odd_lanes(both), rest)
        for j in range(4):
            prefetch(row + 32 * j + AHEAD)
            values = product(nibbles(load_i8x32(row + 16 + 32 * j)), planes)
            total = fma(two_lanes(scales, 2 * j), values, total)
            planes += PLANES
        row, pairs = row + 144, pairs + 64
    return hsum(total) - hsum(rest)


def dot_q5_k(row, n, planes):
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit i for block i."""
    total, rest, pairs = zero_f32x16(), zero_f32x8(), planes + 2 * n
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
    """Dx of 16 blocks of 16."""
    return join(even_lanes(load_f32x16(pairs)), even_lanes(load_f32x16(pairs + 64)))


@njit
def seconds(pairs):
    """Sums of 16 blocks of 16."""
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


# ---- float types: the activations as they are ----------------------------------------------------
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
BLOCKS_OF_16 = {"Q2_K", "Q3_K", "Q6_K"}


class RowDot(NamedTuple):
    """How a type's rows are multiplied."""

    prepare: Any  # (x f32, n, out): what `dot` reads, 4 * n bytes at out; None: x itself
    dot: Any  # (row, n, what `prepare` wrote) -> f32


def row_dot_of(type: str) -> RowDot:
    """The row product of a ggml type's name. n is a multiple of 64 where `prepare` is not None."""
    if type in FLOATS:
        return RowDot(None, njit(error_model="numpy")(dot_floats(*FLOATS[type])))
    prepare = planes_of(16 if type in BLOCKS_OF_16 else 32)
    return RowDot(prepare, njit(error_model="numpy")(_BY_TYPE[type]))


_BY_TYPE = {
    name.removeprefix("dot_").upper(): function
    for name, function in list(globals().items())
    if name.startswith("dot_") and name not in ("dot_u8", "dot_i8", "dot_floats")
}
