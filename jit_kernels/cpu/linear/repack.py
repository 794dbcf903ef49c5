"""Rows of quantised weights written as strips: see strips.py for the layout."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import STRIP, strip_block
from tamis.jit_kernels.cpu.lang.byte_tiles import store_low_nibbles
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_u8,
    load_u16,
    load_u32,
    store_f16,
    store_i16,
    store_i32,
    store_u8,
)
from tamis.jit_kernels.cpu.lang.lookup import (
    halved_ue4m3,
    nibbles_of_eights,
    scatter_words,
    sign_bits,
)
from tamis.jit_kernels.cpu.lang.simd import (
    as_i8,
    as_i16,
    bits_to_bytes,
    high_half,
    lane,
    load_i32x16,
    low_half,
    shift_left,
    shift_right,
    splat_i8x64,
    splat_i32x16,
    vabs,
)
from tamis.jit_kernels.cpu.linear.codebook import CODED
from tamis.jit_kernels.cpu.linear.dequant import (
    _minimum_k,
    _scale_iq4_xs,
    _scale_k,
    _scale_q3_k,
    row_bytes_of,
)
from tamis.jit_kernels.cpu.linear.interleaved import (
    HALVES,
    IQ2_SIGNS,
    K_MINIMA,
    K_SCALES,
    K_VALUES,
    NUDGED_PAIRS,
    NUDGES,
    NVFP4_VALUES,
    OF_TYPE,
    PAIRS_32,
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

# Every function here takes a block of STRIP rows: the address `block` of the first, `apart` bytes
# from row to row, and the address in the interleaved copy that it writes to.


@njit(error_model="numpy")
def put_halves(block, apart, to):
    """Interleave a float16 of each row."""
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
    """Interleave n bytes of each of sixteen rows, byte by byte."""
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


# ---- types of codebook.py ------------------------------------------------------------------------
def put_sub_scales(of_row: Any, n: int) -> Any:
    """The function put(block, apart, to): n bytes of each row, of_row(block, i), after d."""

    @njit(error_model="numpy")
    def put(block, apart, to):
        for r in range(STRIP):
            for i in range(n):
                store_u8(to + SIGNED_SCALES + STRIP * i + r, of_row(block + apart * r, i))

    return put


@njit
def odd(n):
    """A scale s of half steps, doubled: 2 * s + 1."""
    return 2 * (n & 15) + 1


@njit
def sub_iq1_s(block, i):
    """The scale byte of IQ1_S: negative if an eighth is subtracted."""
    word = load_u16(block + 34 + 2 * i)
    size = odd(word >> 12 & 7)
    return -size if word >> 15 else size


@njit
def sub_iq1_m(block, i):
    """The scale byte of IQ1_M."""
    return odd(load_u16(block + 48 + 2 * (i // 4)) >> (3 * (i % 4)) & 7)


@njit
def sub_iq2_xxs(block, i):
    """The scale byte of IQ2_XXS."""
    return odd(load_u32(block + 6 + 8 * i) >> 28)


@njit
def sub_iq3_xxs(block, i):
    """The scale byte of IQ3_XXS."""
    return odd(load_u32(block + 66 + 4 * i) >> 28)


def sub_nibbles(at: int) -> Any:
    """The scale byte of a type with nibbles at `at`."""

    @njit
    def of_row(block, i):
        return odd(load_u8(block + at + i // 2) >> (4 * (i % 2)))

    return of_row


@njit
def three_values(x):
    """-1 to 1 as 0 to 2."""
    return x + splat_i8x64(1)


@njit
def three_eighths(x):
    """-9 or -7, -1 or 1, 7 or 9 as 0 to 2."""
    return as_i8(shift_right(as_i16(x + splat_i8x64(12)), 3)) & splat_i8x64(3)


@njit
def three_levels(x):
    """8, 25 and 43 of either sign as 0 to 2."""
    return as_i8(shift_right(as_i16(vabs(x)), 4)) & splat_i8x64(3)


@njit(error_model="numpy")
def put_signs(x, to, r):
    """Write the signs of 64 elements of row r: a nibble for each four of a vector's uint64."""
    bits = sign_bits(x)
    for t in range(16):
        at, nibble = to + 8 * t + r // 2, bits >> (4 * t) & 15
        store_u8(at, load_u8(at) | nibble << 4 if r % 2 else nibble)


def put_pairs(type: str, code: Any, at: int, signs: int = 0) -> Any:
    """The function put(block, apart, to) of values of two bits, and of their signs at `signs`."""
    values = CODED[type].values

    @njit(error_model="numpy")
    def put(block, apart, to):
        for r in range(STRIP):
            for half in range(2):
                x, y = values(block + apart * r, 2 * half), values(block + apart * r, 2 * half + 1)
                if signs:
                    put_signs(x, to + signs + 256 * half, r)
                    put_signs(y, to + signs + 256 * half + 128, r)
                x, y = code(x), code(y)
                low = low_half(x) | as_i8(shift_left(as_i16(high_half(x)), 2))
                high = low_half(y) | as_i8(shift_left(as_i16(high_half(y)), 2))
                both = low | as_i8(shift_left(as_i16(high), 4))
                scatter_words(to + at + 8 * VECTOR * half + 4 * r, both)

    return put


q2_0_values = CODED["Q2_0"].values


@njit(error_model="numpy")
def put_q2_0(block, apart, to):
    """A block of Q2_0."""
    put_halves(block, apart, to)
    for r in range(STRIP):
        x = q2_0_values(block + apart * r, 0) + splat_i8x64(1)
        low, high = low_half(x), high_half(x)
        left = low_half(low) | as_i8(shift_left(as_i16(high_half(low)), 2))
        right = low_half(high) | as_i8(shift_left(as_i16(high_half(high)), 2))
        scatter_words(to + HALVES + 4 * r, left | as_i8(shift_left(as_i16(right), 4)))


def put_iq2(type: str, unit: int) -> Any:
    """The function put(block, apart, to) of the values of an IQ2 type."""
    signs = IQ2_SIGNS[unit]
    return put_pairs(type, three_levels, signs + 512, signs)


@njit(error_model="numpy")
def put_nibbles(x, to, r):
    """64 nibbles of row r, those of 32 elements in the bytes of 16."""
    low, high = low_half(x), high_half(x)
    left = low_half(low) | as_i8(shift_left(as_i16(high_half(low)), 4))
    right = low_half(high) | as_i8(shift_left(as_i16(high_half(high)), 4))
    scatter_words(to + 4 * r, left)
    scatter_words(to + 4 * VECTOR + 4 * r, right)


def put_iq3(type: str, shift: int) -> Any:
    """The function put(block, apart, to) of the values of an IQ3 type."""
    values = CODED[type].values

    @njit(error_model="numpy")
    def put(block, apart, to):
        for r in range(STRIP):
            for j in range(4):
                x = values(block + apart * r, j)
                level = as_i8(shift_right(as_i16(vabs(x)), shift)) & splat_i8x64(7)
                nibbles = level | bits_to_bytes(sign_bits(x), 8)
                put_nibbles(nibbles, to + XS_VALUES + 8 * VECTOR * j, r)

    return put


@njit(error_model="numpy")
def put_nvfp4(block, apart, to):
    """A block of NVFP4."""
    for r in range(STRIP):
        row = block + apart * r
        scales = halved_ue4m3(row)
        for i in range(4):
            store_f16(to + HALVES * i + 2 * r, lane(scales, i))
        put_nibbles(nibbles_of_eights(row + 4), to + NVFP4_VALUES, r)


@njit(error_model="numpy")
def put_scattered_half(block, apart, to):
    """The d of IQ1_M: the upper nibbles of its last four words."""
    for r in range(STRIP):
        d = 0
        for i in range(4):
            d |= (load_u8(block + apart * r + 49 + 2 * i) >> 4) << (4 * i)
        store_i16(to + 2 * r, d)


@njit(error_model="numpy")
def put_nudges(block, apart, to):
    """Write the signs of eighths of each 8 elements of IQ1_M: bit r is row r's."""
    for i in range(32):
        bits = 0
        for r in range(STRIP):
            nibbles = load_u8(block + apart * r + 32 + i // 2)
            bits |= (nibbles >> (4 * (i % 2) + 3) & 1) << r
        store_i16(to + NUDGES + 2 * i, bits)


def half_at(at: int) -> Any:
    """The function put(block, apart, to) of the float16 at `at`."""

    @njit(error_model="numpy")
    def put(block, apart, to):
        put_halves(block + at, apart, to)

    return put


def in_turn(first: Any, *others: Any) -> Any:
    """The function put(block, apart, to) that calls several ones."""
    if not others:
        return first
    rest = in_turn(*others)

    @njit(error_model="numpy")
    def put(block, apart, to):
        first(block, apart, to)
        rest(block, apart, to)

    return put


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
    "TQ1_0": in_turn(half_at(52), put_pairs("TQ1_0", three_values, HALVES)),
    "TQ2_0": in_turn(half_at(64), put_pairs("TQ2_0", three_values, HALVES)),
    "Q2_0": put_q2_0,
    "NVFP4": put_nvfp4,
    "IQ1_S": in_turn(
        put_halves, put_sub_scales(sub_iq1_s, 8), put_pairs("IQ1_S", three_eighths, PAIRS_32)
    ),
    "IQ1_M": in_turn(
        put_scattered_half, put_sub_scales(sub_iq1_m, 16), put_nudges,
        put_pairs("IQ1_M", three_eighths, NUDGED_PAIRS),
    ),
    "IQ2_XXS": in_turn(put_halves, put_sub_scales(sub_iq2_xxs, 8), put_iq2("IQ2_XXS", 32)),
    "IQ2_XS": in_turn(put_halves, put_sub_scales(sub_nibbles(66), 16), put_iq2("IQ2_XS", 16)),
    "IQ2_S": in_turn(put_halves, put_sub_scales(sub_nibbles(74), 16), put_iq2("IQ2_S", 16)),
    "IQ3_XXS": in_turn(put_halves, put_sub_scales(sub_iq3_xxs, 8), put_iq3("IQ3_XXS", 3)),
    "IQ3_S": in_turn(put_halves, put_sub_scales(sub_nibbles(106), 8), put_iq3("IQ3_S", 1)),
}  # fmt: skip


def repack(type: str) -> Any:
    """Kernel of REPACK: threads take strips."""
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
