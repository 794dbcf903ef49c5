"""Eight neighbouring elements of a row of ggml blocks: what the products and the embedding read.

For a quantised type, `quants(row, i)` gives the numbers q, the scale and the offset of elements
i .. i + 7 (i a multiple of 8), which are q * scale + offset. For a type of floats, `element(row,
i)` gives one. Layouts are those of the NumPy decoders in tamis.formats.dequant, the oracle.
"""

from typing import Any

from numba import float32

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cuda.intrinsic import (
    bits_to_bytes,
    bytes_f32,
    const_bf16,
    const_f16,
    const_f32,
    const_i8,
    const_u8,
    const_u32,
    const_u32_even,
    device,
    field,
    half_f32,
    join,
    signed_bytes_f32,
)

NIBBLES, PAIRS, ONES = 0x0F0F0F0F, 0x03030303, 0x01010101


def quants_q4_0(p, i):
    """Blocks of 32: d, 16 bytes of nibbles (low nibbles first); d * (q - 8)."""
    b, j = p + 18 * (i >> 5), (i & 31)
    d, at, shift = const_f16(b), b + 2 + (j & 15), 4 * (j >> 4)
    low = field(const_u32_even(at), shift, NIBBLES)
    high = field(const_u32_even(at + 4), shift, NIBBLES)
    return bytes_f32(low, high), d, float32(-8) * d


def quants_q4_1(p, i):
    """Blocks of 32: d, m, nibbles; d * q + m."""
    b, j = p + 20 * (i >> 5), (i & 31)
    head, at, shift = const_u32(b), b + 4 + (j & 15), 4 * (j >> 4)
    low = field(const_u32(at), shift, NIBBLES)
    high = field(const_u32(at + 4), shift, NIBBLES)
    return bytes_f32(low, high), half_f32(head), half_f32(field(head, 16, 0xFFFF))


def quants_q5_0(p, i):
    """Blocks of 32: d, 32 high bits, nibbles; d * (q - 16)."""
    b, j = p + 22 * (i >> 5), (i & 31)
    d, at, shift = const_f16(b), b + 6 + (j & 15), 4 * (j >> 4)
    fifth = field(const_u32_even(b + 2), j, 0xFF)
    low = field(const_u32_even(at), shift, NIBBLES)
    high = field(const_u32_even(at + 4), shift, NIBBLES)
    low = join(low, bits_to_bytes(fifth), 4)
    high = join(high, bits_to_bytes(field(fifth, 4, 15)), 4)
    return bytes_f32(low, high), d, float32(-16) * d


def quants_q5_1(p, i):
    """Blocks of 32: d, m, 32 high bits, nibbles; d * q + m."""
    b, j = p + 24 * (i >> 5), (i & 31)
    head, at, shift = const_u32(b), b + 8 + (j & 15), 4 * (j >> 4)
    fifth = field(const_u32(b + 4), j, 0xFF)
    low = join(field(const_u32(at), shift, NIBBLES), bits_to_bytes(fifth), 4)
    high = field(const_u32(at + 4), shift, NIBBLES)
    high = join(high, bits_to_bytes(field(fifth, 4, 15)), 4)
    return bytes_f32(low, high), half_f32(head), half_f32(field(head, 16, 0xFFFF))


def quants_q8_0(p, i):
    """Blocks of 32: d, 32 int8."""
    b, j = p + 34 * (i >> 5), (i & 31)
    low, high = const_u32_even(b + 2 + j), const_u32_even(b + 6 + j)
    return signed_bytes_f32(low, high), const_f16(b), float32(0)


def quants_q2_k(p, i):
    """Blocks of 256: 16 bytes of 4-bit scale and minimum, 64 bytes of 2-bit values, d, dmin."""
    b, part = p + 84 * (i >> 8), (i & 255) >> 4
    head, scale = const_u32(b + 80), const_u8(b + part)
    at, shift = b + 16 + 32 * (part >> 3) + 16 * (part & 1) + (i & 15), 2 * ((part & 7) >> 1)
    low, high = field(const_u32(at), shift, PAIRS), field(const_u32(at + 4), shift, PAIRS)
    d, dmin = half_f32(head), half_f32(field(head, 16, 0xFFFF))
    offset = -dmin * float32(field(scale, 4, 15))
    return bytes_f32(low, high), d * float32(field(scale, 0, 15)), offset


def quants_q3_k(p, i):
    """Blocks of 256: 32 bytes of inverted high bits, 64 of 2-bit values, 12 of scales, d.

    A scale has 4 low bits in bytes 0-7 and 2 high bits in bytes 8-11, and is less 32.
    """
    b, part = p + 110 * (i >> 8), (i & 255) >> 4
    scales, bit = b + 96, (part >> 1)
    scale = field(const_u8(scales + (part & 7)), 4 * (part >> 3), 15)
    scale = join(scale, field(const_u8(scales + 8 + (part & 3)), 2 * (part // 4), 3), 4)
    dl = const_f16(b + 108) * (float32(scale) - float32(32))
    side = 16 * (part & 1) + (i & 15)
    at, shift = b + 32 + 32 * (part >> 3) + side, 2 * ((part & 7) >> 1)
    low, high = const_u32_even(at), const_u32_even(at + 4)
    third, fourth = const_u32_even(b + side), const_u32_even(b + side + 4)
    low = join(field(low, shift, PAIRS), field(third, bit, ONES), 2)
    high = join(field(high, shift, PAIRS), field(fourth, bit, ONES), 2)
    return bytes_f32(low, high), dl, float32(-4) * dl


@device
def scale_and_minimum(p, i):
    """6-bit scale and minimum i of the 12 bytes that Q4_K and Q5_K share."""
    j, late = i & 3, i >> 2  # without a branch, so that loads of several blocks go together
    one, two, three = const_u8(p + j), const_u8(p + 4 + j), const_u8(p + 8 + j)
    scale = join(field(three, 0, 15), field(one, 6, 3), 4)
    minimum = join(field(three, 4, 15), field(two, 6, 3), 4)
    return (
        float32(scale if late else field(one, 0, 63)),
        float32(minimum if late else field(two, 0, 63)),
    )


def quants_q4_k(p, i):
    """Blocks of 256: d, dmin, 12 bytes of 6-bit scales and minima, 128 of nibbles."""
    b, part = p + 144 * (i >> 8), (i & 255) >> 5
    head, (scale, minimum) = const_u32(b), scale_and_minimum(b + 4, part)
    at, shift = b + 16 + 32 * (part >> 1) + (i & 31), 4 * (part & 1)
    low, high = field(const_u32(at), shift, NIBBLES), field(const_u32(at + 4), shift, NIBBLES)
    d, dmin = half_f32(head), half_f32(field(head, 16, 0xFFFF))
    return bytes_f32(low, high), d * scale, -dmin * minimum


def quants_q5_k(p, i):
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    b, part = p + 176 * (i >> 8), (i & 255) >> 5
    head, (scale, minimum) = const_u32(b), scale_and_minimum(b + 4, part)
    at, shift, fifth = b + 48 + 32 * (part >> 1) + (i & 31), 4 * (part & 1), b + 16 + (i & 31)
    low, high = field(const_u32(at), shift, NIBBLES), field(const_u32(at + 4), shift, NIBBLES)
    low = join(low, field(const_u32(fifth), part, ONES), 4)
    high = join(high, field(const_u32(fifth + 4), part, ONES), 4)
    d, dmin = half_f32(head), half_f32(field(head, 16, 0xFFFF))
    return bytes_f32(low, high), d * scale, -dmin * minimum


def quants_q6_k(p, i):
    """Blocks of 256: 128 bytes of low nibbles, 64 of 2 high bits, 16 int8 scales, d."""
    b, part = p + 210 * (i >> 8), (i & 255) >> 4
    half, quarter, side = (part >> 3), ((part & 7) >> 1), 16 * (part & 1) + (i & 15)
    at, shift = b + 64 * half + 32 * (quarter & 1) + side, 4 * (quarter >> 1)
    above, high_shift = b + 128 + 32 * half + side, 2 * quarter
    low = field(const_u32_even(at), shift, NIBBLES)
    high = field(const_u32_even(at + 4), shift, NIBBLES)
    low = join(low, field(const_u32_even(above), high_shift, PAIRS), 4)
    high = join(high, field(const_u32_even(above + 4), high_shift, PAIRS), 4)
    dl = const_f16(b + 208) * const_i8(b + 192 + part)
    return bytes_f32(low, high), dl, float32(-32) * dl


ELEMENTS = {"F32": (const_f32, 4), "F16": (const_f16, 2), "BF16": (const_bf16, 2)}


def is_quantised(type: str) -> bool:
    """Whether a type has blocks: its rows then have a multiple of 32 elements."""
    return type not in ELEMENTS


def quants_of(type: str) -> Any:
    """The function quants of a quantised ggml type's name; KeyError for a type without one."""
    return device(globals()[f"quants_{type.lower()}"])


def element_of(type: str) -> Any:
    """The function element of a type of floats."""
    load, size = ELEMENTS[type]

    @device
    def element(row, i):
        return load(row + size * i)

    return element


def row_bytes_of(type: str) -> Any:
    """The function n -> bytes of a row of n elements of a ggml type."""
    block, size = GGMLType[type].block_size, GGMLType[type].type_size

    @device
    def row_bytes(n):
        return n // block * size

    return row_bytes
