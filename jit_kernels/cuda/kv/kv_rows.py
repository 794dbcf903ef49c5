"""Layout of KV rows in pages, by type. No other module depends on it.

A row is one head's key or value at one position. A row of q8_0 is its int8 elements, then its
scales; one of q4_0 its nibbles, then its scales. Tensor cores multiply float16: an element times
its scale is rounded once, by at most 2^-12 of it.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import float32, int32, types

from tamis.jit_kernels.contract.types import KV_BLOCK, PAGE, kv_row
from tamis.jit_kernels.cuda.lang.grid import WARP, lane, warp_max
from tamis.jit_kernels.cuda.lang.intrinsic import (
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
from tamis.jit_kernels.cuda.lang.ptx import (
    BYTES_OF_TWO,
    HIGH_BYTES,
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
from tamis.jit_kernels.cuda.lang.readers import const_f16, const_i8, const_u8, const_u16

TINY = 1e-30  # scales up to this size count as 0
# The offset of elements as unsigned bytes; and 1024 and that offset as two float16.
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
def _words(b: Any, address: Any, n_half: int, align: int) -> list[Any]:
    """Emit loads of n_half float16 of read-only memory, as words, as wide as `align` allows.

    align: of the address, in bytes; with a multiple of 4, n_half is even.
    """
    found: list[Any] = []
    if align == 2:
        for i in range(n_half):
            half = load_constant(b, b.add(address, ir.Constant(I64, 2 * i)), I16, 2)
            word = b.zext(half, I32)
            if i % 2:
                found[-1] = b.or_(found[-1], b.shl(word, ir.Constant(I32, 16)))
            else:
                found.append(word)
        return found
    while len(found) < n_half // 2:
        n = next(n for n in (4, 2, 1) if 4 * n <= align and n <= n_half // 2 - len(found))
        there = b.add(address, ir.Constant(I64, 4 * len(found)))
        vector = load_constant(b, there, ir.VectorType(I32, n), 4 * n)
        found += [b.extract_element(vector, ir.Constant(I32, i)) for i in range(n)]
    return found


class Bytes(NamedTuple):
    """A lane's share of a quantised row: n pieces of `words` words, `apart` bytes apart."""

    type: str
    head_dim: int
    n: int
    words: int
    apart: int

    @property
    def n_scale(self) -> int:
        """Words of the row's scales, which follow those of the pieces: two scales each."""
        return -(-self.head_dim // KV_BLOCK // 2)

    @property
    def kind(self) -> types.UniTuple:
        """Numba's type of all of it."""
        return types.UniTuple(uint32, self.words * self.n + self.n_scale)

    def piece(self, loaded: list[Any], i: int) -> list[Any]:
        """The words of the i-th piece."""
        return loaded[self.words * i : self.words * (i + 1)]

    def scales(self, loaded: list[Any]) -> list[Any]:
        """The words of the row's scales."""
        return loaded[self.words * self.n :]

    def load(self, b: Any, row: Any, at: Any, m: Any) -> list[Any]:
        """Emit loads of the row's scales and of the pieces before the m-th, the first at row + at.

        Other pieces are undefined; with m = 0 scales are zeros, but the row is still read.
        """
        size, found = row_bytes(self.type, self.head_dim), []
        align, some = size & -size, b.icmp_unsigned("!=", m, ir.Constant(I32, 0))
        for i in range(self.n):
            far = b.add(at, ir.Constant(I64, self.apart * i))
            if self.apart * (i + 1) > scales_at(self.type, self.head_dim):  # not all lanes have it
                there = b.icmp_unsigned(">", m, ir.Constant(I32, i))
                far = b.select(there, far, ir.Constant(I64, 0))
            found += _words(b, b.add(row, far), 2 * self.words, min(4 * self.words, align))
        scales = b.add(row, ir.Constant(I64, scales_at(self.type, self.head_dim)))
        for word in _words(b, scales, self.head_dim // KV_BLOCK, min(16, align)):
            found.append(b.select(some, word, ir.Constant(I32, 0)))
        return found


def key_bytes(type: str, head_dim: int) -> Bytes:
    """The share of one of four lanes of a key, for integer products.

    Of q8_0, the t-th has elements 8t .. 8t + 7 of every 32; of q4_0 4t .. 4t + 3 in low nibbles and
    16 more in high ones.
    """
    words = 2 if type == "q8_0" else 1
    return Bytes(type, head_dim, head_dim // KV_BLOCK, words, 16 * words)


def value_bytes(type: str, head_dim: int) -> Bytes:
    """The share of one of eight lanes of a value; lanes 0 to 3 have the first 32 of every 64."""
    words = 2 if type == "q8_0" else 1
    return Bytes(type, head_dim, -(-head_dim // 64), words, 32 * words)


def doubled(b: Any, scales: list[Any], block: int) -> Any:
    """Emit a word with the scale of a block in both halves."""
    chosen = ir.Constant(I32, 0x3232 if block % 2 else 0x1010)
    word = scales[block // 2]
    return emit(b, BYTES_OF_TWO, [word, word, chosen])[0]


def _load(b: Any, kind: tuple[str, int], row: Any, d: Any) -> list[Any]:
    """Emit loads of elements d .. d + 7 of a quantised row: two words, and their scale.

    kind: type and head_dim.
    """
    type, head_dim = kind
    block = b.lshr(d, ir.Constant(I64, 5))
    at = d
    if type == "q4_0":  # of 16 bytes, the low nibbles are the first half of a block
        within = b.and_(d, ir.Constant(I64, KV_BLOCK // 2 - 1))
        at = b.add(b.mul(block, ir.Constant(I64, KV_BLOCK // 2)), within)
    at_scale = b.add(b.mul(block, ir.Constant(I64, 2)), ir.Constant(I64, scales_at(*kind)))
    align = row_bytes(type, head_dim)
    align = min(8, align & -align)
    pair = load_constant(b, b.add(row, at), ir.VectorType(I32, 2), align)
    words = [b.extract_element(pair, ir.Constant(I32, i)) for i in range(2)]
    return [*words, load_constant(b, b.add(row, at_scale), HALF, 2)]


def _bytes(b: Any, type: str, words: list[Any], d: Any) -> list[Any]:
    """Elements d .. d + 7 as unsigned bytes, each larger by BIAS, from their words."""
    if type == "q8_0":
        return [b.xor(w, ir.Constant(I32, 0x80808080)) for w in words]
    half = b.trunc(b.and_(d, ir.Constant(I64, KV_BLOCK // 2)), I32)
    shift = b.lshr(half, ir.Constant(I32, 2))
    return [b.and_(b.lshr(w, shift), ir.Constant(I32, 0x0F0F0F0F)) for w in words]


def loading_halves(n: int, apart: int) -> Any:
    """The intrinsic (row's address, d, m): n pieces of a row of float16, four words each.

    A piece is eight elements, the first from d on, a multiple of 8, the others `apart` further
    each; zeros from the m-th on.
    """

    @op(types.UniTuple(uint32, 4 * n), int64, int64, uint32)
    def load(b: Any, row: Any, d: Any, m: Any) -> list[Any]:
        found: list[Any] = []
        for i in range(n):
            live = b.zext(b.icmp_unsigned(">", m, ir.Constant(I32, i)), I32)
            start = b.add(row, b.mul(d, ir.Constant(I64, 2)))
            found += emit(b, LOAD_IF, [b.add(start, ir.Constant(I64, 2 * apart * i)), live])
        return found

    return load


class Pieces(NamedTuple):
    """Functions of a quantised row's pieces: d .. d + 7 of every 32 elements, d a multiple of 8."""

    load: Any  # (row's address, d, whether it exists) -> its data, in flight; else zeros
    halves: Any  # (these, d) -> words of float16, four a piece


def pieces_of(type: str, head_dim: int) -> Pieces:
    """The functions for a lane that has one of four such d."""
    n, apart = head_dim // KV_BLOCK, KV_BLOCK if type == "q8_0" else KV_BLOCK // 2
    parts = Bytes(type, head_dim, n, 2, apart)

    @op(parts.kind, int64, int64, uint32)
    def load(b: Any, row: Any, d: Any, live: Any) -> list[Any]:
        at = d if type == "q8_0" else b.and_(d, ir.Constant(I64, KV_BLOCK // 2 - 1))
        return parts.load(b, row, at, b.mul(live, ir.Constant(I32, n)))

    @op(types.UniTuple(uint32, 4 * n), parts.kind, int64)
    def halves(b: Any, loaded: Any, d: Any) -> list[Any]:
        """Bytes to float16: a byte n below the byte 0x64 is the float16 1024 + n."""
        found: list[Any] = []
        for i in range(n):
            scale = doubled(b, parts.scales(loaded), i)
            for word in _bytes(b, type, parts.piece(loaded, i), d):
                for pick in (LOW_BYTES, HIGH_BYTES):
                    two = emit(b, pick, [word])
                    two = emit(b, SUBTRACT_HALVES, [*two, ir.Constant(I32, BIASES[type])])
                    found += emit(b, MULTIPLY_HALVES, [*two, scale])
        return found

    return Pieces(load, halves)


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
        *words, scale = _load(b, (type, head_dim), row, d)
        scale = b.fpext(scale, FLOAT)
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
    """The nearest integer; of ties the one further from 0."""
    size = abs(y)
    whole = int32(size)
    whole += int32(size - float32(whole) >= float32(0.5))
    return whole if y > float32(0) else -whole


@device
def inverse(scale):
    """The quotient 1 / scale; 0 if the scale is 0."""
    return float32(1) / scale if abs(scale) > float32(TINY) else float32(0)


def keeping(type: str, head_dim: int) -> Any:
    """The function (x, row's address) that quantises float32 x [head_dim] to a row, by one warp.

    A lane has one element of each block of 32.
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
    """The function (row's address, other row's) of a warp, which copies a row."""
    size = row_bytes(type, head_dim)

    @device
    def copy(row, to):
        for i in range(2 * lane(), size, 2 * WARP):
            store_i16(to + i, const_u16(row + i))

    return copy
