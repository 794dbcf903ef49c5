"""Readers of 16 consecutive elements of ggml-quantised rows, for products and embedding.

For a quantised type, `quants(row, i)` returns elements i .. i + 15 (i a multiple of 16): four words
of bytes q, a scale and an offset; they are q * scale + offset. For a type of floats, `element(row,
i)` returns one. Layouts are those of the NumPy decoders in tamis.formats.dequant, the oracle.
"""

from types import FunctionType
from typing import Any

import numpy as np
from numba import float32

from tamis.formats.codebooks import grid_of
from tamis.formats.dequant import IQ4_LEVELS, MXFP4_LEVELS
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cuda.lang import readers
from tamis.jit_kernels.cuda.lang.intrinsic import (
    bits_f32,
    bits_to_bytes,
    bytes_f32,
    const_bf16,
    const_f32,
    device,
    field,
    fields,
    half_f32,
    join,
    joined,
    signed_bytes_f32,
    table_word,
)
from tamis.jit_kernels.cuda.lang.ptx import bytes_of_two
from tamis.jit_kernels.cuda.lang.readers import (
    block_of_34,
    const_f16,
    const_i8,
    const_u8,
    const_u16,
    const_u128,
    words,
    words_any,
    words_even,
)

NIBBLES, PAIRS, ONES, ALL = 0x0F0F0F0F, 0x03030303, 0x01010101, 0xFFFFFFFF
HIGH_NIBBLES = 0xF0F0F0F0  # sixteen times the nibbles, which saves a shift


def quants_q4_0(p, i):
    """Blocks of 32: d, 16 bytes of nibbles (low nibbles first); d * (q - 8)."""
    b = p + 18 * (i >> 5)
    d = const_f16(b)
    return fields(words_even(b + 2), (i >> 2) & 4, NIBBLES), d, float32(-8) * d


def quants_q4_1(p, i):
    """Blocks of 32: d, m, nibbles; d * q + m."""
    b = p + 20 * (i >> 5)
    q = fields(words(b + 4), (i >> 2) & 4, NIBBLES)
    return q, const_f16(b), const_f16(b + 2)


def quants_q5_0(p, i):
    """Blocks of 32: d, 32 high bits, nibbles; d * (q - 16)."""
    b = p + 22 * (i >> 5)
    d, high = const_f16(b), const_u16(b + 2 + ((i >> 3) & 2))
    q = joined(fields(words_even(b + 6), (i >> 2) & 4, NIBBLES), bits_to_bytes(high), 4)
    return q, d, float32(-16) * d


def quants_q5_1(p, i):
    """Blocks of 32: d, m, 32 high bits, nibbles; d * q + m."""
    b = p + 24 * (i >> 5)
    high = const_u16(b + 4 + ((i >> 3) & 2))
    q = joined(fields(words(b + 8), (i >> 2) & 4, NIBBLES), bits_to_bytes(high), 4)
    return q, const_f16(b), const_f16(b + 2)


def quants_q8_0(p, i):
    """Blocks of 32: d, 32 int8."""
    b = p + 34 * (i >> 5)
    return words_even(b + 2 + (i & 16)), const_f16(b), float32(0)


def quants_q2_k(p, i):
    """Blocks of 256: 16 bytes of 4-bit scale and minimum, 64 bytes of 2-bit values, d, dmin."""
    b, part = p + 84 * (i >> 8), (i & 255) >> 4
    scale, shift = const_u8(b + part), part & 6
    q = fields(words(b + 16 + 32 * (part >> 3) + 16 * (part & 1)), shift, PAIRS)
    offset = -const_f16(b + 82) * float32(field(scale, 4, 15))
    return q, const_f16(b + 80) * float32(field(scale, 0, 15)), offset


def quants_q3_k(p, i):
    """Blocks of 256: 32 bytes of inverted high bits, 64 of 2-bit values, 12 of scales, d.

    A scale has 4 low bits in bytes 0-7 and 2 high bits in bytes 8-11, and is less 32.
    """
    b, part = p + 110 * (i >> 8), (i & 255) >> 4
    scale = field(const_u8(b + 96 + (part & 7)), 4 * (part >> 3), 15)
    scale = join(scale, field(const_u8(b + 104 + (part & 3)), 2 * (part >> 2), 3), 4)
    dl = const_f16(b + 108) * (float32(scale) - float32(32))
    side = 16 * (part & 1)
    q = fields(words_even(b + 32 + 32 * (part >> 3) + side), part & 6, PAIRS)
    return joined(q, fields(words_even(b + side), part >> 1, ONES), 2), dl, float32(-4) * dl


def _scale_and_minimum(p, i):
    """6-bit scale and minimum i of the 12 bytes that Q4_K and Q5_K share."""
    j, late = i & 3, i >> 2  # without a branch, so that loads of several blocks go together
    one, two, three = const_u8(p + j), const_u8(p + 4 + j), const_u8(p + 8 + j)
    scale = join(field(three, 0, 15), field(one, 6, 3), 4)
    minimum = join(field(three, 4, 15), field(two, 6, 3), 4)
    return (
        float32(scale if late else field(one, 0, 63)),
        float32(minimum if late else field(two, 0, 63)),
    )


scale_and_minimum = device(_scale_and_minimum)


@device
def scales_and_minima(head, i):
    """The d * scale and dmin * minimum of sub-blocks i and i + 1 (i even) of Q4_K or Q5_K.

    head: the block's first 16 bytes.
    """
    shift, late, (both, one, two, three) = 8 * (i & 2), i >> 2, head
    d, m = half_f32(both), -half_f32(field(both, 16, 0xFFFF))
    one, two, three = field(one, shift, ALL), field(two, shift, ALL), field(three, shift, ALL)
    scale = join(field(three, 0, 0x0F0F), field(one, 6, 0x0303), 4) if late else one
    minimum = join(field(three, 4, 0x0F0F), field(two, 6, 0x0303), 4) if late else two
    return (
        (d * float32(field(scale, 0, 63)), m * float32(field(minimum, 0, 63))),
        (d * float32(field(scale, 8, 63)), m * float32(field(minimum, 8, 63))),
    )


def quants_q4_k(p, i):
    """Blocks of 256: d, dmin, 12 bytes of 6-bit scales and minima, 128 of nibbles."""
    b, part = p + 144 * (i >> 8), (i & 255) >> 5
    scale, minimum = scale_and_minimum(b + 4, part)
    q = fields(const_u128(b + 16 + 32 * (part >> 1) + (i & 16)), 4 * (part & 1), NIBBLES)
    return q, const_f16(b) * scale, -const_f16(b + 2) * minimum


def quants_q5_k(p, i):
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    b, part = p + 176 * (i >> 8), (i & 255) >> 5
    scale, minimum = scale_and_minimum(b + 4, part)
    q = fields(const_u128(b + 48 + 32 * (part >> 1) + (i & 16)), 4 * (part & 1), NIBBLES)
    q = joined(q, fields(const_u128(b + 16 + (i & 16)), part, ONES), 4)
    return q, const_f16(b) * scale, -const_f16(b + 2) * minimum


def quants_q6_k(p, i):
    """Blocks of 256: 128 bytes of low nibbles, 64 of 2 high bits, 16 int8 scales, d."""
    b, part = p + 210 * (i >> 8), (i & 255) >> 4
    half, side = part >> 3, 16 * (part & 1)
    q = fields(words_even(b + 64 * half + 32 * ((part >> 1) & 1) + side), part & 4, NIBBLES)
    q = joined(q, fields(words_even(b + 128 + 32 * half + side), part & 6, PAIRS), 4)
    dl = const_f16(b + 208) * const_i8(b + 192 + part)
    return q, dl, float32(-32) * dl


def _levels_of(table: np.ndarray) -> tuple[Any, Any]:
    """The functions of four words of nibbles, each of which stands for one of sixteen levels.

    side(w, i): levels of the low nibbles, or of the high ones if i & 16; both(w): of both.
    """
    a, b, c, d = (int(word) for word in table.astype(np.int8).view(np.uint32))

    @device
    def level(w, late):
        """The levels of the four nibbles in the low 16 bits of w; late: which are above 7."""
        return bytes_of_two(bytes_of_two(a, b, w), bytes_of_two(c, d, w), late)

    @device
    def in_order(w):
        """The levels of the eight nibbles of a word: a byte's low one, its high one, and so on."""
        number, late = field(w, 0, 0x77777777), join(0x32103210, field(w, 1, 0x44444444), 0)
        return level(number, late), level(field(number, 16, ALL), field(late, 16, ALL))

    @device
    def side(w, i):
        chosen = 0x7531 if i & 16 else 0x6420
        (e, f), (g, h), (j, k), (m, n) = (
            in_order(w[0]),
            in_order(w[1]),
            in_order(w[2]),
            in_order(w[3]),
        )
        return (
            bytes_of_two(e, f, chosen), bytes_of_two(g, h, chosen),
            bytes_of_two(j, k, chosen), bytes_of_two(m, n, chosen),
        )  # fmt: skip

    @device
    def both(w):
        (e, f), (g, h), (j, k), (m, n) = (
            in_order(w[0]),
            in_order(w[1]),
            in_order(w[2]),
            in_order(w[3]),
        )
        return (
            (
                bytes_of_two(e, f, 0x6420), bytes_of_two(g, h, 0x6420),
                bytes_of_two(j, k, 0x6420), bytes_of_two(m, n, 0x6420),
            ),
            (
                bytes_of_two(e, f, 0x7531), bytes_of_two(g, h, 0x7531),
                bytes_of_two(j, k, 0x7531), bytes_of_two(m, n, 0x7531),
            ),
        )  # fmt: skip

    return side, both


iq4_side, iq4_both = _levels_of(IQ4_LEVELS)
mxfp4_side, mxfp4_both = _levels_of(MXFP4_LEVELS)


def quants_iq4_nl(p, i):
    """Blocks of 32: d, 16 bytes of nibbles; d * level."""
    b = p + 18 * (i >> 5)
    return iq4_side(words_even(b + 2), i), const_f16(b), float32(0)


@device
def iq4_xs_scale(d, high, low, part):
    """Of elements 32 part on: d * (scale - 32), of 16 bits of high parts and a byte of low ones."""
    scale = join(field(low, 4 * (part & 1), 15), field(high, 2 * part, 3), 4)
    return d * (float32(scale) - float32(32))


def quants_iq4_xs(p, i):
    """Blocks of 256: d, 16 bits of high parts of 6-bit scales, 4 bytes of low ones, nibbles."""
    b, part = p + 136 * (i >> 8), (i & 255) >> 5
    d = iq4_xs_scale(const_f16(b), const_u16(b + 2), const_u8(b + 4 + (part >> 1)), part)
    return iq4_side(words(b + 8 + 16 * part), i), d, float32(0)


@device
def half_power(e):
    """The scale 2^(e - 128) of MXFP4, whose levels are stored doubled."""
    return bits_f32((e - 1) << 23 if e > 1 else 0x200000 << e)


def quants_mxfp4(p, i):
    """Blocks of 32: an exponent, 16 bytes of nibbles."""
    b = p + 17 * (i >> 5)
    return mxfp4_side(words_any(b + 1), i), half_power(const_u8(b)), float32(0)


# ---- codebooks -----------------------------------------------------------------------------------
def _of_shape(type_: GGMLType, plus: int = 0) -> Any:
    """The intrinsic i -> word i of a type's grid: four elements, `plus` added to each."""
    return table_word((grid_of(type_) + np.int8(plus)).reshape(-1).view(np.uint32))


iq2_xxs_word, iq2_xs_word = _of_shape(GGMLType.IQ2_XXS), _of_shape(GGMLType.IQ2_XS)
iq2_s_word = _of_shape(GGMLType.IQ2_S)
iq3_xxs_word, iq3_s_word = _of_shape(GGMLType.IQ3_XXS), _of_shape(GGMLType.IQ3_S)
iq1_s_word = _of_shape(GGMLType.IQ1_S, 1)  # 0, 1 and 2


@device
def with_signs(q, bits):
    """Sixteen bytes, none 0, negated where a bit is set."""
    a, b, c, d = bits_to_bytes(bits)
    return (
        field((q[0] ^ (a * 255)) + a, 0, ALL), field((q[1] ^ (b * 255)) + b, 0, ALL),
        field((q[2] ^ (c * 255)) + c, 0, ALL), field((q[3] ^ (d * 255)) + d, 0, ALL),
    )  # fmt: skip


@device
def eight_signs(w, shift):
    """Eight sign bits: the seven at `shift`, and the parity bit that makes their count even."""
    seven = field(w, shift, 127)
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    return seven | ((parity ^ (parity >> 1)) & 1) << 7


@device
def half_steps(d, scale, unit):
    """The scale d * (scale + 1/2) * unit."""
    return d * (float32(scale) + float32(0.5)) * float32(unit)


def quants_iq2_xxs(p, i):
    """Blocks of 256: d, 8 bytes of each 32: four codes, then four times 7 signs, a scale."""
    b, part = p + 66 * (i >> 8), (i & 255) >> 4
    at, side = b + 2 + 8 * (part >> 1), part & 1
    codes, s = const_u16(at + 2 * side), join(const_u16(at + 4), const_u16(at + 6), 16)
    one, other = 2 * field(codes, 0, 255), 2 * field(codes, 8, 255)
    q = iq2_xxs_word(one), iq2_xxs_word(one + 1), iq2_xxs_word(other), iq2_xxs_word(other + 1)
    signs = eight_signs(s, 14 * side) | eight_signs(s, 14 * side + 7) << 8
    return with_signs(q, signs), half_steps(const_f16(b), field(s, 28, 15), 0.25), float32(0)


def quants_iq2_xs(p, i):
    """Blocks of 256: d, 32 times 9 bits of code and 7 signs, 16 scales of 4 bits."""
    b, part = p + 74 * (i >> 8), (i & 255) >> 4
    w, v = const_u16(b + 2 + 4 * part), const_u16(b + 4 + 4 * part)
    one, other = 2 * field(w, 0, 511), 2 * field(v, 0, 511)
    q = iq2_xs_word(one), iq2_xs_word(one + 1), iq2_xs_word(other), iq2_xs_word(other + 1)
    scale = field(const_u8(b + 66 + (part >> 1)), 4 * (part & 1), 15)
    signs = eight_signs(w, 9) | eight_signs(v, 9) << 8
    return with_signs(q, signs), half_steps(const_f16(b), scale, 0.25), float32(0)


def quants_iq2_s(p, i):
    """Blocks of 256: d, 32 codes, 32 bytes of signs, 2 more bits of codes, 16 scales of 4 bits."""
    b, part = p + 82 * (i >> 8), (i & 255) >> 4
    codes, side = const_u16(b + 2 + 2 * part), 4 * (part & 1)
    high = field(const_u8(b + 66 + (part >> 1)), side, 15)
    one = 2 * join(field(codes, 0, 255), field(high, 0, 3), 8)
    other = 2 * join(field(codes, 8, 255), field(high, 2, 3), 8)
    q = iq2_s_word(one), iq2_s_word(one + 1), iq2_s_word(other), iq2_s_word(other + 1)
    scale = field(const_u8(b + 74 + (part >> 1)), side, 15)
    signs = const_u16(b + 34 + 2 * part)
    return with_signs(q, signs), half_steps(const_f16(b), scale, 0.25), float32(0)


def quants_iq3_xxs(p, i):
    """Blocks of 256: d, 64 codes, 8 times four times 7 signs and a scale of 4 bits."""
    b, part = p + 98 * (i >> 8), (i & 255) >> 4
    c, v = const_u16(b + 2 + 4 * part), const_u16(b + 4 + 4 * part)
    at, shift = b + 66 + 4 * (part >> 1), 14 * (part & 1)
    s = join(const_u16(at), const_u16(at + 2), 16)
    q = (
        iq3_xxs_word(field(c, 0, 255)), iq3_xxs_word(field(c, 8, 255)),
        iq3_xxs_word(field(v, 0, 255)), iq3_xxs_word(field(v, 8, 255)),
    )  # fmt: skip
    signs = eight_signs(s, shift) | eight_signs(s, shift + 7) << 8
    return with_signs(q, signs), half_steps(const_f16(b), field(s, 28, 15), 0.5), float32(0)


def quants_iq3_s(p, i):
    """Blocks of 256: d, 64 codes, their ninth bits, 32 bytes of signs, 8 scales of 4 bits."""
    b, part = p + 110 * (i >> 8), (i & 255) >> 4
    c, v = const_u16(b + 2 + 4 * part), const_u16(b + 4 + 4 * part)
    high = field(const_u8(b + 66 + (part >> 1)), 4 * (part & 1), 15)
    q = (
        iq3_s_word(join(field(c, 0, 255), field(high, 0, 1), 8)),
        iq3_s_word(join(field(c, 8, 255), field(high, 1, 1), 8)),
        iq3_s_word(join(field(v, 0, 255), field(high, 2, 1), 8)),
        iq3_s_word(join(field(v, 8, 255), field(high, 3, 1), 8)),
    )
    scale = field(const_u8(b + 106 + (part >> 2)), 4 * ((part >> 1) & 1), 15)
    signs = const_u16(b + 74 + 2 * part)
    return with_signs(q, signs), half_steps(const_f16(b), scale, 2), float32(0)


def quants_iq1_s(p, i):
    """Blocks of 256: d, 32 codes, of each 32 elements 3 bits of four codes, a scale, a sign."""
    b, part = p + 50 * (i >> 8), (i & 255) >> 4
    codes, w = const_u16(b + 2 + 2 * part), const_u16(b + 34 + 2 * (part >> 1))
    high = field(w, 6 * (part & 1), 63)
    one = 2 * join(field(codes, 0, 255), field(high, 0, 7), 8)
    other = 2 * join(field(codes, 8, 255), field(high, 3, 7), 8)
    q = iq1_s_word(one), iq1_s_word(one + 1), iq1_s_word(other), iq1_s_word(other + 1)
    dl = const_f16(b) * float32(2 * field(w, 12, 7) + 1)
    return q, dl, dl * (float32(-1.125) if field(w, 15, 1) else float32(-0.875))


def quants_iq1_m(p, i):
    """Blocks of 256: 32 codes, nibbles of 3 more bits and a sign for each 8, 3-bit scales, d.

    It returns eight times the values, plus 9; 2 of that are added only where the sign is not set.
    """
    b, part = p + 56 * (i >> 8), (i & 255) >> 4
    codes, high = const_u16(b + 2 * part), const_u8(b + 32 + part)
    one = 2 * join(field(codes, 0, 255), field(high, 0, 7), 8)
    other = 2 * join(field(codes, 8, 255), field(high, 4, 7), 8)
    up, more = 0 if field(high, 3, 1) else 0x02020202, 0 if field(high, 7, 1) else 0x02020202
    q = (
        field(8 * iq1_s_word(one) + up, 0, ALL), field(8 * iq1_s_word(one + 1) + up, 0, ALL),
        field(8 * iq1_s_word(other) + more, 0, ALL),
        field(8 * iq1_s_word(other + 1) + more, 0, ALL),
    )  # fmt: skip
    scale = field(const_u16(b + 48 + 2 * (part >> 2)), 3 * (part & 3), 7)
    low = join(field(const_u16(b + 48), 12, 15), field(const_u16(b + 50), 12, 15), 4)
    top = join(field(const_u16(b + 52), 12, 15), field(const_u16(b + 54), 12, 15), 4)
    dl = half_f32(join(low, top, 8)) * float32(2 * scale + 1) * float32(0.125)
    return q, dl, float32(-9) * dl


# ---- three values, two values, 4-bit floats of 16 ------------------------------------------------
@device
def digits(w, k):
    """The base-3 digit k of each byte, read as a fraction of 256."""
    power = (0x511B090301 >> 8 * k) & 255
    even, odd = (
        (field(w, 0, 0xFF00FF) * power) & 0xFF00FF,
        (field(w, 8, 0xFF00FF) * power) & 0xFF00FF,
    )
    return join(field(3 * even, 8, 0x30003), field(3 * odd, 8, 0x30003), 8)


def quants_tq1_0(p, i):
    """Blocks of 256: five digits of base 3 of 32 bytes, then of 16, four of 4, d; d * (q - 1)."""
    b, part = p + 54 * (i >> 8), (i & 255) >> 4
    last, second = part == 15, part >= 10
    w = words_even(b + (36 if last else (32 if second else 16 * (part & 1))))
    k, next = 0 if last else (part - 10 if second else part >> 1), 1 if last else 0
    a, c, e = w[3] if last else w[0], w[3] if last else w[1], w[3] if last else w[2]
    d = const_f16(b + 52)
    q = digits(a, k), digits(c, k + next), digits(e, k + 2 * next), digits(w[3], k + 3 * next)
    return q, d, -d


def quants_tq2_0(p, i):
    """Blocks of 256: 64 bytes of 2-bit values, d; d * (q - 1)."""
    b, part = p + 66 * (i >> 8), (i & 255) >> 4
    d = const_f16(b + 64)
    return fields(words_even(b + 32 * (part >> 3) + 16 * (part & 1)), part & 6, PAIRS), d, -d


def quants_q1_0(p, i):
    """Blocks of 128: d, a bit each; d where it is set, else -d."""
    b = p + 18 * (i >> 7)
    d = const_f16(b)
    return bits_to_bytes(const_u16(b + 2 + ((i >> 3) & 14))), d + d, -d


@device
def four_pairs(x):
    """The four fields of 2 bits of a byte, a byte each."""
    return field(x | x << 6 | x << 12 | x << 18, 0, PAIRS)


def quants_q2_0(p, i):
    """Blocks of 64: d, 2-bit values, four a byte; d * (q - 1)."""
    b, part = p + 18 * (i >> 6), (i & 63) >> 4
    d, low, high = const_f16(b), const_u16(b + 2 + 4 * part), const_u16(b + 4 + 4 * part)
    one, other = four_pairs(field(low, 0, 255)), four_pairs(field(low, 8, 255))
    return (one, other, four_pairs(field(high, 0, 255)), four_pairs(field(high, 8, 255))), d, -d


@device
def halved_ue4m3(x):
    """Half of a UE4M3 scale, by way of its bits as float16; 0x7F is 0."""
    return float32(0) if x == 0x7F else half_f32(field(x << 7, 0, 0x3F80)) * float32(128)


def quants_nvfp4(p, i):
    """Blocks of 64: four scales, 32 bytes: of each eight the low nibbles, then the high ones."""
    b, part = p + 36 * (i >> 6), (i & 63) >> 4
    w, late = words(b + 4 + 16 * (part >> 1)), part & 1
    one, other = w[2] if late else w[0], w[3] if late else w[1]
    low, high = mxfp4_both((one, other, one, other))
    return (low[0], low[1], high[0], high[1]), halved_ue4m3(const_u8(b + part)), float32(0)


# ---- two units at a time -----------------------------------------------------------------------
# `halves(row, u)` returns 32 elements of a row as two units, which share one read: their offsets,
# and q, scale and offset of each. u: 0 to a 32nd of the row's elements.


def halves_q8_0(p, u):
    """The elements of a block: int8s."""
    d, a, b, c, e, f, g, h, i = block_of_34(p + 34 * u)
    scale = half_f32(d)
    return (
        (32 * u, 32 * u + 16),
        ((a, b, c, e), scale, float32(0)),
        ((f, g, h, i), scale, float32(0)),
    )


def halves_q4_k(p, u):
    """Low and high nibbles of 16 bytes: 32 elements apart."""
    b, side, part = p + 144 * (u >> 3), 16 * (u & 1), u & 6
    (one, least), (other, lower) = scales_and_minima(const_u128(b), part)
    w = const_u128(b + 16 + 16 * part + side)
    at = 256 * (u >> 3) + 32 * part + side
    return (
        (at, at + 32),
        (fields(w, 0, NIBBLES), one, least),
        (fields(w, 0, HIGH_NIBBLES), other * float32(1 / 16), lower),
    )


def halves_q5_k(p, u):
    """As halves_q4_k, with the fifth bits."""
    b, side, part = p + 176 * (u >> 3), 16 * (u & 1), u & 6
    (one, least), (other, lower) = scales_and_minima(const_u128(b), part)
    w, fifth = const_u128(b + 48 + 16 * part + side), const_u128(b + 16 + side)
    at = 256 * (u >> 3) + 32 * part + side
    return (
        (at, at + 32),
        (joined(fields(w, 0, NIBBLES), fields(fifth, part, ONES), 4), one, least),
        (joined(fields(w, 4, NIBBLES), fields(fifth, part + 1, ONES), 4), other, lower),
    )


def halves_q6_k(p, u):
    """Low and high nibbles of 16 bytes: 64 elements apart; high bits from the same bytes."""
    b, half, part = p + 210 * (u >> 3), (u >> 2) & 1, u & 3
    w = words_even(b + 64 * half + 16 * part)
    high = words_even(b + 128 + 32 * half + 16 * (part & 1))
    d, scales = const_f16(b + 208), b + 192 + 8 * half + part
    one, other = d * const_i8(scales), d * const_i8(scales + 4)
    at, shift = 256 * (u >> 3) + 128 * half + 16 * part, part & 2
    return (
        (at, at + 64),
        (joined(fields(w, 0, NIBBLES), fields(high, shift, PAIRS), 4), one, float32(-32) * one),
        (
            joined(fields(w, 4, NIBBLES), fields(high, shift + 4, PAIRS), 4),
            other,
            float32(-32) * other,
        ),
    )


def halves_iq4_nl(p, u):
    """Low and high nibbles of a block."""
    b, zero = p + 18 * u, float32(0)
    d, (low, high) = const_f16(b), iq4_both(words_even(b + 2))
    return (32 * u, 32 * u + 16), (low, d, zero), (high, d, zero)


def halves_iq4_xs(p, u):
    """Low and high nibbles of an eighth of a block (32 elements)."""
    b, part, zero = p + 136 * (u >> 3), u & 7, float32(0)
    d = iq4_xs_scale(const_f16(b), const_u16(b + 2), const_u8(b + 4 + (part >> 1)), part)
    low, high = iq4_both(words(b + 8 + 16 * part))
    return (32 * u, 32 * u + 16), (low, d, zero), (high, d, zero)


def halves_mxfp4(p, u):
    """Low and high nibbles of a block."""
    b, zero = p + 17 * u, float32(0)
    d, (low, high) = half_power(const_u8(b)), mxfp4_both(words_any(b + 1))
    return (32 * u, 32 * u + 16), (low, d, zero), (high, d, zero)


def halves_of(type: str) -> Any:
    """The function halves of a quantised ggml type's name, for rows in shared memory."""
    own = globals().get(f"halves_{type.lower()}")
    if own is not None:
        return device(_of_shared(own))
    quants = shared_quants_of(type)

    @device
    def halves(p, u):
        return (32 * u, 32 * u + 16), quants(p, 32 * u), quants(p, 32 * u + 16)

    return halves


def _of_shared(function: Any) -> FunctionType:
    """A copy of a function that reads shared memory instead of device memory."""
    own: dict[str, Any] = readers.SHARED._asdict()
    own["scale_and_minimum"] = device(FunctionType(_scale_and_minimum.__code__, globals() | own))
    return FunctionType(function.__code__, globals() | own, function.__name__)


_CODEBOOKS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
SIGNED = ("Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", *_CODEBOOKS)
ELEMENTS = {"F32": (const_f32, 4), "F16": (const_f16, 2), "BF16": (const_bf16, 2)}


def is_quantised(type: str) -> bool:
    """Whether a type has blocks: its rows then have a multiple of 32 elements."""
    return type not in ELEMENTS


def bytes_of(type: str) -> Any:
    """The intrinsic (low, high) -> the eight bytes of two words as float32."""
    return signed_bytes_f32 if is_signed(type) else bytes_f32


def is_signed(type: str) -> bool:
    """Whether the bytes of quants are signed."""
    return type in SIGNED


def quants_of(type: str) -> Any:
    """The function quants of a quantised ggml type's name; KeyError for a type without one."""
    return device(globals()[f"quants_{type.lower()}"])


def shared_quants_of(type: str) -> Any:
    """The function quants of a quantised ggml type's name, for rows in shared memory."""
    return device(_of_shared(globals()[f"quants_{type.lower()}"]))


def element_of(type: str) -> Any:
    """The function element of a type of floats."""
    load, size = ELEMENTS[type]

    @device
    def element(row, i):
        return load(row + size * i)

    return element


def row_bytes_of(type: str) -> Any:
    """The function that returns the bytes of a row of n elements of a ggml type."""
    block, size = GGMLType[type].block_size, GGMLType[type].type_size

    @device
    def row_bytes(n):
        return n // block * size

    return row_bytes
