"""Rows of quantised weights written as strips: see strips.py for what lies where."""

from typing import Any

from numba import njit

from tamis.jit_kernels.cpu.decode import _minimum_k, _scale_k, row_bytes_of
from tamis.jit_kernels.cpu.intrinsic import (
    load_u8,
    load_u16,
    load_u32,
    store_i16,
    store_i32,
    store_u8,
)
from tamis.jit_kernels.cpu.panel import share_of
from tamis.jit_kernels.cpu.strips import (
    HALVES,
    K_MINIMA,
    K_SCALES,
    K_VALUES,
    OF_TYPE,
    SIX_HIGH,
    SIX_LOW,
    SIX_SCALES,
    VECTOR,
)
from tamis.jit_kernels.ops import STRIP, strip_block


@njit(error_model="numpy")
def put_words(words, n, to, r):
    """N words of row r, one in each vector from `to` on."""
    for i in range(n):
        store_i32(to + VECTOR * i + 4 * r, load_u32(words + 4 * i))


@njit(error_model="numpy")
def put_bits(bits, to, r):
    """Four bits of row r, in the word of a vector; rows come in order."""
    at = to + r // 2
    store_u8(at, bits if r % 2 == 0 else load_u8(at) | bits << 4)


def halves_and(n_half: int, with_bits: bool, n_word: int) -> Any:
    """The function put(block, to, r) of a block of 32: float16s, fifth bits, words of values."""
    bits_at = HALVES * n_half
    words_at = bits_at + (64 if with_bits else 0)

    @njit(error_model="numpy")
    def put(block, to, r):
        for i in range(n_half):
            store_i16(to + HALVES * i + 2 * r, load_u16(block + 2 * i))
        block += 2 * n_half
        if with_bits:
            bits = load_u32(block)
            for i in range(8):
                put_bits(bits >> 4 * i & 15, to + bits_at + 8 * i, r)
            block += 4
        put_words(block, n_word, to + words_at, r)

    return put


@njit(error_model="numpy")
def put_k_scales(block, to, r):
    """The scales of Q4_K and Q5_K, a byte each."""
    for i in range(2):
        store_i16(to + HALVES * i + 2 * r, load_u16(block + 2 * i))
    for i in range(8):
        store_u8(to + K_SCALES + STRIP * i + r, _scale_k(block + 4, i))
        store_u8(to + K_MINIMA + STRIP * i + r, _minimum_k(block + 4, i))


@njit(error_model="numpy")
def put_q4_k(block, to, r):
    """A block of Q4_K."""
    put_k_scales(block, to, r)
    put_words(block + 16, 32, to + K_VALUES, r)


@njit(error_model="numpy")
def put_q5_k(block, to, r):
    """A block of Q5_K: bit i of its byte j is element j's of the 32 from 32 * i on."""
    put_k_scales(block, to, r)
    for j in range(8):
        word = load_u32(block + 16 + 4 * j)
        for i in range(8):
            ones = word >> i & 0x01010101
            bits = (ones | ones >> 7 | ones >> 14 | ones >> 21) & 15
            put_bits(bits, to + K_VALUES + 64 * i + 8 * j, r)
    put_words(block + 48, 32, to + K_VALUES + 512, r)


@njit(error_model="numpy")
def put_q6_k(block, to, r):
    """A block of Q6_K."""
    store_i16(to + 2 * r, load_u16(block + 208))
    for i in range(16):
        store_u8(to + SIX_SCALES + STRIP * i + r, load_u8(block + 192 + i))
    put_words(block, 32, to + SIX_LOW, r)
    put_words(block + 128, 16, to + SIX_HIGH, r)


PUT = {
    "Q4_0": halves_and(1, False, 4),
    "Q4_1": halves_and(2, False, 4),
    "Q5_0": halves_and(1, True, 4),
    "Q5_1": halves_and(2, True, 4),
    "Q8_0": halves_and(1, False, 8),
    "IQ4_NL": halves_and(1, False, 4),
    "Q4_K": put_q4_k,
    "Q5_K": put_q5_k,
    "Q6_K": put_q6_k,
}


def arrange(type: str) -> Any:
    """Kernel of ARRANGE: threads take strips."""
    put, row_bytes = PUT[type], row_bytes_of(type)
    block, size = OF_TYPE[type].block, strip_block(type)
    block_bytes = STRIP * size

    def kernel(tid, n_thread, w, strips, n_in, n_out):
        first, last = share_of(tid, n_thread, n_out, STRIP)
        n_block, apart = n_in // block, row_bytes(block)
        for r in range(first, last):
            row, to = w + row_bytes(n_in) * r, strips + block_bytes * n_block * (r // STRIP)
            for i in range(n_block):
                put(row + apart * i, to + block_bytes * i, r % STRIP)

    return kernel
