"""Grids whose lanes are rows of weights: sixteen rows, four neighbouring elements a lane.

A row of bytes is a Grid of one row of i8x64 vectors; vector j has elements 4 j .. 4 j + 3 of all
sixteen. Several such strips are rows of one Grid. Sums are a Grid of floats: a row for each row of
activations, a column for each strip. Counts that shape a grid are literals; nothing is aligned.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cpu.lang.half import const
from tamis.jit_kernels.cpu.lang.intrinsic import FLOAT, I1, I8, I16, I32, I64, pointer
from tamis.jit_kernels.cpu.lang.register_tiles import (
    Addresses,
    Grid,
    grid_of,
    packed,
    rows_of,
    spaced,
    unpacked,
    vector_at,
)
from tamis.jit_kernels.cpu.lang.simd import (
    CPU,
    byte_mask,
    dotted_i8,
    dotted_u8,
    f32x16,
    fused,
    i32x16,
    magnitude,
    plus_pairs,
    shuffled,
    signed_like,
    splatted,
    sums_of_two,
    table_lookup,
    vector_op,
)

N = 16  # interleaved rows of weights
BYTES, SHORTS = ir.VectorType(I8, 4 * N), ir.VectorType(I16, 2 * N)
WORDS, FLOATS = ir.VectorType(I32, N), ir.VectorType(FLOAT, N)
TOP_BIT = -128


def _literals(*args: Any) -> bool:
    return all(isinstance(a, types.IntegerLiteral) for a in args)


def _is_bytes(x: Any) -> bool:
    return isinstance(x, Grid) and x.rows == 1 and x.vector == BYTES


def _is_floats(x: Any) -> bool:
    return isinstance(x, Grid) and x.vector == FLOATS


def _row(b: Any, vectors: list[Any]) -> Any:
    return grid_of(b, [vectors])


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


@vector_op(_same)
def offset_bytes(b, x):
    """Signed bytes plus 128, as unsigned ones."""
    return _row(b, [b.xor(v, const(BYTES, TOP_BIT)) for v in _cells(b, x)])


@vector_op(lambda x, k: _same(x) if _literals(k) else None)
def raised(b, x, k):
    """Each byte shifted left by k; no bit may cross into the next byte."""
    count = const(SHORTS, k)
    return _row(b, [b.bitcast(b.shl(b.bitcast(v, SHORTS), count), BYTES) for v in _cells(b, x)])


@vector_op(lambda x, y: x if _same(x) and x == y else None)
def both(b, x, y):
    """Bitwise x | y."""
    return _row(b, [b.or_(v, w) for v, w in zip(_cells(b, x), _cells(b, y), strict=True)])


def _is_row(x: Any) -> bool:
    return isinstance(x, Grid) and x.rows == 1


def _joined(x: Any, y: Any) -> Any:
    alike = _is_row(x) and _is_row(y) and x.vector == y.vector
    return Grid(1, x.cols + y.cols, x.vector) if alike else None


@vector_op(_joined)
def beside(b, x, y):
    """One row: the vectors of x, then those of y."""
    return _row(b, _cells(b, x) + _cells(b, y))


@vector_op(lambda x, y: Grid(2, x.cols, BYTES) if _is_bytes(x) and x == y else None)
def stacked(b, x, y):
    """The rows x and y of two strips as one Grid."""
    return grid_of(b, [_cells(b, x), _cells(b, y)])


@vector_op(lambda x, _p, value: _same(x) if _literals(value) else None)
def with_bits(b, x, p, value):
    """Bytes of x plus `value` where their bit is set; the bits are at p, 64 for each vector."""
    made, cells = [], _cells(b, x)
    for v, at in zip(cells, spaced(b, p, 8, len(cells)), strict=True):
        bits = byte_mask(b, b.load(pointer(b, at, I64), align=1))
        made.append(b.or_(v, b.select(bits, const(BYTES, value), const(BYTES, 0))))
    return _row(b, made)


@vector_op(lambda x, _p: _same(x))
def with_signs(b, x, p):
    """Bytes of x, negated where their bit is set; the bits are at p, 64 for each vector."""
    made, cells = [], _cells(b, x)
    for v, at in zip(cells, spaced(b, p, 8, len(cells)), strict=True):
        bits = byte_mask(b, b.load(pointer(b, at, I64), align=1))
        made.append(b.select(bits, b.sub(const(BYTES, 0), v), v))
    return _row(b, made)


@vector_op(lambda x, _p: _same(x))
def nudged(b, x, p):
    """Bytes of x plus 1, or minus 1 where the bit of their row is set.

    The bits are at p: 16, a row of weights each, for every two vectors.
    """
    made, cells = [], _cells(b, x)
    for i, v in enumerate(cells):
        at = b.add(p, ir.Constant(I64, i // 2 * 2))
        bits = b.bitcast(b.load(pointer(b, at, I16), align=1), ir.VectorType(I1, N))
        step = b.select(bits, const(WORDS, -1), const(WORDS, 0x01010101))
        made.append(b.add(v, b.bitcast(step, BYTES)))
    return _row(b, made)


def looked_up(values: Sequence[int]) -> Any:
    """Make the operation x -> values[x], a table of 16, on a row of bytes below 16."""
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
    """Signed bytes as int16, in the order of `shorts`."""
    halves = [half for v in _cells(b, x) for half in _pairs(b, v, True)]
    return _row(b, [b.ashr(half, const(SHORTS, 8)) for half in halves])


def _is_shorts(x: Any) -> bool:
    return isinstance(x, Grid) and x.vector == SHORTS


@vector_op(lambda x, y: x if _is_shorts(x) and y == i32x16 else None)
def times_words(b, x, y):
    """Both int16 of each 32-bit lane of x times that lane of y, which fits 16 bits."""
    low = b.and_(y, const(WORDS, 0xFFFF))
    factor = b.bitcast(b.or_(low, b.shl(y, const(WORDS, 16))), SHORTS)
    return _row(b, [b.mul(v, factor) for v in _cells(b, x)])


@vector_op(lambda _p, _stride, x: types.void if _is_shorts(x) or _is_bytes(x) else None)
def store_spaced(b, p, stride, x):
    """Write a row's vectors at p, p + stride, ..."""
    cells = _cells(b, x)
    for v, at in zip(cells, spaced(b, p, stride, len(cells)), strict=True):
        b.store(v, pointer(b, at, v.type), align=1)


@vector_op(lambda _p, x: types.void if _is_bytes(x) and x.cols % 2 == 0 else None)
def store_eights(b, p, x):
    """Write eight neighbouring elements of each row, of every two vectors, row by row."""
    cells = [b.bitcast(v, WORDS) for v in _cells(b, x)]
    picks = [i // 2 + N * (i % 2) for i in range(2 * N)]
    for i, at in enumerate(spaced(b, p, 8 * N, len(cells) // 2)):
        both = shuffled(b, cells[2 * i], cells[2 * i + 1], picks)
        b.store(both, pointer(b, at, both.type), align=1)


@vector_op(lambda _p, x: types.void if x == i32x16 else None)
def store_low_nibbles(b, p, x):
    """Write eight bytes: the lowest four bits of each lane, two lanes a byte, the first low."""
    bytes = b.trunc(b.and_(x, const(WORDS, 15)), ir.VectorType(I8, N))
    pairs = b.bitcast(bytes, ir.VectorType(I16, N // 2))
    both = b.or_(pairs, b.lshr(pairs, const(pairs.type, 4)))
    b.store(b.trunc(both, ir.VectorType(I8, N // 2)), pointer(b, p, ir.VectorType(I8, 8)), align=1)


# ---- rows of activations -------------------------------------------------------------------------
def _i64(x: Any) -> Any:
    return ir.Constant(I64, x) if isinstance(x, int) else x


@vector_op(lambda _p, _s, _n, rows: Addresses(rows.literal_value) if _literals(rows) else None)
def rows_at(b, p, stride, n, rows):
    """The addresses p, p + stride, ... of n rows; the last one's is repeated if n < rows."""
    last, made = b.sub(_i64(n), _i64(1)), []
    for row in map(_i64, range(rows)):
        i = b.select(b.icmp_signed("<", row, last), row, last)
        made.append(b.add(p, b.mul(_i64(stride), i)))
    return packed(b, made)


# ---- products ------------------------------------------------------------------------------------
# Without VNNI, sums of two products of unsigned and signed bytes saturate at 16 bits.
OFFSET = 128.0 if CPU.vnni else 0.0


def _products(x: Any, starts: Any, _offset: Any, *literals: Any) -> Any:
    fits = isinstance(x, Grid) and x.vector == BYTES and isinstance(starts, Addresses)
    return Grid(starts.n, x.rows, FLOATS) if fits and _literals(*literals) else None


def _dotted(
    b: Any, x: Any, starts: Any, offset: Any, places: Sequence[int], most: int, *, signed: bool
) -> Any:
    """Vector by vector, so that a word of activations is read once for all strips.

    places: of the planes, after the offset.
    """
    if CPU.avx2 and not CPU.vnni:
        return _dotted_in_shorts(b, x, starts, offset, places, most, signed=signed)
    strips, rows = rows_of(b, x), [b.add(at, _i64(offset)) for at in unpacked(b, starts)]
    sums = [[[const(WORDS, 0)] * len(strips) for _ in places] for _ in rows]
    for j in range(len(strips[0])):
        column = [strip[j] for strip in strips]
        if signed and CPU.vnni:
            column = [b.xor(v, const(BYTES, TOP_BIT)) for v in column]
        for row, planes in zip(rows, sums, strict=True):
            for place, totals in zip(places, planes, strict=True):
                at = b.add(row, _i64(place + 4 * j))
                word = b.load(pointer(b, at, I32), align=4)
                y = b.bitcast(splatted(b, word, N), BYTES)
                for i, v in enumerate(column):
                    dotted = dotted_i8 if signed and not CPU.vnni else dotted_u8
                    totals[i] = dotted(b, totals[i], v, y)

    def joined(high: Any, *low: Any) -> Any:
        return b.sitofp(reduce(b.add, low, b.shl(high, const(WORDS, 7))), FLOATS)

    return grid_of(b, [[joined(*pair) for pair in zip(*planes, strict=True)] for planes in sums])


def _dotted_in_shorts(
    b: Any, x: Any, starts: Any, offset: Any, places: Sequence[int], most: int, *, signed: bool
) -> Any:
    """As `_dotted` without VNNI: products are added up as int16 while they fit."""
    strips, rows = rows_of(b, x), [b.add(at, _i64(offset)) for at in unpacked(b, starts)]
    n, at_once = len(strips[0]), max(1, 0x7FFF // (2 * 127 * most))
    sums = [[const(WORDS, 0)] * len(strips) for _ in rows]
    for first in range(0, n, at_once):
        shorts = [[[const(SHORTS, 0)] * len(strips) for _ in places] for _ in rows]
        for j in range(first, min(first + at_once, n)):
            for row, planes in zip(rows, shorts, strict=True):
                for place, totals in zip(places, planes, strict=True):
                    at = b.add(row, _i64(place + 4 * j))
                    word = b.load(pointer(b, at, I32), align=4)
                    y = b.bitcast(splatted(b, word, N), BYTES)
                    for i, strip in enumerate(strips):
                        u, s = strip[j], y
                        if signed:
                            u, s = magnitude(b, u), signed_like(b, y, u)
                        totals[i] = b.add(totals[i], sums_of_two(b, u, s))
        for totals, planes in zip(sums, shorts, strict=True):
            for plane, factor in zip(planes, (128, 1), strict=False):
                for i, half in enumerate(plane):
                    totals[i] = plus_pairs(b, totals[i], half, factor)
    return grid_of(b, [[b.sitofp(total, FLOATS) for total in totals] for totals in sums])


@vector_op(_products)
def dot_planes(b, x, starts, offset, apart, most):
    """Row r, strip i: sums of 128 * high + low of row r times four elements a lane of all of x[i].

    x: unsigned bytes, up to `most`, which is 127 or less unless CPU.mixed_bytes. high: signed
    bytes, not -128, `offset` after each start; low: from -64 to 64, `apart` after these. apart 0:
    there are no low ones.
    """
    return _dotted(b, x, starts, offset, (0, apart) if apart else (0,), most, signed=False)


@vector_op(_products)
def dot_signed_planes(b, x, starts, offset, apart, most):
    """As `dot_planes` for signed bytes of -most to most, to each of which OFFSET is added."""
    return _dotted(b, x, starts, offset, (0, apart) if apart else (0,), most, signed=True)


@vector_op(lambda starts, _offset: types.int64 if isinstance(starts, Addresses) else None)
def any_of_rows(b, starts, offset):
    """Bitwise or of the bytes `offset` after each start."""
    places = [b.add(at, _i64(offset)) for at in unpacked(b, starts)]
    found = [b.load(pointer(b, at, I8), align=1) for at in places]
    return b.zext(reduce(b.or_, found), I64)


# ---- sums ----------------------------------------------------------------------------------------
@vector_op(lambda x: Grid(1, 1, FLOATS) if x == f32x16 else None)
def as_row(b, x):
    """The vector x, sixteen floats, as a Grid of one row."""
    return _row(b, [x])


@vector_op(lambda rows, strips: _no_sums(rows, strips))
def no_sums(b, rows, strips):
    """Zero accumulators: a Grid of floats, rows of activations x strips of weights."""
    return grid_of(b, [[const(FLOATS, 0.0)] * strips] * rows)


def _no_sums(rows: Any, strips: Any) -> Any:
    fits = _literals(rows, strips)
    return Grid(rows.literal_value, strips.literal_value, FLOATS) if fits else None


def _broadcasts(b: Any, starts: Any, offset: Any) -> list[Any]:
    places = [b.add(p, _i64(offset)) for p in unpacked(b, starts)]
    found = [b.load(pointer(b, at, FLOAT), align=4) for at in places]
    return [splatted(b, number, N) for number in found]


def _of_rows(sums: Any, starts: Any) -> Any:
    fits = _is_floats(sums) and isinstance(starts, Addresses) and starts.n == sums.rows
    return sums if fits else None


def _of_strips(sums: Any, row: Any) -> Any:
    fits = _is_floats(sums) and _is_floats(row) and (row.rows, row.cols) == (1, sums.cols)
    return sums if fits else None


@vector_op(lambda sums, starts, _offset: _of_rows(sums, starts))
def times_each(b, sums, starts, offset):
    """sums[r, i] * s[r]; s[r]: the float32 at starts[r] + offset."""
    pairs = zip(rows_of(b, sums), _broadcasts(b, starts, offset), strict=True)
    return grid_of(b, [[b.fmul(x, y) for x in row] for row, y in pairs])


@vector_op(lambda sums, x, y: _of_strips(sums, y) if x == sums else None)
def add_times(b, sums, x, y):
    """sums[r, i] + x[r, i] * y[i]."""
    made, factors = [], _cells(b, y)
    for totals, row in zip(rows_of(b, sums), rows_of(b, x), strict=True):
        cells = zip(totals, row, factors, strict=True)
        made.append([fused(b, v, factor, total) for total, v, factor in cells])
    return grid_of(b, made)


@vector_op(lambda sums, x, starts, _offset: _of_rows(sums, starts) and _of_strips(sums, x))
def add_each(b, sums, x, starts, offset):
    """sums[r, i] + x[i] * s[r]; s[r]: the float32 at starts[r] + offset."""
    made, factors = [], _cells(b, x)
    for totals, y in zip(rows_of(b, sums), _broadcasts(b, starts, offset), strict=True):
        cells = zip(totals, factors, strict=True)
        made.append([fused(b, factor, y, total) for total, factor in cells])
    return grid_of(b, made)


@vector_op(lambda sums, starts, _apart: _of_rows(sums, starts))
def add_rows(b, sums, starts, apart):
    """sums[r, i] + the vector at starts[r] + i * apart."""
    made = []
    for totals, start in zip(rows_of(b, sums), unpacked(b, starts), strict=True):
        cells = zip(totals, spaced(b, start, apart, len(totals)), strict=True)
        made.append([b.fadd(x, vector_at(b, at, FLOATS)) for x, at in cells])
    return grid_of(b, made)


@vector_op(lambda starts, _apart, sums: types.void if _of_rows(sums, starts) else None)
def store_rows(b, starts, apart, sums):
    """Write sums[r, i] at starts[r] + i * apart."""
    for row, start in zip(rows_of(b, sums), unpacked(b, starts), strict=True):
        for x, at in zip(row, spaced(b, start, apart, len(row)), strict=True):
            b.store(x, pointer(b, at, FLOATS), align=1)
