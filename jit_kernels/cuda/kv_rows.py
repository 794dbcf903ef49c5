"""How rows of keys and values lie in the pages, by type: all that knows it.

A row is one head's key or value of a position. A row of q8_0 is its int8 elements, then its scales;
one of q4_0 its nibbles, then its scales. What is multiplied on matrix units is float16: there the
product of an element and its scale is rounded once, by at most 2^-12 of it.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import float32, int32, types

from tamis.jit_kernels.cuda.grid import WARP, lane, warp_max
from tamis.jit_kernels.cuda.intrinsic import (
    F8,
    FLOAT,
    HALF,
    I16,
    I32,
    I64,
    device,
    int64,
    load_constant,
    load_f32,
    load_i32,
    op,
    store_f16,
    store_i8,
    store_i16,
    uint32,
    void,
)
from tamis.jit_kernels.cuda.ptx import (
    HIGH_BYTES,
    LOAD_8_IF,
    LOAD_HALF_IF,
    LOAD_IF,
    LOW_BYTES,
    MULTIPLY_HALVES,
    STORE_SHARED_U128,
    SUBTRACT_HALVES,
    emit,
    lowest_of_warp,
    product,
    shuffle,
    shuffle_i32,
)
from tamis.jit_kernels.cuda.readers import const_f16, const_i8, const_u8, const_u16
from tamis.jit_kernels.types import KV_BLOCK, PAGE, kv_row

TINY = 1e-30  # scales up to here are 0
# As unsigned bytes, elements are larger by so much; and 1024 and that as two float16.
BIAS = {"q8_0": 128, "q4_0": 8}
BIASES = {"q8_0": 0x64806480, "q4_0": 0x64086408}


def row_bytes(type: str, head_dim: int) -> int:
    """Bytes of a row."""
    return kv_row(type, head_dim).itemsize


def scales_at(type: str, head_dim: int) -> int:
    """Bytes from a quantised row to its scales."""
    return head_dim if type == "q8_0" else head_dim // 2


@device
def key_row(table, n_head_kv, h, j):
    """The row of KV head h at position j."""
    return (load_i32(table + 4 * (j // PAGE)) * n_head_kv + h) * PAGE + j % PAGE


# ---- reading -------------------------------------------------------------------------------------
def _load(b: Any, kind: tuple[str, int], row: Any, d: Any, live: Any) -> list[Any]:
    """Where elements d .. d + 7 of a quantised row are: two words, and their scale in two halves.

    kind: type and head_dim. Where live is 0, nothing is read and all is 0.
    """
    type, head_dim = kind
    size = row_bytes(type, head_dim)
    align = min(8, size & -size)
    block = b.lshr(d, ir.Constant(I64, 5))
    at = d
    if type == "q4_0":  # of 16 bytes, the low nibbles are the first half of a block
        within = b.and_(d, ir.Constant(I64, KV_BLOCK // 2 - 1))
        at = b.add(b.mul(block, ir.Constant(I64, KV_BLOCK // 2)), within)
    at_scale = b.add(b.mul(block, ir.Constant(I64, 2)), ir.Constant(I64, scales_at(*kind)))
    words = emit(b, LOAD_8_IF[align], [b.add(row, at), live])
    return words + emit(b, LOAD_HALF_IF, [b.add(row, at_scale), live])


def _bytes(b: Any, type: str, words: list[Any], d: Any) -> list[Any]:
    """Elements d .. d + 7 as unsigned bytes, each larger by BIAS, from their words."""
    if type == "q8_0":
        return [b.xor(w, ir.Constant(I32, 0x80808080)) for w in words]
    half = b.trunc(b.and_(d, ir.Constant(I64, KV_BLOCK // 2)), I32)
    shift = b.lshr(half, ir.Constant(I32, 2))
    return [b.and_(b.lshr(w, shift), ir.Constant(I32, 0x0F0F0F0F)) for w in words]


class Pieces(NamedTuple):
    """Functions of n pieces of a row: eight elements each, from d on, d a multiple of 8."""

    load: Any  # (row's address, d, m) -> what is there, to be in flight; zeros from the m-th on
    halves: Any  # (these, d) -> words of float16, four a piece


def pieces_of(type: str, head_dim: int, n: int, apart: int) -> Pieces:
    """The functions; pieces are `apart` elements apart, a multiple of KV_BLOCK.

    Rows of float16 may have any length; what is loaded of them is what halves gives.
    """
    size = 4 if type == "f16" else 3
    kind, halves_kind = types.UniTuple(uint32, size * n), types.UniTuple(uint32, 4 * n)

    @op(kind, int64, int64, uint32)
    def load(b: Any, row: Any, d: Any, m: Any) -> list[Any]:
        found: list[Any] = []
        for i in range(n):
            live = b.zext(b.icmp_unsigned(">", m, ir.Constant(I32, i)), I32)
            if type == "f16":
                start = b.add(row, b.mul(d, ir.Constant(I64, 2)))
                found += emit(b, LOAD_IF, [b.add(start, ir.Constant(I64, 2 * apart * i)), live])
            else:
                at = b.add(d, ir.Constant(I64, apart * i))
                found += _load(b, (type, head_dim), row, at, live)
        return found

    @op(halves_kind, kind, int64)
    def halves(b: Any, loaded: Any, d: Any) -> list[Any]:
        """A byte n before 0x64 is the float16 1024 + n."""
        found: list[Any] = []
        for i in range(0, len(loaded), 3):
            for word in _bytes(b, type, loaded[i : i + 2], d):
                for pick in (LOW_BYTES, HIGH_BYTES):
                    two = emit(b, pick, [word])
                    two = emit(b, SUBTRACT_HALVES, [*two, ir.Constant(I32, BIASES[type])])
                    found += emit(b, MULTIPLY_HALVES, [*two, loaded[i + 2]])
        return found

    same = op(halves_kind, kind, int64)(lambda _b, loaded, _d: loaded)
    return Pieces(load, same if type == "f16" else halves)


def reading(type: str, head_dim: int) -> Any:
    """The intrinsic (row's address, d): elements d .. d + 7 as float32, d a multiple of 8."""

    @op(F8, int64, int64)
    def read_f16(b: Any, row: Any, d: Any) -> list[Any]:
        at = b.add(row, b.mul(d, ir.Constant(I64, 2)))
        eight = load_constant(b, at, ir.VectorType(HALF, 8), 16)
        parts = [b.extract_element(eight, ir.Constant(I32, i)) for i in range(8)]
        return [b.fpext(x, FLOAT) for x in parts]

    @op(F8, int64, int64)
    def read(b: Any, row: Any, d: Any) -> list[Any]:
        *words, scales = _load(b, (type, head_dim), row, d, ir.Constant(I32, 1))
        scale = b.fpext(b.bitcast(b.trunc(scales, I16), HALF), FLOAT)
        found = []
        for word in _bytes(b, type, words, d):
            for shift in range(0, 32, 8):
                byte = b.and_(b.lshr(word, ir.Constant(I32, shift)), ir.Constant(I32, 255))
                n = b.sub(byte, ir.Constant(I32, BIAS[type]))
                found.append(b.fmul(b.sitofp(n, FLOAT), scale))
        return found

    return read_f16 if type == "f16" else read


def reading_one(type: str, head_dim: int) -> Any:
    """The function (row's address, d): element d as float32."""
    n_byte = scales_at(type, head_dim)

    @device
    def read_f16(row, d):
        return const_f16(row + 2 * d)

    @device
    def read_q8_0(row, d):
        return const_i8(row + d) * const_f16(row + n_byte + d // KV_BLOCK * 2)

    @device
    def read_q4_0(row, d):
        block, within = d // KV_BLOCK, d % KV_BLOCK
        byte = const_u8(row + KV_BLOCK // 2 * block + within % (KV_BLOCK // 2))
        nibble = byte >> 4 if within >= KV_BLOCK // 2 else byte & 15
        return float32(int32(nibble) - 8) * const_f16(row + n_byte + 2 * block)

    return {"f16": read_f16, "q8_0": read_q8_0, "q4_0": read_q4_0}[type]


def storing_pieces(n: int, apart: int) -> Any:
    """The intrinsic (words, address, other address): n pieces to shared memory, in turn to both.

    Every second one goes `apart` bytes further. Addresses are multiples of 16.
    """

    @op(void, types.UniTuple(uint32, 4 * n), uint32, uint32)
    def store(b: Any, words: Any, even: Any, odd: Any) -> None:
        for i in range(n):
            at = b.add(odd if i % 2 else even, ir.Constant(I32, i // 2 * apart))
            emit(b, STORE_SHARED_U128, [at, *words[4 * i : 4 * i + 4]])

    return store


# ---- writing -------------------------------------------------------------------------------------
@device
def away_from_zero(y):
    """The nearest whole number, of ties the one that is further from 0."""
    size = abs(y)
    whole = int32(size)
    whole += int32(size - float32(whole) >= float32(0.5))
    return whole if y > float32(0) else -whole


@device
def inverse(scale):
    """1 / scale; 0 where the scale is."""
    return float32(1) / scale if abs(scale) > float32(TINY) else float32(0)


def keeping(type: str, head_dim: int) -> Any:
    """The function (x, row's address): write float32 x [head_dim] to a row; a warp's work.

    A lane has an element of each block of 32.
    """
    n_byte, half = scales_at(type, head_dim), KV_BLOCK // 2
    assert KV_BLOCK == WARP

    @device
    def keep_f16(x, row):
        for i in range(lane(), head_dim, WARP):
            store_f16(row + 2 * i, load_f32(x + 4 * i))

    @device
    def keep_q8_0(x, row):
        for block in range(head_dim // KV_BLOCK):
            i = KV_BLOCK * block + lane()
            value = load_f32(x + 4 * i)
            scale = warp_max(abs(value)) / float32(127)
            store_i8(row + i, int32(away_from_zero(product(value, inverse(scale)))))
            if lane() == 0:
                store_f16(row + n_byte + 2 * block, scale)

    @device
    def keep_q4_0(x, row):
        for block in range(head_dim // KV_BLOCK):
            value = load_f32(x + 4 * (KV_BLOCK * block + lane()))
            most = warp_max(abs(value))
            first = lowest_of_warp(int32(lane()) if abs(value) == most else int32(WARP - 1))
            scale = shuffle(value, uint32(first)) / float32(-8)
            n = min(int32(15), int32(product(value, inverse(scale)) + float32(8.5)))
            high = shuffle_i32(n, uint32((lane() + half) % WARP))
            if lane() < half:
                store_i8(row + half * block + lane(), int32(n | high << 4))
            if lane() == 0:
                store_f16(row + n_byte + 2 * block, scale)

    return {"f16": keep_f16, "q8_0": keep_q8_0, "q4_0": keep_q4_0}[type]


def copying(type: str, head_dim: int) -> Any:
    """The function (row's address, other row's): copy a row; a warp's work."""
    size = row_bytes(type, head_dim)

    @device
    def copy(row, to):
        for i in range(2 * lane(), size, 2 * WARP):
            store_i16(to + i, const_u16(row + i))

    return copy
