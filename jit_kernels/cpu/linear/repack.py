"""Rows of quantised weights written as strips: see strips.py for what lies where."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import STRIP, strip_block
from tamis.jit_kernels.cpu.lang.byte_tiles import store_low_nibbles
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_u8,
    load_u16,
    load_u32,
    store_i16,
    store_i32,
    store_u8,
)
from tamis.jit_kernels.cpu.lang.simd import (
    load_i32x16,
    shift_right,
    splat_i32x16,
)
from tamis.jit_kernels.cpu.linear.dequant import (
    _minimum_k,
    _scale_iq4_xs,
    _scale_k,
    _scale_q3_k,
    row_bytes_of,
)
from tamis.jit_kernels.cpu.linear.interleaved import (
    HALVES,
    K_MINIMA,
    K_SCALES,
    K_VALUES,
    OF_TYPE,
    SIGNED_SCALES,
    SIX_HIGH,
    SIX_LOW,
    THREE_VALUES,
    TWO_SCALES,
    TWO_VALUES,
    VECTOR,
    XS_VALUES,
)
from tamis.jit_kernels.cpu.linear.panel import share_of

# Every function here takes a block of STRIP rows, the first at `block` and `apart` bytes between
# them, and the place in the strip that it goes to.


@njit(error_model="numpy")
def put_halves(block, apart, to):
    """A float16 of each row."""
    for r in range(STRIP):
        store_i16(to + 2 * r, load_u16(block + apart * r))


def putting_words(n: int) -> Any:
    """The function put(block, apart, to): n words of each row, one in each vector."""

    @njit(error_model="numpy")
    def put(block, apart, to):
        for r in range(STRIP):
            for i in range(n):
                store_i32(to + VECTOR * i + 4 * r, load_u32(block + apart * r + 4 * i))

    return put


one_word, four_words, eight_words, sixteen_words = map(putting_words, (1, 4, 8, 16))


def of_32(n_half: int, with_bits: bool, put_values: Any) -> Any:
    """The function put(block, apart, to) of a type with blocks of 32: see strips.py."""
    bits_at = HALVES * n_half
    values_at = bits_at + (64 if with_bits else 0)
    read_at = 2 * n_half + (4 if with_bits else 0)

    @njit(error_model="numpy")
    def put(block, apart, to):
        for i in range(n_half):
            put_halves(block + 2 * i, apart, to + HALVES * i)
        if with_bits:
            one_word(block + 2 * n_half, apart, to + values_at)
            bits = load_i32x16(to + values_at)
            for i in range(8):
                store_low_nibbles(to + bits_at + 8 * i, bits)
                bits = shift_right(bits, 4)
        put_values(block + read_at, apart, to + values_at)

    return put


@njit(error_model="numpy")
def put_bytes(block, apart, to, n):
    """Of each row n bytes, sixteen rows side by side."""
    for r in range(STRIP):
        for i in range(n):
            store_u8(to + STRIP * i + r, load_u8(block + apart * r + i))


@njit(error_model="numpy")
def put_mxfp4(block, apart, to):
    """A block of MXFP4: its exponent e as the bfloat16 2^(e - 128), a subnormal one where e < 2."""
    for r in range(STRIP):
        e = load_u8(block + apart * r)
        store_i16(to + 2 * r, (e - 1) << 7 if e >= 2 else 0x20 << e)
    four_words(block + 1, apart, to + HALVES)


@njit(error_model="numpy")
def put_q2_k(block, apart, to):
    """A block of Q2_K."""
    put_halves(block + 80, apart, to)
    put_halves(block + 82, apart, to + HALVES)
    put_bytes(block, apart, to + TWO_SCALES, 16)
    sixteen_words(block + 16, apart, to + TWO_VALUES)


@njit(error_model="numpy")
def put_iq4_xs(block, apart, to):
    """A block of IQ4_XS."""
    put_halves(block, apart, to)
    for r in range(STRIP):
        for i in range(8):
            store_u8(to + SIGNED_SCALES + STRIP * i + r, _scale_iq4_xs(block + apart * r, i))
    for i in range(2):
        sixteen_words(block + 8 + 64 * i, apart, to + XS_VALUES + 16 * VECTOR * i)


@njit(error_model="numpy")
def put_k_scales(block, apart, to):
    """The scales and minima of Q4_K and Q5_K, a byte each."""
    for i in range(2):
        put_halves(block + 2 * i, apart, to + HALVES * i)
    for r in range(STRIP):
        for i in range(8):
            scales = block + apart * r + 4
            store_u8(to + K_SCALES + STRIP * i + r, _scale_k(scales, i))
            store_u8(to + K_MINIMA + STRIP * i + r, _minimum_k(scales, i))


@njit(error_model="numpy")
def put_q4_k(block, apart, to):
    """A block of Q4_K."""
    put_k_scales(block, apart, to)
    for i in range(2):
        sixteen_words(block + 16 + 64 * i, apart, to + K_VALUES + 16 * VECTOR * i)


@njit(error_model="numpy")
def put_top_bits(block, apart, to, spare):
    """32 bytes of each row: bit i of byte j is element j's of the 32 from 32 * i on."""
    eight_words(block, apart, spare)
    for j in range(8):
        bits = load_i32x16(spare + VECTOR * j)
        for i in range(8):
            ones = bits & splat_i32x16(0x01010101)
            nibble = (ones | shift_right(ones, 7)) | (shift_right(ones, 14) | shift_right(ones, 21))
            store_low_nibbles(to + 64 * i + 8 * j, nibble)
            bits = shift_right(bits, 1)


@njit(error_model="numpy")
def three_bits(row, p, j):
    """Elements 32 p + j to 32 p + j + 3 of a row of Q3_K, a byte each."""
    pair = load_u32(row + 32 + 32 * (p // 4) + j) >> (2 * (p % 4)) & 0x03030303
    return pair | (load_u32(row + j) >> p & 0x01010101) << 2


@njit(error_model="numpy")
def put_q3_k(block, apart, to):
    """A block of Q3_K."""
    put_halves(block + 108, apart, to)
    for r in range(STRIP):
        for i in range(16):
            scale = _scale_q3_k(block + apart * r + 96, i)
            store_u8(to + SIGNED_SCALES + STRIP * i + r, scale)
    for r in range(STRIP):
        row = block + apart * r
        for p in range(8):  # 32 elements, the first sixteen of them in low nibbles
            for j in range(4):
                low, high = three_bits(row, p, 4 * j), three_bits(row, p, 4 * j + 16)
                store_i32(to + THREE_VALUES + VECTOR * (4 * p + j) + 4 * r, low | high << 4)


@njit(error_model="numpy")
def put_q5_k(block, apart, to):
    """A block of Q5_K."""
    put_k_scales(block, apart, to)
    values = to + K_VALUES + 512
    put_top_bits(block + 16, apart, to + K_VALUES, values)
    for i in range(2):
        sixteen_words(block + 48 + 64 * i, apart, values + 16 * VECTOR * i)


@njit(error_model="numpy")
def put_q6_k(block, apart, to):
    """A block of Q6_K."""
    put_halves(block + 208, apart, to)
    put_bytes(block + 192, apart, to + SIGNED_SCALES, 16)
    for i in range(2):
        sixteen_words(block + 64 * i, apart, to + SIX_LOW + 16 * VECTOR * i)
    sixteen_words(block + 128, apart, to + SIX_HIGH)


PUT = {
    "Q4_0": of_32(1, False, four_words),
    "Q4_1": of_32(2, False, four_words),
    "Q5_0": of_32(1, True, four_words),
    "Q5_1": of_32(2, True, four_words),
    "Q8_0": of_32(1, False, eight_words),
    "IQ4_NL": of_32(1, False, four_words),
    "MXFP4": put_mxfp4,
    "Q2_K": put_q2_k,
    "Q3_K": put_q3_k,
    "Q4_K": put_q4_k,
    "Q5_K": put_q5_k,
    "Q6_K": put_q6_k,
    "IQ4_XS": put_iq4_xs,
}


def arrange(type: str) -> Any:
    """Kernel of ARRANGE: threads take strips."""
    put, row_bytes = PUT[type], row_bytes_of(type)
    block, block_bytes = OF_TYPE[type].block, STRIP * strip_block(type)

    def kernel(tid, n_thread, a):
        first, last = share_of(tid, n_thread, a.n_out, STRIP)
        row_size = row_bytes(a.n_in)
        to = a.strips + a.n_in // block * block_bytes * (first // STRIP)
        for r in range(first, last, STRIP):
            for i in range(a.n_in // block):
                put(a.w + row_size * r + row_bytes(block) * i, row_size, to)
                to += block_bytes

    return kernel
