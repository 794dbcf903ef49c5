"""Rows of ggml blocks decoded to float32: one function a type, `decode(row, n, out)`.

Layouts are those of the NumPy decoders in tamis.formats.dequant, which are the oracle.
"""

from typing import Any

import numpy as np
from numba import njit

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cpu.lang.blocks16 import (
    decode_half,
    decode_i8,
    decode_u2,
    decode_u4,
    decode_u5,
    decode_u5_mask,
    decode_u6,
)
from tamis.jit_kernels.cpu.lang.intrinsic import (
    bits_f32,
    load_f16,
    load_f32,
    load_i8,
    load_u8,
    load_u16,
    load_u32,
    store_f32,
)
from tamis.jit_kernels.cpu.linear.codebook import CODED, decoder_of

f32 = np.float32
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def decode_f32(p, n, out):
    """Plain float32."""
    for i in range(n):
        store_f32(out + 4 * i, load_f32(p + 4 * i))


def decode_f16(p, n, out):
    """IEEE half."""
    whole = n // 16 * 16
    for i in range(0, whole, 16):
        decode_half(out + 4 * i, p + 2 * i)
    for i in range(whole, n):
        store_f32(out + 4 * i, load_f16(p + 2 * i))


def decode_bf16(p, n, out):
    """The upper half of a float32."""
    for i in range(n):
        store_f32(out + 4 * i, bits_f32(load_u16(p + 2 * i) << 16))


def decode_q4_0(p, n, out):
    """Blocks of 32: d, 16 bytes of nibbles (low nibbles first); d * (q - 8)."""
    for _ in range(n // 32):
        d = load_f16(p)
        for i in range(2):
            decode_u4(out + 64 * i, p + 2, 4 * i, d, f32(-8) * d)
        p, out = p + 18, out + 128


def decode_q4_1(p, n, out):
    """Blocks of 32: d, m, nibbles; d * q + m."""
    for _ in range(n // 32):
        d, m = load_f16(p), load_f16(p + 2)
        for i in range(2):
            decode_u4(out + 64 * i, p + 4, 4 * i, d, m)
        p, out = p + 20, out + 128


def decode_q5_0(p, n, out):
    """Blocks of 32: d, 32 high bits, nibbles; d * (q - 16)."""
    for _ in range(n // 32):
        d, high = load_f16(p), load_u32(p + 2)
        for i in range(2):
            decode_u5_mask(out + 64 * i, p + 6, 4 * i, high >> (16 * i), d, f32(-16) * d)
        p, out = p + 22, out + 128


def decode_q5_1(p, n, out):
    """Blocks of 32: d, m, 32 high bits, nibbles; d * q + m."""
    for _ in range(n // 32):
        d, m, high = load_f16(p), load_f16(p + 2), load_u32(p + 4)
        for i in range(2):
            decode_u5_mask(out + 64 * i, p + 8, 4 * i, high >> (16 * i), d, m)
        p, out = p + 24, out + 128


def decode_q8_0(p, n, out):
    """Blocks of 32: d, 32 int8."""
    for _ in range(n // 32):
        d = load_f16(p)
        for i in range(2):
            decode_i8(out + 64 * i, p + 2 + 16 * i, d)
        p, out = p + 34, out + 128


def decode_q2_k(p, n, out):
    """Blocks of 256: 16 bytes of 4-bit scale and minimum, 64 bytes of 2-bit values, d, dmin."""
    for _ in range(n // 256):
        d, dmin = load_f16(p + 80), load_f16(p + 82)
        for part in range(16):  # 16 values with one scale
            scale = load_u8(p + part)
            quants, shift = p + 16 + 32 * (part // 8) + 16 * (part % 2), 2 * ((part % 8) // 2)
            dl, ml = d * f32(scale & 15), dmin * f32(scale >> 4)
            decode_u2(out + 64 * part, quants, shift, dl, -ml)
        p, out = p + 84, out + 1024


@njit
def _scale_q3_k(p, part):
    """The scale of 16 values: 4 low bits in bytes 0-7, 2 high bits in bytes 8-11; minus 32."""
    low = (load_u8(p + part % 8) >> (4 * (part // 8))) & 15
    high = (load_u8(p + 8 + part % 4) >> (2 * (part // 4))) & 3
    return (low | high << 4) - 32


def decode_q3_k(p, n, out):
    """Blocks of 256: 32 bytes of inverted high bits, 64 of 2-bit values, 12 of scales, d."""
    for _ in range(n // 256):
        d = load_f16(p + 108)
        for part in range(16):
            dl = d * f32(_scale_q3_k(p + 96, part))
            quants = p + 32 + 32 * (part // 8) + 16 * (part % 2)
            shift, bit = 2 * ((part % 8) // 2), part // 2
            for j in range(16):
                q = (load_u8(quants + j) >> shift) & 3
                high = (load_u8(p + 16 * (part % 2) + j) >> bit) & 1
                store_f32(out + 64 * part + 4 * j, dl * f32(q - 4 + 4 * high))
        p, out = p + 110, out + 1024


@njit
def _scale_k(p, i):
    """6-bit scale i of the 12 bytes that Q4_K and Q5_K share."""
    if i < 4:
        return load_u8(p + i) & 63
    return (load_u8(p + i + 4) & 15) | (load_u8(p + i - 4) >> 6) << 4


@njit
def _minimum_k(p, i):
    """6-bit minimum i of the same 12 bytes."""
    if i < 4:
        return load_u8(p + i + 4) & 63
    return (load_u8(p + i + 4) >> 4) | (load_u8(p + i) >> 6) << 4


def decode_q4_k(p, n, out):
    """Blocks of 256: d, dmin, 12 bytes of 6-bit scales and minima, 128 of nibbles."""
    for _ in range(n // 256):
        d, dmin = load_f16(p), load_f16(p + 2)
        for part in range(8):
            dl = d * f32(_scale_k(p + 4, part))
            ml = dmin * f32(_minimum_k(p + 4, part))
            low, shift, at = p + 16 + 32 * (part // 2), 4 * (part & 1), out + 128 * part
            decode_u4(at, low, shift, dl, -ml)
            decode_u4(at + 64, low + 16, shift, dl, -ml)
        p, out = p + 144, out + 1024


def decode_q5_k(p, n, out):
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    for _ in range(n // 256):
        d, dmin = load_f16(p), load_f16(p + 2)
        for part in range(8):
            dl = d * f32(_scale_k(p + 4, part))
            ml = dmin * f32(_minimum_k(p + 4, part))
            low, shift, at = p + 48 + 32 * (part // 2), 4 * (part & 1), out + 128 * part
            decode_u5(at, low, shift, p + 16, part, dl, -ml)
            decode_u5(at + 64, low + 16, shift, p + 32, part, dl, -ml)
        p, out = p + 176, out + 1024


def decode_q6_k(p, n, out):
    """Blocks of 256: 128 bytes of low nibbles, 64 of 2 high bits, 16 int8 scales, d."""
    for _ in range(n // 256):
        d = load_f16(p + 208)
        for part in range(16):
            dl = d * f32(load_i8(p + 192 + part))
            half, quarter, side = part // 8, (part % 8) // 2, 16 * (part % 2)
            low = p + 64 * half + 32 * (quarter % 2) + side
            high = p + 128 + 32 * half + side
            shift, high_shift = 4 * (quarter // 2), 2 * quarter
            decode_u6(out + 64 * part, low, shift, high, high_shift, dl, f32(-32) * dl)
        p, out = p + 210, out + 1024


def decode_iq4_nl(p, n, out):
    """Blocks of 32: d, nibbles that index a table."""
    for _ in range(n // 32):
        d = load_f16(p)
        for j in range(16):
            q = load_u8(p + 2 + j)
            store_f32(out + 4 * j, d * IQ4_VALUES[q & 15])
            store_f32(out + 64 + 4 * j, d * IQ4_VALUES[q >> 4])
        p, out = p + 18, out + 128


@njit
def _scale_iq4_xs(p, part):
    """The scale of 32 values: 4 low bits in bytes 4-7, 2 high bits in bytes 2-3; minus 32."""
    low = (load_u8(p + 4 + part // 2) >> (4 * (part % 2))) & 15
    return (low | ((load_u16(p + 2) >> (2 * part)) & 3) << 4) - 32


def decode_iq4_xs(p, n, out):
    """Blocks of 256: d, 16 + 32 bits of 6-bit scales of 32 values each, nibbles as IQ4_NL."""
    for _ in range(n // 256):
        d = load_f16(p)
        for part in range(8):
            dl = d * f32(_scale_iq4_xs(p, part))
            for j in range(16):
                q = load_u8(p + 8 + 16 * part + j)
                store_f32(out + 128 * part + 4 * j, dl * IQ4_VALUES[q & 15])
                store_f32(out + 128 * part + 64 + 4 * j, dl * IQ4_VALUES[q >> 4])
        p, out = p + 136, out + 1024


def decode_mxfp4(p, n, out):
    """Blocks of 32: an exponent byte, nibbles of 4-bit floats (the table holds twice them)."""
    for _ in range(n // 32):
        e = load_u8(p)
        # 2^(e - 128), a subnormal float where e < 2.
        d = bits_f32((e - 1) << 23) if e >= 2 else bits_f32(0x00200000 << e)
        for j in range(16):
            q = load_u8(p + 1 + j)
            store_f32(out + 4 * j, d * FP4_VALUES[q & 15])
            store_f32(out + 64 + 4 * j, d * FP4_VALUES[q >> 4])
        p, out = p + 17, out + 128


def row_bytes_of(type: str) -> Any:
    """The function n -> bytes of a row of n elements of a ggml type."""
    block, size = GGMLType[type].block_size, GGMLType[type].type_size

    @njit
    def row_bytes(n):
        return n // block * size

    return row_bytes


def decode_of(type: str) -> Any:
    """The compiled row decoder of a ggml type's name; KeyError for a type without one."""
    decode = decoder_of(type) if type in CODED else globals()[f"decode_{type.lower()}"]
    return njit(error_model="numpy")(decode)
