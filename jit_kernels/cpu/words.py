"""Grids whose lanes are rows of weights: sixteen rows, four neighbouring elements a lane.

A row of bytes is a Grid of one row of i8x64 vectors; vector j has elements 4 j .. 4 j + 3 of all
sixteen. Sums are columns: a vector of sixteen floats for each row of activations.
Counts and strides that shape a grid are literals; nothing here is aligned.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cpu.grid import Grid, grid_of, rows_of, spaced, vector_at
from tamis.jit_kernels.cpu.half import const
from tamis.jit_kernels.cpu.intrinsic import FLOAT, I1, I8, I16, I32, I64, pointer
from tamis.jit_kernels.cpu.simd import (
    CPU,
    dotted_u8,
    f32x16,
    fused,
    i32x16,
    magnitude,
    shuffled,
    signed_like,
    splatted,
    table_lookup,
    vector_op,
)

N = 16  # rows of weights side by side
BYTES, SHORTS = ir.VectorType(I8, 4 * N), ir.VectorType(I16, 2 * N)
WORDS, FLOATS = ir.VectorType(I32, N), ir.VectorType(FLOAT, N)
TOP_BIT = -128


def _literals(*args: Any) -> bool:
    return all(isinstance(a, types.IntegerLiteral) for a in args)


def _is_bytes(x: Any) -> bool:
    return isinstance(x, Grid) and x.rows == 1 and x.vector == BYTES


def _is_sums(x: Any) -> bool:
    return isinstance(x, Grid) and x.cols == 1 and x.vector == FLOATS


def _row(b: Any, vectors: list[Any]) -> Any:
    return grid_of(b, [vectors])


def _column(b: Any, vectors: list[Any]) -> Any:
    return grid_of(b, [[x] for x in vectors])


def _cells(b: Any, grid: Any) -> list[Any]:
    return [x for row in rows_of(b, grid) for x in row]


def _same(x: Any, *_rest: Any) -> Any:
    return x if _is_bytes(x) else None


# ---- bytes ---------------------------------------------------------------------------------------
@vector_op(lambda _p, n: Grid(1, n.literal_value, BYTES) if _literals(n) else None)
def load_bytes(b, p, n):
    """A row of n neighbouring vectors."""
    return _row(b, [vector_at(b, at, BYTES) for at in spaced(b, p, 64, n)])


@vector_op(lambda _p, x: types.void if _is_bytes(x) else None)
def store_bytes(b, p, x):
    """Write a row of neighbouring vectors."""
    cells = _cells(b, x)
    for at, vector in zip(spaced(b, p, 64, len(cells)), cells, strict=True):
        b.store(vector, pointer(b, at, BYTES), align=1)


@vector_op(lambda x, _k, mask: _same(x) if _literals(mask) else None)
def field(b, x, k, mask):
    """(byte >> k) & mask of each; bits that cross into a byte must not be in the mask."""
    count = splatted(b, b.trunc(k, I16), 2 * N) if not isinstance(k, int) else const(SHORTS, k)
    moved = [b.bitcast(b.lshr(b.bitcast(v, SHORTS), count), BYTES) for v in _cells(b, x)]
    return _row(b, [b.and_(v, const(BYTES, mask)) for v in moved])


@vector_op(lambda x, k: _same(x) if _literals(k) else None)
def raised(b, x, k):
    """Byte << k of each; no bit may cross into the next byte."""
    count = const(SHORTS, k)
    return _row(b, [b.bitcast(b.shl(b.bitcast(v, SHORTS), count), BYTES) for v in _cells(b, x)])


@vector_op(lambda x, y: x if _same(x) and x == y else None)
def both(b, x, y):
    """The bits of x and of y."""
    return _row(b, [b.or_(v, w) for v, w in zip(_cells(b, x), _cells(b, y), strict=True)])


@vector_op(lambda x, y: Grid(1, x.cols + y.cols, BYTES) if _is_bytes(x) and _is_bytes(y) else None)
def beside(b, x, y):
    """The vectors of x, then those of y."""
    return _row(b, _cells(b, x) + _cells(b, y))


@vector_op(lambda x, _p, value: _same(x) if _literals(value) else None)
def with_bits(b, x, p, value):
    """`value` added to the bytes whose bits are set: 64 for each vector, from p on."""
    made, cells = [], _cells(b, x)
    for v, at in zip(cells, spaced(b, p, 8, len(cells)), strict=True):
        bits = b.bitcast(b.load(pointer(b, at, I64), align=1), ir.VectorType(I1, 4 * N))
        made.append(b.or_(v, b.select(bits, const(BYTES, value), const(BYTES, 0))))
    return _row(b, made)


def looked_up(values: Sequence[int]) -> Any:
    """The operation x -> values[x], of 16 values, on a row of bytes below 16."""
    look_up = table_lookup(values)

    @vector_op(_same)
    def lookup(b, x):
        """The table's value of each byte."""
        return _row(b, [look_up(b, v) for v in _cells(b, x)])

    return lookup


def _shorts(x: Any, *literals: Any) -> Any:
    return Grid(1, 2 * x.cols, SHORTS) if _is_bytes(x) and _literals(*literals) else None


def _pairs(b: Any, v: Any, before: bool) -> list[Any]:
    """Bytes 0 and 1 of each lane as 16-bit lanes, then 2 and 3; a zero before or after each."""
    made = []
    for first in (0, 2):
        picks = [4 * (i // 4) + first + i % 4 // 2 for i in range(4 * N)]
        picks = [4 * N if i % 2 == (0 if before else 1) else at for i, at in enumerate(picks)]
        made.append(b.bitcast(shuffled(b, v, const(BYTES, 0), picks), SHORTS))
    return made


@vector_op(_shorts)
def shorts(b, x, zero):
    """Unsigned bytes less `zero` as int16: of each vector elements 0, 1 of a lane, then 2, 3."""
    halves = [half for v in _cells(b, x) for half in _pairs(b, v, False)]
    return _row(b, [b.sub(half, const(SHORTS, zero)) for half in halves])


@vector_op(_shorts)
def signed_shorts(b, x):
    """The same of signed bytes."""
    halves = [half for v in _cells(b, x) for half in _pairs(b, v, True)]
    return _row(b, [b.ashr(half, const(SHORTS, 8)) for half in halves])


def _is_shorts(x: Any) -> bool:
    return isinstance(x, Grid) and x.vector == SHORTS


@vector_op(lambda x, y: x if _is_shorts(x) and y == i32x16 else None)
def times_words(b, x, y):
    """Both int16 of each lane times the lane of y, which fits 16 bits."""
    low = b.and_(y, const(WORDS, 0xFFFF))
    factor = b.bitcast(b.or_(low, b.shl(y, const(WORDS, 16))), SHORTS)
    return _row(b, [b.mul(v, factor) for v in _cells(b, x)])


@vector_op(lambda _p, _stride, x: types.void if _is_shorts(x) else None)
def store_shorts(b, p, stride, x):
    """Write a row's vectors at p, p + stride, ..."""
    cells = _cells(b, x)
    for v, at in zip(cells, spaced(b, p, stride, len(cells)), strict=True):
        b.store(v, pointer(b, at, SHORTS), align=1)


@vector_op(lambda _p, x: types.void if x == i32x16 else None)
def store_low_nibbles(b, p, x):
    """Write eight bytes: the lowest four bits of each lane, two lanes a byte, the first low."""
    bytes = b.trunc(b.and_(x, const(WORDS, 15)), ir.VectorType(I8, N))
    pairs = b.bitcast(bytes, ir.VectorType(I16, N // 2))
    both = b.or_(pairs, b.lshr(pairs, const(pairs.type, 4)))
    b.store(b.trunc(both, ir.VectorType(I8, N // 2)), pointer(b, p, ir.VectorType(I8, 8)), align=1)


# ---- products ------------------------------------------------------------------------------------
# Without VNNI, sums of two products of unsigned and signed bytes saturate at 16 bits.
OFFSET = 128.0 if CPU.vnni else 0.0


def _dots(x: Any, _p: Any, _stride: Any, rows: Any) -> Any:
    return Grid(rows.literal_value, 1, WORDS) if _is_bytes(x) and _literals(rows) else None


def _dotted(b: Any, x: Any, p: Any, stride: Any, rows: int, signed: bool) -> Any:
    cells, made = _cells(b, x), []
    if signed and CPU.vnni:
        cells = [b.xor(v, const(BYTES, TOP_BIT)) for v in cells]
    for start in spaced(b, p, stride, rows):
        total = const(WORDS, 0)
        for v, at in zip(cells, spaced(b, start, 4, len(cells)), strict=True):
            word = b.load(pointer(b, at, I32), align=4)
            y = b.bitcast(splatted(b, word, N), BYTES)
            if signed and not CPU.vnni:
                v, y = magnitude(b, v), signed_like(b, y, v)
            total = dotted_u8(b, total, v, y)
        made.append(total)
    return _column(b, made)


@vector_op(_dots)
def dot_words(b, x, p, stride, rows):
    """Row r: the sum of four elements a lane of every vector of x, times as many at p + r * stride.

    x: unsigned bytes, up to 128 without VNNI; at p: signed ones, not -128.
    """
    return _dotted(b, x, p, stride, rows, False)


@vector_op(_dots)
def dot_signed_words(b, x, p, stride, rows):
    """As `dot_words` for signed bytes, to each of which OFFSET is added."""
    return _dotted(b, x, p, stride, rows, True)


@vector_op(lambda high, low: Grid(high.rows, 1, FLOATS) if high == low else None)
def join_planes(b, high, low):
    """128 * high + low, as floats."""
    pairs = zip(_cells(b, high), _cells(b, low), strict=True)
    return _column(b, [b.sitofp(b.add(b.shl(h, const(WORDS, 7)), x), FLOATS) for h, x in pairs])


# ---- sums ----------------------------------------------------------------------------------------
def _broadcasts(b: Any, p: Any, stride: Any, n: int) -> list[Any]:
    starts = spaced(b, p, stride, n)
    return [splatted(b, b.load(pointer(b, at, FLOAT), align=4), N) for at in starts]


@vector_op(lambda rows: Grid(rows.literal_value, 1, FLOATS) if _literals(rows) else None)
def no_sums(b, rows):
    """Zeros."""
    return _column(b, [const(FLOATS, 0.0)] * rows)


@vector_op(lambda sums, _p, _stride: sums if _is_sums(sums) else None)
def times_each(b, sums, p, stride):
    """sums[r] times the float at p + r * stride."""
    cells = _cells(b, sums)
    pairs = zip(cells, _broadcasts(b, p, stride, len(cells)), strict=True)
    return _column(b, [b.fmul(x, y) for x, y in pairs])


@vector_op(lambda sums, x, y: sums if _is_sums(sums) and x == sums and y == f32x16 else None)
def add_times(b, sums, x, y):
    """sums[r] + x[r] * y."""
    pairs = zip(_cells(b, sums), _cells(b, x), strict=True)
    return _column(b, [fused(b, v, y, total) for total, v in pairs])


@vector_op(lambda sums, x, _p, _stride: sums if _is_sums(sums) and x == f32x16 else None)
def add_each(b, sums, x, p, stride):
    """sums[r] + x times the float at p + r * stride."""
    cells = _cells(b, sums)
    pairs = zip(cells, _broadcasts(b, p, stride, len(cells)), strict=True)
    return _column(b, [fused(b, x, y, total) for total, y in pairs])


@vector_op(lambda sums, _p, _stride: sums if _is_sums(sums) else None)
def add_rows(b, sums, p, stride):
    """sums[r] + the vector at p + r * stride."""
    cells = _cells(b, sums)
    pairs = zip(cells, spaced(b, p, stride, len(cells)), strict=True)
    return _column(b, [b.fadd(x, vector_at(b, at, FLOATS)) for x, at in pairs])


@vector_op(lambda _p, _stride, sums: types.void if _is_sums(sums) else None)
def store_rows(b, p, stride, sums):
    """Write sums[r] at p + r * stride."""
    cells = _cells(b, sums)
    for x, at in zip(cells, spaced(b, p, stride, len(cells)), strict=True):
        b.store(x, pointer(b, at, FLOATS), align=1)
