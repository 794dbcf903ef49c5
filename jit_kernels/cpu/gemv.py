"""Dot products of one row of weights with one row of activations, for every ggml type.

Quantised weights meet activations as integers. A row of activations is stored as `planes`, 256
bytes for 64 elements: a block of 32 is v * dx with whole numbers v = 128 * high + low of 15 bits,
so that two products of bytes give the exact sum of u * v; its error is a 32000th of the block's
largest element, far below that of float16 keys and values.

planes: high int8 [64]; low int8 [64]; dx f32 [16]; f32 [16] sums of four neighbouring v, times dx.
The 16 lanes of the last two are those that a product of 64 bytes leaves: lane i sums bytes 4 * i
and the next three. Elements keep their order, or are `paired`: the first halves of both blocks,
then the second halves, which is how the nibbles of two 32-element blocks unpack.
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
)
from tamis.jit_kernels.cpu.simd import (
    CPU,
    LANES,
    as_i8,
    as_i16,
    bits_to_bytes_x64,
    broadcast_f16_x8,
    broadcast_f16_x16,
    byte_table,
    bytes_of,
    dot_i8,
    dot_u8,
    fma,
    hmax,
    hsum,
    join,
    lane,
    load_brain,
    load_f,
    load_f32x16,
    load_half,
    load_i8x16,
    load_i8x32,
    load_i8x64,
    low_half,
    nibbles,
    pair_of_floats,
    pair_of_halves,
    pair_of_lanes,
    round_i32,
    shift_left,
    shift_right,
    shift_right_signed,
    splat_f32x8,
    splat_f32x16,
    splat_i8x16,
    splat_i8x64,
    splat_i32x16,
    store_f32x16,
    store_low_bytes_x16,
    to_f32,
    two_pairs_of_halves,
    vabs,
    vmax,
    widen,
    widen_unsigned,
    zero_f,
    zero_f32x16,
    zero_i32x16,
)

CHUNK, PLANES = 64, 256  # elements of a step and bytes of their planes
FULL = np.float32(127 * 128)  # the largest v
f32 = np.float32


# ---- activations ---------------------------------------------------------------------------------
@njit
def split_block(x, high, low, far):
    """Write the planes of 32 elements: 16 at high and low, 16 `far` bytes on; the block's dx."""
    a, b = load_f32x16(x), load_f32x16(x + 64)
    top = hmax(vmax(vabs(a), vabs(b)))
    scale = splat_f32x16(FULL / top if top > f32(0) else f32(0))
    half = splat_i32x16(64)
    v, w = round_i32(a * scale), round_i32(b * scale)
    v_high, w_high = shift_right_signed(v + half, 7), shift_right_signed(w + half, 7)
    store_low_bytes_x16(high, v_high)
    store_low_bytes_x16(high + far, w_high)
    store_low_bytes_x16(low, v - shift_left(v_high, 7))
    store_low_bytes_x16(low + far, w - shift_left(w_high, 7))
    return top / FULL


@njit
def whole(planes, u, x_zero):
    """The 16 sums of u * v of a chunk."""
    high = dot_u8(x_zero, u, load_i8x64(planes))
    return dot_u8(shift_left(high, 7), u, load_i8x64(planes + 64))


def planes_of(paired: bool) -> Any:
    """The function (x, n, planes) that writes the planes of n f32, a multiple of 64."""
    near, far = (16, 32) if paired else (32, 16)

    @njit(error_model="numpy")
    def write_planes(x, n, planes):
        one, zero = splat_i8x64(1), zero_i32x16()
        for _ in range(n // CHUNK):
            first = split_block(x, planes, planes + 64, far)
            second = split_block(x + 128, planes + near, planes + 64 + near, far)
            if paired:
                dx = pair_of_floats(first, second)
            else:
                dx = join(splat_f32x8(first), splat_f32x8(second))
            store_f32x16(planes + 128, dx)
            store_f32x16(planes + 192, to_f32(whole(planes, one, zero)) * dx)
            x, planes = x + 4 * CHUNK, planes + PLANES

    return write_planes


# ---- one chunk -----------------------------------------------------------------------------------
@njit
def product(u, planes):
    """Sums of u * x by lane; u: unsigned bytes up to 128."""
    return to_f32(whole(planes, u, zero_i32x16())) * load_f32x16(planes + 128)


@njit
def centred(u, offset, planes):
    """Sums of (u - offset) * x by lane."""
    return fma(splat_f32x16(-offset), load_f32x16(planes + 192), product(u, planes))


if CPU.vnni:  # its products of unsigned and signed bytes do not saturate

    @njit
    def signed_product(w, planes):
        """Sums of w * x by lane; w: signed bytes, not -128."""
        return centred(w ^ splat_i8x64(-128), f32(128), planes)

else:

    @njit
    def signed_product(w, planes):
        """Sums of w * x by lane; w: signed bytes, not -128."""
        high = dot_i8(zero_i32x16(), w, load_i8x64(planes))
        total = dot_i8(shift_left(high, 7), w, load_i8x64(planes + 64))
        return to_f32(total) * load_f32x16(planes + 128)


@njit
def sums_of_fours(planes):
    """Sums of x by lane, for what is added to every weight of a block."""
    return load_f32x16(planes + 192)


# ---- types with blocks of 32: two blocks a step, paired ------------------------------------------
@njit
def nibbles_at(p, q):
    """Nibbles of 16 bytes at p and 16 at q, paired."""
    return nibbles(join(load_i8x16(p), load_i8x16(q)))


def dot_q4_0(row, n, planes):
    """D * (q - 8)."""
    total = zero_f32x16()
    for _ in range(n // CHUNK):
        values = centred(nibbles_at(row + 2, row + 20), f32(8), planes)
        total = fma(pair_of_halves(row, row + 18), values, total)
        row, planes = row + 36, planes + PLANES
    return hsum(total)


def dot_q4_1(row, n, planes):
    """D * q + m."""
    total, rest = zero_f32x16(), zero_f32x16()
    for _ in range(n // CHUNK):
        values = product(nibbles_at(row + 4, row + 24), planes)
        scales = two_pairs_of_halves(row, row + 20)
        total = fma(pair_of_lanes(scales, 0, 2), values, total)
        rest = fma(pair_of_lanes(scales, 1, 3), sums_of_fours(planes), rest)
        row, planes = row + 40, planes + PLANES
    return hsum(total + rest)


@njit
def fifth_bits(p, q):
    """16 where a bit is set in the 32 bits at p or at q, paired."""
    first, second = load_u32(p), load_u32(q)
    low = (first & 0xFFFF) | (second & 0xFFFF) << 16
    high = first >> 16 | (second >> 16) << 16
    return bits_to_bytes_x64(low | high << 32, 16)


def dot_q5_0(row, n, planes):
    """D * (q - 16)."""
    total = zero_f32x16()
    for _ in range(n // CHUNK):
        u = nibbles_at(row + 6, row + 28) | fifth_bits(row + 2, row + 24)
        values = centred(u, f32(16), planes)
        total = fma(pair_of_halves(row, row + 22), values, total)
        row, planes = row + 44, planes + PLANES
    return hsum(total)


def dot_q5_1(row, n, planes):
    """D * q + m."""
    total, rest = zero_f32x16(), zero_f32x16()
    for _ in range(n // CHUNK):
        u = nibbles_at(row + 8, row + 32) | fifth_bits(row + 4, row + 28)
        scales = two_pairs_of_halves(row, row + 24)
        total = fma(pair_of_lanes(scales, 0, 2), product(u, planes), total)
        rest = fma(pair_of_lanes(scales, 1, 3), sums_of_fours(planes), rest)
        row, planes = row + 48, planes + PLANES
    return hsum(total + rest)


def dot_q8_0(row, n, planes):
    """D * q; in order, for the bytes of a block lie together."""
    total = zero_f32x16()
    for _ in range(n // CHUNK):
        values = signed_product(join(load_i8x32(row + 2), load_i8x32(row + 36)), planes)
        d = join(broadcast_f16_x8(row), broadcast_f16_x8(row + 34))
        total = fma(d, values, total)
        row, planes = row + 68, planes + PLANES
    return hsum(total)


iq4_values = byte_table([int(v) for v in IQ4_VALUES])
fp4_values = byte_table([int(v) for v in FP4_VALUES])


def dot_iq4_nl(row, n, planes):
    """D * table[q]."""
    total = zero_f32x16()
    for _ in range(n // CHUNK):
        values = signed_product(iq4_values(nibbles_at(row + 2, row + 20)), planes)
        total = fma(pair_of_halves(row, row + 18), values, total)
        row, planes = row + 36, planes + PLANES
    return hsum(total)


@njit
def power_of_two(e):
    """2^(e - 128), a subnormal float where e < 2."""
    return bits_f32((e - 1) << 23) if e >= 2 else bits_f32(0x00200000 << e)


def dot_mxfp4(row, n, planes):
    """2^(e - 128) * table[q]."""
    total = zero_f32x16()
    for _ in range(n // CHUNK):
        values = signed_product(fp4_values(nibbles_at(row + 1, row + 18)), planes)
        scales = pair_of_floats(power_of_two(load_u8(row)), power_of_two(load_u8(row + 17)))
        total = fma(scales, values, total)
        row, planes = row + 34, planes + PLANES
    return hsum(total)


# ---- types with blocks of 256: four steps, in order ----------------------------------------------
def dot_iq4_xs(row, n, planes):
    """Blocks of 32 with d * (scale - 32) * table[q]; paired."""
    total = zero_f32x16()
    for _ in range(n // 256):
        d, highs, lows = load_f16(row), load_u16(row + 2), load_u32(row + 4)
        for j in range(4):
            first = (lows >> (8 * j)) & 15 | ((highs >> (4 * j)) & 3) << 4
            second = (lows >> (8 * j + 4)) & 15 | ((highs >> (4 * j + 2)) & 3) << 4
            scales = pair_of_floats(d * f32(first - 32), d * f32(second - 32))
            weights = iq4_values(nibbles(load_i8x32(row + 8 + 32 * j)))
            total = fma(scales, signed_product(weights, planes), total)
            planes += PLANES
        row += 136
    return hsum(total)


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
    low = pair_of_floats(lane(x, i), lane(x, i + 1))
    high = pair_of_floats(lane(x, i + 2), lane(x, i + 3))
    return join(low_half(low), low_half(high))


def dot_q4_k(row, n, planes):
    """Blocks of 32 with d * scale * q - dmin * minimum."""
    total, rest = zero_f32x16(), zero_f32x16()
    for _ in range(n // 256):
        scales = scales_k(row + 4) * broadcast_f16_x8(row)
        minima = minima_k(row + 4) * broadcast_f16_x8(row + 2)
        for j in range(4):
            values = product(nibbles(load_i8x32(row + 16 + 32 * j)), planes)
            total = fma(two_lanes(scales, 2 * j), values, total)
            rest = fma(two_lanes(minima, 2 * j), sums_of_fours(planes), rest)
            planes += PLANES
        row += 144
    return hsum(total - rest)


def dot_q5_k(row, n, planes):
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit i for block i."""
    total, rest = zero_f32x16(), zero_f32x16()
    for _ in range(n // 256):
        scales = scales_k(row + 4) * broadcast_f16_x8(row)
        minima = minima_k(row + 4) * broadcast_f16_x8(row + 2)
        tops = stacked(load_i8x32(row + 16))
        for j in range(4):
            top = as_i8(shift_left(tops, 4)) & splat_i8x64(16)
            values = product(nibbles(load_i8x32(row + 48 + 32 * j)) | top, planes)
            total = fma(two_lanes(scales, 2 * j), values, total)
            rest = fma(two_lanes(minima, 2 * j), sums_of_fours(planes), rest)
            tops, planes = shift_right(tops, 2), planes + PLANES
        row += 176
    return hsum(total - rest)


def dot_q2_k(row, n, planes):
    """Blocks of 16 with d * (scale & 15) * q - dmin * (scale >> 4)."""
    total, rest = zero_f32x16(), zero_f32x16()
    for _ in range(n // 256):
        both = load_i8x16(row)
        scales = to_f32(words(both & splat_i8x16(15))) * broadcast_f16_x16(row + 80)
        minima = to_f32(words(shift_right(both, 4))) * broadcast_f16_x16(row + 82)
        for j in range(4):
            quants = as_i8(quarter(load_i8x32(row + 16 + 32 * (j // 2)), j % 2))
            values = product(quants & splat_i8x64(3), planes)
            total = fma(four_lanes(scales, 4 * j), values, total)
            rest = fma(four_lanes(minima, 4 * j), sums_of_fours(planes), rest)
            planes += PLANES
        row += 84
    return hsum(total - rest)


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
    total = zero_f32x16()
    for _ in range(n // 256):
        scales = scales_q3_k(row + 96) * broadcast_f16_x16(row + 108)
        tops = stacked(load_i8x32(row))
        for j in range(4):
            quants = as_i8(quarter(load_i8x32(row + 32 + 32 * (j // 2)), j % 2))
            top = as_i8(shift_left(tops, 2)) & splat_i8x64(4)
            values = centred((quants & splat_i8x64(3)) | top, f32(4), planes)
            total = fma(four_lanes(scales, 4 * j), values, total)
            tops, planes = shift_right(tops, 2), planes + PLANES
        row += 110
    return hsum(total)


def dot_q6_k(row, n, planes):
    """Blocks of 16 with d * scale * (q - 32): 4 bits of q, then the other 2."""
    total = zero_f32x16()
    for _ in range(n // 256):
        scales = to_f32(widen(widen(load_i8x16(row + 192)))) * broadcast_f16_x16(row + 208)
        for j in range(4):
            low = as_i16(load_i8x64(row + 64 * (j // 2)))
            low = as_i8(shift_right(low, 4) if j % 2 else low) & splat_i8x64(15)
            high = quarter(load_i8x32(row + 128 + 32 * (j // 2)), j % 2)
            high = as_i8(shift_left(high, 4)) & splat_i8x64(48)
            values = centred(low | high, f32(32), planes)
            total = fma(four_lanes(scales, 4 * j), values, total)
            planes += PLANES
        row += 210
    return hsum(total)


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
PAIRED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "MXFP4"}


class RowDot(NamedTuple):
    """How a type's rows are multiplied."""

    prepare: Any  # (x f32, n, out): what `dot` reads, 4 * n bytes at out; None: x itself
    dot: Any  # (row, n, what `prepare` wrote) -> f32


def row_dot_of(type: str) -> RowDot:
    """The row product of a ggml type's name. n is a multiple of 64 where `prepare` is not None."""
    if type in FLOATS:
        return RowDot(None, njit(error_model="numpy")(dot_floats(*FLOATS[type])))
    return RowDot(planes_of(type in PAIRED), njit(error_model="numpy")(_BY_TYPE[type]))


_BY_TYPE = {
    name.removeprefix("dot_").upper(): function
    for name, function in list(globals().items())
    if name.startswith("dot_") and name not in ("dot_u8", "dot_i8", "dot_floats")
}
