"""Register tiles: grids of float vectors that accumulate small matrix products.

A Grid has rows and columns of `vf` vectors. A product reads like `sums = add_products(sums,
broadcast_column(x, ...), load_row(y, ...))`; each cell is unrolled when the code is made. Counts
are literals; strides are bytes. Nothing is aligned. A grid of words has vectors of as many int32
lanes, or pairs of int16.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from tamis.jit_kernels.cpu.lang.intrinsic import FLOAT, I8, I16, I32, I64, call, pointer
from tamis.jit_kernels.cpu.lang.simd import (
    CPU,
    LANES,
    ask_for,
    const,
    dotted_i8,
    dotted_i16,
    dotted_u8,
    fused,
    halves,
    joined,
    lanes_of,
    magnitude,
    plus_pairs,
    shuffled,
    signed_like,
    splatted,
    summed_groups,
    sums_of_two,
    vector_op,
    vf,
    widened_half,
)

WORDS = lanes_of(I32, vf.ir)
BYTES = ir.VectorType(I8, 4 * LANES)
# Added to signed bytes so that `add_outer_bytes` multiplies them: without VNNI, sums of two
# products of unsigned and signed bytes saturate at 16 bits.
NV = 2  # vectors of weight rows in GEMM's tile
BYTE_OFFSET = 128 if CPU.vnni else 0


class Grid(types.Type):
    """The Numba type of rows * cols vectors of floats or words."""

    def __init__(self, rows: int, cols: int, vector: ir.VectorType = vf.ir) -> None:
        self.rows, self.cols, self.vector = rows, cols, vector
        super().__init__(name=f"grid{rows}x{cols}_{vector.element}x{vector.count}")

    @property
    def ir(self) -> ir.ArrayType:
        """The LLVM type."""
        return ir.ArrayType(ir.ArrayType(self.vector, self.cols), self.rows)


class Addresses(types.Type):
    """The Numba type of n int64 addresses."""

    def __init__(self, n: int) -> None:
        self.n = n
        super().__init__(name=f"addresses{n}")

    @property
    def ir(self) -> ir.ArrayType:
        """The LLVM type."""
        return ir.ArrayType(I64, self.n)


@register_model(Grid)
@register_model(Addresses)
class _ArrayModel(models.PrimitiveModel):
    def __init__(self, manager: Any, array: Any) -> None:
        super().__init__(manager, array, array.ir)


# ---- LLVM IR helpers -----------------------------------------------------------------------------
def packed(b: Any, values: list[Any]) -> Any:
    """The LLVM array of values of one type."""
    array = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        array = b.insert_value(array, value, i)
    return array


def unpacked(b: Any, array: Any) -> list[Any]:
    """The values of an LLVM array."""
    return [b.extract_value(array, i) for i in range(array.type.count)]


def grid_of(b: Any, rows: list[list[Any]]) -> Any:
    """The grid of rows of vectors."""
    return packed(b, [packed(b, row) for row in rows])


def rows_of(b: Any, grid: Any) -> list[list[Any]]:
    """The rows of vectors of a grid."""
    return [unpacked(b, row) for row in unpacked(b, grid)]


def spaced(b: Any, p: Any, stride: Any, n: int) -> list[Any]:
    """The addresses p, p + stride, ..."""
    step = ir.Constant(I64, stride) if isinstance(stride, int) else stride
    return [b.add(p, b.mul(step, ir.Constant(I64, i))) for i in range(n)]


def vector_at(b: Any, p: Any, kind: ir.VectorType = vf.ir) -> Any:
    """The vector at p of the Numba type `kind`."""
    return b.load(pointer(b, p, kind), align=1)


def halves_at(b: Any, p: Any) -> Any:
    """The float16s at p as a float vector."""
    return widened_half(b, b.load(pointer(b, p, lanes_of(I16, vf.ir)), align=1))


def interleaved(b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """x0 y0 x1 y1 ... as two vectors."""
    n = x.type.count
    picks = [i // 2 + n * (i % 2) for i in range(2 * n)]
    return shuffled(b, x, y, picks[:n]), shuffled(b, x, y, picks[n:])


def summed_lanes(b: Any, vectors: list[Any]) -> Any:
    """Lane i is the sum of the lanes of vectors[i]; their number is a power of 2 up to LANES."""
    n = len(vectors)
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = [interleaved(b, vectors[i], vectors[half + i]) for i in range(half)]
        vectors = [b.fadd(low, high) for low, high in pairs]
    (total,) = vectors  # lane i belongs to vector i % n
    while total.type.count > n:
        total = b.fadd(*halves(b, total))
    return total


# ---- typing --------------------------------------------------------------------------------------
def _counts(*args: Any) -> list[int]:
    """The values of literals; empty where one is not."""
    fits = all(isinstance(a, types.IntegerLiteral) for a in args)
    return [a.literal_value for a in args] if fits else []


def _made(vector: ir.VectorType, rows: int | None = None, cols: int | None = None) -> Any:
    """A rule: a Grid whose rows and columns, where not given, are the last arguments."""

    def rule(*args: Any) -> Any:
        missing = [rows, cols].count(None)
        counts = _counts(*args[len(args) - missing :])
        if not counts:
            return None
        first = counts.pop(0) if rows is None else rows
        return Grid(first, counts.pop(0) if cols is None else cols, vector)

    return rule


def _written(_p: Any, _stride: Any, grid: Any) -> Any:
    return types.void if isinstance(grid, Grid) else None


def _is(grid: Any, rows: int, cols: int, vector: ir.VectorType = vf.ir) -> bool:
    found = isinstance(grid, Grid) and (grid.rows, grid.cols, grid.vector)
    return found == (rows, cols, vector)


# ---- memory --------------------------------------------------------------------------------------
@vector_op(_made(vf.ir))
def zero_grid(b, rows, cols):
    """A tile of zeros, rows x cols vectors."""
    return grid_of(b, [[const(vf.ir, 0.0)] * cols] * rows)


@vector_op(_made(WORDS))
def zero_word_grid(b, rows, cols):
    """A tile of int32 zeros, rows x cols vectors."""
    return grid_of(b, [[const(WORDS, 0)] * cols] * rows)


@vector_op(_made(vf.ir))
def load_grid(b, p, stride, rows, cols):
    """Rows of neighbouring vectors, at p, p + stride, ..."""
    starts = spaced(b, p, stride, rows)
    return grid_of(b, [[vector_at(b, at) for at in spaced(b, p, 4 * LANES, cols)] for p in starts])


@vector_op(_made(vf.ir, cols=1))
def load_column(b, p, stride, rows):
    """A column of vectors, at p, p + stride, ..."""
    return grid_of(b, [[vector_at(b, at)] for at in spaced(b, p, stride, rows)])


@vector_op(_made(vf.ir, cols=1))
def broadcast_column(b, p, stride, rows):
    """A column of vectors: the float32s at p, p + stride, ..., each in all lanes of its vector."""
    numbers = [b.load(pointer(b, at, FLOAT), align=1) for at in spaced(b, p, stride, rows)]
    return grid_of(b, [[splatted(b, number, LANES)] for number in numbers])


@vector_op(_made(vf.ir, rows=1))
def load_row(b, p, cols):
    """A row of neighbouring vectors."""
    return grid_of(b, [[vector_at(b, at) for at in spaced(b, p, 4 * LANES, cols)]])


@vector_op(_made(WORDS, rows=1))
def load_word_row(b, p, cols):
    """A row of neighbouring vectors of words."""
    return grid_of(b, [[vector_at(b, at, WORDS) for at in spaced(b, p, 4 * LANES, cols)]])


@vector_op(_made(vf.ir, rows=1))
def load_half_row(b, p, cols):
    """A row of neighbouring vectors of float16."""
    return grid_of(b, [[halves_at(b, at) for at in spaced(b, p, 2 * LANES, cols)]])


@vector_op(lambda _p, _base, *sizes: Addresses(_counts(*sizes)[1]) if _counts(*sizes) else None)
def addresses(b, p, base, size, n):
    """The addresses base + size * index of n int32 indices at p."""
    indices = [b.load(pointer(b, at, I32), align=1) for at in spaced(b, p, 4, n)]
    steps = [b.mul(b.sext(index, I64), ir.Constant(I64, size)) for index in indices]
    return packed(b, [b.add(base, step) for step in steps])


@vector_op(lambda _p, *sizes: Addresses(_counts(*sizes)[1]) if _counts(*sizes) else None)
def neighbours(b, p, size, n):
    """The addresses p, p + size, ... of n rows."""
    return packed(b, spaced(b, p, size, n))


@vector_op(lambda starts, _offset: Grid(1, starts.n) if isinstance(starts, Addresses) else None)
def load_half_each(b, starts, offset):
    """A row of vectors of float16, `offset` bytes after each address."""
    return grid_of(b, [[halves_at(b, b.add(p, offset)) for p in unpacked(b, starts)]])


@vector_op(_made(vf.ir, rows=1))
def load_half_spaced(b, p, stride, n):
    """A row of vectors of float16, at p, p + stride, ..."""
    return grid_of(b, [[halves_at(b, at) for at in spaced(b, p, stride, n)]])


@vector_op(lambda starts, _n: types.void if _counts(_n) else None)
def prefetch_each(b, starts, n_bytes):
    """Prefetch the cache lines of the n_bytes from each address on."""
    for start in unpacked(b, starts):
        for at in spaced(b, start, 64, -(-n_bytes // 64)):
            ask_for(b, at)


@vector_op(_written)
def store_grid(b, p, stride, grid):
    """Write rows of neighbouring vectors at p, p + stride, ..."""
    rows = rows_of(b, grid)
    for start, row in zip(spaced(b, p, stride, len(rows)), rows, strict=True):
        for at, x in zip(spaced(b, start, 4 * LANES, len(row)), row, strict=True):
            b.store(x, pointer(b, at, vf.ir), align=1)


@vector_op(_written)
def store_sums(b, p, stride, grid):
    """Write float32s at p, p + stride, ...: the sums of the lanes of each row's vectors.

    The number of columns is a power of 2, at most LANES.
    """
    rows, starts = rows_of(b, grid), spaced(b, p, stride, grid.type.count)
    cols = len(rows[0])
    while rows:
        n = LANES // cols  # rows whose vectors are summed together: a power of 2
        while n > len(rows):
            n //= 2
        total = summed_lanes(b, [x for row in rows[:n] for x in row])
        for i in range(n):
            sums = shuffled(b, total, total, range(i * cols, (i + 1) * cols))
            b.store(sums, pointer(b, starts[i], sums.type), align=1)
        rows, starts = rows[n:], starts[n:]


@vector_op(_written)
def store_folded(b, p, stride, grid):
    """Write four float32s for each row at p, p + stride, ...: sum i is of lanes i, i + 4, ..."""
    rows = rows_of(b, grid)
    for at, (x,) in zip(spaced(b, p, stride, len(rows)), rows, strict=True):
        while x.type.count > 4:
            x = (b.fadd if x.type.element == FLOAT else b.add)(*halves(b, x))
        b.store(x, pointer(b, at, x.type), align=1)


# ---- arithmetic ----------------------------------------------------------------------------------
def _product(sums: Any, column: Any, row: Any) -> Any:
    return sums if _is(column, sums.rows, 1) and _is(row, 1, sums.cols) else None


@vector_op(_product)
def add_products(b, sums, column, row):
    """sums[i, j] + column[i] * row[j], lane by lane."""
    (ys,) = rows_of(b, row)
    made = []
    for zs, (x,) in zip(rows_of(b, sums), rows_of(b, column), strict=True):
        made.append([fused(b, x, y, z) for y, z in zip(ys, zs, strict=True)])
    return grid_of(b, made)


def _outer(sums: Any, _p: Any, _stride: Any, row: Any) -> Any:
    return sums if _is(row, 1, sums.cols, sums.vector) else None


@vector_op(_outer)
def add_outer(b, sums, p, stride, row):
    """sums[i, j] + x[i] * row[j], x[i] at p + i * stride: a float32, or two int16 (dot product).

    Row by row, so that few registers hold an x.
    """
    shorts = ir.VectorType(I16, 2 * LANES)
    (ys,) = rows_of(b, row)
    words, made = ys[0].type == WORDS, []
    for zs, at in zip(rows_of(b, sums), spaced(b, p, stride, sums.type.count), strict=True):
        x = splatted(b, b.load(pointer(b, at, I32 if words else FLOAT), align=4), LANES)
        if words:
            pair = b.bitcast(x, shorts)
            cells = zip(ys, zs, strict=True)
            made.append([dotted_i16(b, z, pair, b.bitcast(y, shorts)) for y, z in cells])
        else:
            made.append([fused(b, x, y, z) for y, z in zip(ys, zs, strict=True)])
    return grid_of(b, made)


@vector_op(lambda sums, _p, _s, row, signed: _outer(sums, _p, _s, row) if _counts(signed) else None)
def add_outer_bytes(b, sums, p, stride, row, signed):
    """sums[i, j] + x[i] . row[j], four bytes a word, with signed bytes x at p, p + stride, ...

    Bytes of row: unsigned, up to 127 unless CPU.mixed_bytes; signed = 1: signed ones, plus
    BYTE_OFFSET.
    """
    ys = [b.bitcast(y, BYTES) for y in rows_of(b, row)[0]]
    dotted, made = dotted_i8 if signed and not BYTE_OFFSET else dotted_u8, []
    for zs, at in zip(rows_of(b, sums), spaced(b, p, stride, sums.type.count), strict=True):
        x = b.bitcast(splatted(b, b.load(pointer(b, at, I32), align=4), LANES), BYTES)
        made.append([dotted(b, z, y, x) for y, z in zip(ys, zs, strict=True)])
    return grid_of(b, made)


def _in_shorts(sums: Any, starts: Any, _w: Any, *sizes: Any) -> Any:
    fits = isinstance(sums, Grid) and sums.vector == WORDS and len(_counts(*sizes)) == 3
    fits = fits and isinstance(starts, Addresses) and starts.n == sums.rows
    return sums if fits and CPU.avx2 and not CPU.vnni else None


@vector_op(_in_shorts)
def add_outer_in_shorts(b, sums, starts, w, n, most, signed):
    """sums[i, j] + x[i, k] . w[k, j] over n steps k, four bytes a word each. AVX2 without VNNI.

    x[i, k] is at starts[i] + 4 * k, signed bytes of -127 to 127; the rows of w follow each
    other at w: bytes up to `most`, signed = 1: -most to most. Products are added up as int16 while
    they fit.
    """
    rows, made = rows_of(b, sums), [list(row) for row in rows_of(b, sums)]
    places, weights = unpacked(b, starts), spaced(b, w, 4 * LANES * len(rows[0]), n)
    at_once, shorts = max(1, 0x7FFF // (2 * 127 * most)), ir.VectorType(I16, 2 * LANES)
    for first in range(0, n, at_once):
        totals = [[const(shorts, 0)] * len(row) for row in rows]
        for k in range(first, min(first + at_once, n)):
            ys = [vector_at(b, at, BYTES) for at in spaced(b, weights[k], 4 * LANES, len(rows[0]))]
            for start, row in zip(places, totals, strict=True):
                word = b.load(pointer(b, b.add(start, ir.Constant(I64, 4 * k)), I32), align=4)
                x = b.bitcast(splatted(b, word, LANES), BYTES)
                for j, y in enumerate(ys):
                    pair = (magnitude(b, y), signed_like(b, x, y)) if signed else (y, x)
                    row[j] = b.add(row[j], sums_of_two(b, *pair))
        for words, row in zip(made, totals, strict=True):
            for j, total in enumerate(row):
                words[j] = plus_pairs(b, words[j], total, 1)
    return grid_of(b, made)


def _two_by_two(b: Any, words: Any, order: Callable[[int], int]) -> Any:
    """Every two rows of words as one, its lanes in another order; lane i of it is order(i)."""
    made, rows = [], rows_of(b, words)
    for i in range(0, len(rows), 2):
        both = _joined(b, rows[i] + rows[i + 1])
        n = both.type.count // len(rows[i]) // 2
        picks = [order(lane) for lane in range(both.type.count)]
        parts = [shuffled(b, both, both, picks[at : at + n]) for at in range(0, len(picks), n)]
        made += [parts[: len(parts) // 2], parts[len(parts) // 2 :]]
    return grid_of(b, made)


def _joined(b: Any, vectors: list[Any]) -> Any:
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    return joined(b, _joined(b, vectors[:half]), _joined(b, vectors[half:]))


_PAIRED = NV * LANES  # lanes of a row of words


def _even_rows(words: Any) -> Any:
    fits = isinstance(words, Grid) and words.vector == WORDS and words.cols == NV
    return words if fits and words.rows % 2 == 0 else None


@vector_op(_even_rows)
def paired(b, words):
    """Every two rows as squares: lanes 0 and 1 of both, then lanes 2 and 3 of both, ..."""
    return _two_by_two(b, words, lambda i: i // 4 * 2 + i % 2 + _PAIRED * (i % 4 // 2))


@vector_op(_even_rows)
def unpaired(b, words):
    """What `paired` was made of."""
    return _two_by_two(b, words, lambda i: i % _PAIRED // 2 * 4 + i % 2 + i // _PAIRED * 2)


def _square(b: Any, total: Any, x: Any, w: Any) -> Any:
    """total[i, j] + x[i] . w[j], two rows of eight signed bytes each, in four lanes."""
    if CPU.i8mm:
        return call(b, "llvm.aarch64.neon.smmla.v4i32.v16i8", total.type, [total, x, w])
    (x_low, x_high), words = halves(b, x), ir.VectorType(I32, 32)
    rows = joined(b, joined(b, x_low, x_low), joined(b, x_high, x_high))
    products = b.mul(b.sext(rows, words), b.sext(joined(b, w, w), words))
    return b.add(total, summed_groups(b, products, 8))


@vector_op(lambda words, _p, _stride, _w: _even_rows(words))
def add_outer_eights(b, words, p, stride, w):
    """sums[i, j] + x[i] . w[j] of eight signed bytes, `words` being paired(sums).

    x[i] is at p + i * stride; w[j] follow each other at w.
    """
    bytes, made = ir.VectorType(I8, 16), []
    weights = [vector_at(b, at, bytes) for at in spaced(b, w, 16, _PAIRED // 2)]
    rows, starts = rows_of(b, words), spaced(b, p, stride, words.type.count)
    for i in range(0, len(rows), 2):
        x = joined(b, *(vector_at(b, at, ir.VectorType(I8, 8)) for at in starts[i : i + 2]))
        totals, cells = rows[i] + rows[i + 1], []
        for j, total in enumerate(totals):
            n = LANES // 4
            quarters = [shuffled(b, total, total, range(4 * q, 4 * q + 4)) for q in range(n)]
            own = weights[n * j : n * (j + 1)]
            sums = [_square(b, part, x, y) for part, y in zip(quarters, own, strict=True)]
            cells.append(_joined(b, sums))
        made += [cells[:NV], cells[NV:]]
    return grid_of(b, made)


@vector_op(lambda _p, *sizes: _made(WORDS)(*sizes[:2]) if _counts(*sizes) else None)
def broadcast_words(b, p, rows, cols, factor):
    """Rows of vectors that hold one int32 each, at p, p + 4, ..., times a factor."""
    if not factor:
        return grid_of(b, [[const(WORDS, 0)] * cols] * rows)
    numbers = [b.load(pointer(b, at, I32), align=4) for at in spaced(b, p, 4, rows)]
    scaled = [b.mul(number, ir.Constant(I32, factor)) for number in numbers]
    return grid_of(b, [[splatted(b, number, LANES)] * cols for number in scaled])


@vector_op(
    lambda _p, _shift, cols, zero, signed, apart: (
        _made(vf.ir, rows=1)(cols) if _counts(cols, zero, signed, apart) else None
    )
)
def load_byte_row(b, p, shift, cols, zero, signed, apart):
    """A row of vectors: bits shift .. shift + 7 of words `apart` words apart, less `zero`."""
    count = ir.Constant(I64, shift) if isinstance(shift, int) else shift
    up = splatted(b, b.trunc(b.sub(ir.Constant(I64, 24), count), I32), LANES)
    made = []
    for at in spaced(b, p, 4 * LANES * apart, cols):
        words = vector_at(b, at, ir.VectorType(I32, LANES * apart))
        top = b.shl(shuffled(b, words, words, range(0, LANES * apart, apart)), up)
        low = (b.ashr if signed else b.lshr)(top, const(WORDS, 24))
        made.append(b.sitofp(b.sub(low, const(WORDS, zero)), vf.ir))
    return grid_of(b, [made])


@vector_op(lambda x, y: x if _is(x, 1, x.cols) and x == y else None)
def times_row(b, x, y):
    """x[j] * y[j] of two rows, lane by lane."""
    (xs,), (ys,) = rows_of(b, x), rows_of(b, y)
    return grid_of(b, [[b.fmul(v, w) for v, w in zip(xs, ys, strict=True)]])


@vector_op(lambda x, y: x if _is(x, 1, x.cols) and x == y else None)
def plus_row(b, x, y):
    """x[j] + y[j] of two rows, lane by lane."""
    (xs,), (ys,) = rows_of(b, x), rows_of(b, y)
    return grid_of(b, [[b.fadd(v, w) for v, w in zip(xs, ys, strict=True)]])


@vector_op(lambda sums, _x, _s, _y: sums if _is(sums, sums.rows, 1, WORDS) else None)
def add_bytes(b, sums, x, stride, y):
    """sums[i] + x[i] . y, four products a lane: int8 at x + i * stride, bytes 0 to 127 at y."""
    row, made = vector_at(b, y, BYTES), []
    for (total,), at in zip(rows_of(b, sums), spaced(b, x, stride, sums.type.count), strict=True):
        made.append([dotted_u8(b, total, row, vector_at(b, at, BYTES))])
    return grid_of(b, made)


@vector_op(lambda _p, sums, _first: types.void if isinstance(sums, Grid) else None)
def keep_largest(b, p, sums, first):
    """Update the running maximum at p and its row number (argmax) with rows first + i of sums.

    At p are one row of float32 maxima, then one of int32 row numbers; the earlier row wins a tie.
    """
    rows = rows_of(b, sums)
    cols = len(rows[0])
    starts = spaced(b, p, 4 * LANES, 2 * cols)
    for j in range(cols):
        best, number = vector_at(b, starts[j]), vector_at(b, starts[cols + j], WORDS)
        for i, row in enumerate(rows):
            more = b.fcmp_ordered(">", row[j], best)
            this = splatted(b, b.trunc(b.add(first, ir.Constant(I64, i)), I32), LANES)
            best, number = b.select(more, row[j], best), b.select(more, this, number)
        b.store(best, pointer(b, starts[j], vf.ir), align=1)
        b.store(number, pointer(b, starts[cols + j], WORDS), align=1)


def _scaled(grid: Any, words: Any, column: Any, row: Any) -> Any:
    fits = _is(words, grid.rows, grid.cols, WORDS) and _is(column, grid.rows, 1)
    return grid if fits and _is(row, 1, grid.cols) else None


@vector_op(_scaled)
def add_scaled_words(b, grid, words, column, row):
    """grid[i, j] + words[i, j] * column[i] * row[j]."""
    (ys,) = rows_of(b, row)
    made = []
    for zs, ws, (x,) in zip(*(rows_of(b, g) for g in (grid, words, column)), strict=True):
        cells = zip(ys, ws, zs, strict=True)
        made.append([fused(b, b.sitofp(w, vf.ir), b.fmul(x, y), z) for y, w, z in cells])
    return grid_of(b, made)


def _scaled_twice(grid: Any, words: Any, others: Any, column: Any, row: Any, next: Any) -> Any:
    fits = _scaled(grid, words, column, row) and _scaled(grid, others, column, next)
    return grid if fits else None


@vector_op(_scaled_twice)
def add_scaled_twice(b, grid, words, others, column, row, next):
    """grid[i, j] + (words[i, j] * row[j] + others[i, j] * next[j]) * column[i]."""
    (ys,), (us,) = rows_of(b, row), rows_of(b, next)
    made = []
    parts = (rows_of(b, g) for g in (grid, words, others, column))
    for zs, ws, vs, (x,) in zip(*parts, strict=True):
        cells = []
        for z, w, v, y, u in zip(zs, ws, vs, ys, us, strict=True):
            first = b.fmul(b.sitofp(w, vf.ir), y)
            cells.append(fused(b, fused(b, b.sitofp(v, vf.ir), u, first), x, z))
        made.append(cells)
    return grid_of(b, made)


@vector_op(lambda grid, column: grid if _is(column, grid.rows, 1) else None)
def scale_rows(b, grid, column):
    """grid[i, j] * column[i], lane by lane."""
    pairs = zip(rows_of(b, grid), rows_of(b, column), strict=True)
    return grid_of(b, [[b.fmul(x, factor) for x in xs] for xs, (factor,) in pairs])


@vector_op(lambda x: Grid(LANES, 1) if _is(x, 1, LANES) or _is(x, LANES, 1) else None)
def transposed(b, x):
    """The LANES x LANES transpose of a row or column of LANES vectors, as a column."""
    xs = [vector for row in rows_of(b, x) for vector in row]
    half = LANES // 2
    for _ in range(half.bit_length()):
        pairs = [interleaved(b, xs[i], xs[half + i]) for i in range(half)]
        xs = [x for pair in pairs for x in pair]
    return grid_of(b, [[x] for x in xs])
