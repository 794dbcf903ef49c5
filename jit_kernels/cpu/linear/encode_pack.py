"""The bytes of encoded blocks: levels and scales of one lane, packed as ggml's types have them."""

from typing import Any

from numba import njit

from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, store_f16, store_i16, store_u8
from tamis.jit_kernels.cpu.lang.simd import LANES

V = 4 * LANES  # bytes of a vector
# Of a thread's scratch: where what is after the tile of values begins, counted in vectors.
WEIGHTS, LEVELS, SCALES, MINIMA, SUMS, SCALE_LEVELS, MINIMUM_LEVELS, ENDS = (
    256, 512, 768, 784, 800, 816, 832, 848,
)  # fmt: skip

# Every function here takes a thread's scratch, a lane, and the address of the block's bytes.


@njit(error_model="numpy")
def number(t, first, i, b):
    """The int32 of lane b in vector first + i."""
    return load_i32(t + V * (first + i) + 4 * b)


@njit(error_model="numpy")
def put_half(t, at, b, to):
    """Write the float32 of lane b in vector `at` as a float16."""
    store_f16(to, load_f32(t + V * at + 4 * b))


@njit(error_model="numpy")
def put_nibbles(t, b, first, to):
    """Write the low 4 bits of 32 levels: the first 16 in the low halves of 16 bytes."""
    for i in range(16):
        low, high = number(t, LEVELS, first + i, b), number(t, LEVELS, first + 16 + i, b)
        store_u8(to + i, (low & 15) | ((high & 15) << 4))


@njit(error_model="numpy")
def put_fifth_bits(t, b, to):
    """Write bit 4 of each of 32 levels."""
    for byte in range(4):
        bits = 0
        for i in range(8):
            bits |= ((number(t, LEVELS, 8 * byte + i, b) >> 4) & 1) << i
        store_u8(to + byte, bits)


def packing_32(type: str) -> Any:
    """The function of a type with blocks of 32."""
    has_minimum, has_fifth = type in ("Q4_1", "Q5_1"), type in ("Q5_0", "Q5_1")
    at_bits = 4 if has_minimum else 2
    at_levels = at_bits + (4 if has_fifth else 0)

    @njit(error_model="numpy")
    def pack(t, b, to):
        put_half(t, SCALES, b, to)
        if has_minimum:
            put_half(t, MINIMA, b, to + 2)
        if has_fifth:
            put_fifth_bits(t, b, to + at_bits)
        put_nibbles(t, b, 0, to + at_levels)

    return pack


@njit(error_model="numpy")
def pack_q8_0(t, b, to):
    """Q8_0: the scale, and a byte for each element."""
    put_half(t, SCALES, b, to)
    for i in range(32):
        store_u8(to + 2 + i, number(t, LEVELS, i, b) & 255)


@njit(error_model="numpy")
def put_pairs(t, b, to):
    """Write the low 2 bits of 256 levels: byte l of each half has elements l, l + 32, ..."""
    for half in range(2):
        for i in range(32):
            bits = 0
            for k in range(4):
                bits |= (number(t, LEVELS, 128 * half + 32 * k + i, b) & 3) << (2 * k)
            store_u8(to + 32 * half + i, bits)


@njit(error_model="numpy")
def pack_q2_k(t, b, to):
    """Q2_K: nibbles of 16 scales and minima, levels of 2 bits, the scales of both."""
    for j in range(16):
        scale, minimum = number(t, SCALE_LEVELS, j, b), number(t, MINIMUM_LEVELS, j, b)
        store_u8(to + j, (scale & 15) | ((minimum & 15) << 4))
    put_pairs(t, b, to + 16)
    put_half(t, ENDS, b, to + 80)
    put_half(t, ENDS + 1, b, to + 82)


@njit(error_model="numpy")
def pack_q3_k(t, b, to):
    """Q3_K: the levels' third bits, their low 2 bits, 16 scales of 6 bits, the scale of those."""
    for i in range(32):
        bits = 0
        for k in range(8):
            bits |= ((number(t, LEVELS, 32 * k + i, b) >> 2) & 1) << k
        store_u8(to + i, bits)
    put_pairs(t, b, to + 32)
    for j in range(8):
        low = number(t, SCALE_LEVELS, j, b) + 32
        high = number(t, SCALE_LEVELS, 8 + j, b) + 32
        store_u8(to + 96 + j, (low & 15) | ((high & 15) << 4))
    for j in range(4):
        bits = 0
        for k in range(4):
            bits |= (((number(t, SCALE_LEVELS, 4 * k + j, b) + 32) >> 4) & 3) << (2 * k)
        store_u8(to + 104 + j, bits)
    put_half(t, ENDS, b, to + 108)


@njit(error_model="numpy")
def put_sixes(t, b, to):
    """Write 8 scales and 8 minima of 6 bits in 12 bytes."""
    for j in range(4):
        scale, minimum = number(t, SCALE_LEVELS, j, b), number(t, MINIMUM_LEVELS, j, b)
        later, later_min = number(t, SCALE_LEVELS, 4 + j, b), number(t, MINIMUM_LEVELS, 4 + j, b)
        store_u8(to + j, (scale & 63) | ((later >> 4) & 3) << 6)
        store_u8(to + 4 + j, (minimum & 63) | ((later_min >> 4) & 3) << 6)
        store_u8(to + 8 + j, (later & 15) | ((later_min & 15) << 4))


def packing_ranged(type: str) -> Any:
    """The function of Q4_K and Q5_K."""
    fifth = type == "Q5_K"
    at_levels = 48 if fifth else 16

    @njit(error_model="numpy")
    def pack(t, b, to):
        put_half(t, ENDS, b, to)
        put_half(t, ENDS + 1, b, to + 2)
        put_sixes(t, b, to + 4)
        if fifth:
            for i in range(32):
                bits = 0
                for k in range(8):
                    bits |= ((number(t, LEVELS, 32 * k + i, b) >> 4) & 1) << k
                store_u8(to + 16 + i, bits)
        for k in range(4):
            for i in range(32):
                low = number(t, LEVELS, 64 * k + i, b)
                high = number(t, LEVELS, 64 * k + 32 + i, b)
                store_u8(to + at_levels + 32 * k + i, (low & 15) | ((high & 15) << 4))

    return pack


@njit(error_model="numpy")
def pack_q6_k(t, b, to):
    """Q6_K: the levels' low 4 bits, their high 2 bits, 16 scales of a byte, the scale of those."""
    for half in range(2):
        for i in range(32):
            first = 128 * half + i
            one, two = number(t, LEVELS, first, b), number(t, LEVELS, first + 32, b)
            three, four = number(t, LEVELS, first + 64, b), number(t, LEVELS, first + 96, b)
            at = to + 64 * half + i
            store_u8(at, (one & 15) | ((three & 15) << 4))
            store_u8(at + 32, (two & 15) | ((four & 15) << 4))
            bits = (one >> 4) | ((two >> 4) << 2) | ((three >> 4) << 4) | ((four >> 4) << 6)
            store_u8(to + 128 + 32 * half + i, bits)
    for j in range(16):
        store_u8(to + 192 + j, number(t, SCALE_LEVELS, j, b) & 255)
    put_half(t, ENDS, b, to + 208)


@njit(error_model="numpy")
def pack_iq4_xs(t, b, to):
    """IQ4_XS: the scale, 8 scales of 6 bits, the levels' 4 bits."""
    put_half(t, ENDS, b, to)
    high = 0
    for j in range(8):
        high |= (((number(t, SCALE_LEVELS, j, b) + 32) >> 4) & 3) << (2 * j)
    store_i16(to + 2, high)
    for j in range(4):
        one = number(t, SCALE_LEVELS, 2 * j, b) + 32
        two = number(t, SCALE_LEVELS, 2 * j + 1, b) + 32
        store_u8(to + 4 + j, (one & 15) | ((two & 15) << 4))
    for j in range(8):
        put_nibbles(t, b, 32 * j, to + 8 + 16 * j)


PACKING = {type: packing_32(type) for type in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")} | {
    "Q8_0": pack_q8_0, "Q2_K": pack_q2_k, "Q3_K": pack_q3_k, "Q4_K": packing_ranged("Q4_K"),
    "Q5_K": packing_ranged("Q5_K"), "Q6_K": pack_q6_k, "IQ4_XS": pack_iq4_xs,
}  # fmt: skip
