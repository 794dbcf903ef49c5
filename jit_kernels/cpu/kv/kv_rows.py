"""The layout of KV rows in pages, by type. No other module depends on it.

A row is one head's key or value at one position. Its index in the pages is (page * n_head_kv +
head) * PAGE + line. A row of q8_0 is its int8 elements, then its scales; one of q4_0 its nibbles,
then its scales.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types

from tamis.jit_kernels.contract.types import KV_BLOCK, PAGE, kv_row
from tamis.jit_kernels.cpu.lang.intrinsic import (
    I8,
    I16,
    I32,
    I64,
    load_f16,
    load_f32,
    load_i32,
    store_f16,
)
from tamis.jit_kernels.cpu.lang.register_tiles import (
    WORDS,
    Addresses,
    Grid,
    addresses,
    grid_of,
    load_half_each,
    pointer,
    prefetch_each,
    rows_of,
    spaced,
    unpacked,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    const,
    hmax,
    lanes_of,
    load_f,
    load_half,
    round_i32,
    shift_left,
    shuffled,
    splat_f,
    splat_i,
    splatted,
    store_f,
    store_half,
    store_low_bytes,
    to_f32,
    vabs,
    vector_op,
    vf,
    vmax,
    where_less,
    widened_half,
    zero_f,
)

ONE, LARGEST, TINY = np.float32(1), np.float32(127), np.float32(1e-30)


class Rows(NamedTuple):
    """Functions of rows of one type and head_dim; out and x are f32 [head_dim]."""

    read: Any  # read(pages, row, out)
    write: Any  # write(x, pages, row)
    copy: Any  # copy(pages, row, to_pages, to_row)


def rows_of_type(type: str, head_dim: int) -> Rows:
    """The functions of a type of KV_TYPES."""
    return {"f16": _f16, "q8_0": _q8_0, "q4_0": _q4_0}[type](head_dim)


@njit(error_model="numpy")
def row_at(table, n_head_kv, h, j):
    """The row of KV head h at position j."""
    return (load_i32(table + 4 * (j // PAGE)) * n_head_kv + h) * PAGE + j % PAGE


# ---- f16 -----------------------------------------------------------------------------------------
def _f16(head_dim: int) -> Rows:
    size, whole = 2 * head_dim, head_dim // LANES * LANES

    @njit(error_model="numpy")
    def read(pages, row, out):
        for d in range(0, size, 2 * LANES):
            store_f(out + 2 * d, load_half(pages + size * row + d))

    @njit(error_model="numpy")
    def write(x, pages, row):
        out = pages + size * row
        for i in range(0, whole, LANES):
            store_half(out + 2 * i, load_f(x + 4 * i))
        for i in range(whole, head_dim):
            store_f16(out + 2 * i, load_f32(x + 4 * i))

    @njit(error_model="numpy")
    def copy(pages, row, to_pages, to_row):
        for d in range(0, size, 2 * LANES):
            store_half(to_pages + size * to_row + d, load_half(pages + size * row + d))

    return Rows(read, write, copy)


# ---- q8_0 ----------------------------------------------------------------------------------------
def _bytes_at(b: Any, p: Any) -> Any:
    """The int8s at p as a float vector."""
    whole = b.sext(b.load(pointer(b, p, lanes_of(I8, vf.ir)), align=1), WORDS)
    return b.sitofp(whole, vf.ir)


def _scale_at(b: Any, p: Any) -> Any:
    """The float16 at p in all lanes, loaded as a vector: see simd.broadcast_half."""
    return widened_half(b, splatted(b, b.load(pointer(b, p, I16), align=1), LANES))


def _literals(*args: Any) -> bool:
    return all(isinstance(a, types.IntegerLiteral) for a in args)


@vector_op(lambda starts, _offset, scale: Grid(1, starts.n) if _literals(scale) else None)
def load_q8_each(b, starts, offset, scale):
    """A row of vectors: the elements `offset` after each address, times their scales.

    scale: bytes from a row to its scales.
    """
    block = b.mul(b.sdiv(offset, ir.Constant(I64, KV_BLOCK)), ir.Constant(I64, 2))
    at_scale = b.add(block, ir.Constant(I64, scale))
    cells = [
        b.fmul(_bytes_at(b, b.add(p, offset)), _scale_at(b, b.add(p, at_scale)))
        for p in unpacked(b, starts)
    ]
    return grid_of(b, [cells])


@vector_op(lambda _p, n: Grid(1, n.literal_value) if _literals(n) else None)
def load_byte_row(b, p, n):
    """A row of neighbouring vectors of int8s as floats."""
    return grid_of(b, [[_bytes_at(b, at) for at in spaced(b, p, LANES, n)]])


@vector_op(lambda starts, _offset, n: Grid(1, starts.n) if _literals(n) else None)
def load_words_each(b, starts, offset, n):
    """A row of vectors: n 32-bit words `offset` bytes after each address, as float bit patterns.

    Other lanes are undefined.
    """
    kind = ir.VectorType(vf.ir.element, n)
    step = ir.Constant(I64, offset) if isinstance(offset, int) else offset
    words = [b.load(pointer(b, b.add(p, step), kind), align=1) for p in unpacked(b, starts)]
    picks = [i % n for i in range(LANES)]
    return grid_of(b, [[x if n == LANES else shuffled(b, x, x, picks) for x in words]])


def _scales_rule(_p: Any, _stride: Any, starts: Any, offset: Any, n: Any) -> Any:
    fits = isinstance(starts, Addresses) and starts.n == LANES
    return types.void if fits and _literals(offset, n) else None


@vector_op(_scales_rule)
def store_scales(b, p, stride, starts, offset, n):
    """Write the n float16 scales of each of LANES rows, transposed: n vectors of float32.

    They are `offset` bytes after each address; vector i goes to p + i * stride.
    """
    targets = spaced(b, p, stride, n)
    for i in range(0, n, 2):
        size = I32 if i + 1 < n else I16
        bits = ir.Constant(lanes_of(size, vf.ir), ir.Undefined)
        step = ir.Constant(I64, offset + 2 * i)
        for j, start in enumerate(unpacked(b, starts)):
            found = b.load(pointer(b, b.add(start, step), size), align=1)
            bits = b.insert_element(bits, found, ir.Constant(I32, j))
        both = [bits, b.lshr(bits, const(bits.type, 16))] if size == I32 else [bits]
        for at, half in zip(targets[i:], both, strict=False):
            short = b.trunc(half, lanes_of(I16, vf.ir)) if size == I32 else half
            b.store(widened_half(b, short), pointer(b, at, vf.ir), align=1)


@vector_op(lambda _p, _stride, grid: types.void if isinstance(grid, Grid) else None)
def store_crossed_pairs(b, p, stride, grid):
    """Widen rows of four bytes a lane, b0 .. b3, to two rows of int16 pairs, (b0, b2), (b1, b3)."""
    rows = rows_of(b, grid)
    starts = spaced(b, p, stride, 2 * len(rows))
    shorts = ir.VectorType(I16, 2 * LANES)
    eight = const(shorts, 8)
    for i, (x,) in enumerate(rows):
        bits = b.bitcast(x, shorts)
        for at, pairs in zip(starts[2 * i :], (b.shl(bits, eight), bits), strict=False):
            b.store(b.ashr(pairs, eight), pointer(b, at, shorts), align=1)


@vector_op(lambda _p, x: types.void if getattr(x, "bits", 0) == 32 else None)
def store_crossed(b, p, x):
    """Write the low 16 bits of int32s, of each four in the order x0, x2, x1, x3."""
    order = [i // 4 * 4 + (0, 2, 1, 3)[i % 4] for i in range(LANES)]
    words = b.trunc(shuffled(b, x, x, order), ir.VectorType(I16, LANES))
    b.store(words, pointer(b, p, words.type), align=1)


@vector_op(lambda _p: vf)
def load_bytes(b, p):
    """The int8s at p as floats."""
    return _bytes_at(b, p)


@vector_op(lambda _to, _from, n: types.void if _literals(n) else None)
def copy_bytes(b, to, from_, n):
    """Copy n bytes."""
    kind = ir.VectorType(I8, n)
    b.store(b.load(pointer(b, from_, kind), align=1), pointer(b, to, kind), align=1)


def _q8_0(head_dim: int) -> Rows:
    assert head_dim % KV_BLOCK == 0
    size = kv_row("q8_0", head_dim).itemsize

    @njit(error_model="numpy")
    def read(pages, row, out):
        at = pages + size * row
        for d in range(0, head_dim, KV_BLOCK):
            factor = splat_f(load_f16(at + head_dim + d // KV_BLOCK * 2))
            for i in range(d, d + KV_BLOCK, LANES):
                store_f(out + 4 * i, load_bytes(at + i) * factor)

    @njit(error_model="numpy")
    def write(x, pages, row):
        at = pages + size * row
        zero, half = splat_f(np.float32(0)), splat_f(np.float32(0.5))
        for d in range(0, head_dim, KV_BLOCK):
            most = zero_f()
            for i in range(d, d + KV_BLOCK, LANES):
                most = vmax(vabs(load_f(x + 4 * i)), most)
            scale = hmax(most) / LARGEST
            factor = splat_f(ONE / scale if scale > TINY else np.float32(0))
            for i in range(d, d + KV_BLOCK, LANES):
                y = load_f(x + 4 * i) * factor
                whole = round_i32(vabs(y))
                # A tie that was rounded down to an even number is rounded up.
                whole = where_less(vabs(y) - to_f32(whole), half, whole, whole + splat_i(1))
                store_low_bytes(at + i, where_less(y, zero, splat_i(0) - whole, whole))
            store_f16(at + head_dim + d // KV_BLOCK * 2, scale)

    @njit(error_model="numpy")
    def copy(pages, row, to_pages, to_row):
        copy_bytes(to_pages + size * to_row, pages + size * row, size)

    return Rows(read, write, copy)


# ---- q4_0 ----------------------------------------------------------------------------------------
def _nibbles_at(b: Any, row: Any, offset: Any) -> Any:
    """The elements of a q4_0 row from `offset` on, without their scale, as a float vector."""
    within = b.and_(offset, ir.Constant(I64, KV_BLOCK // 2 - 1))
    block = b.and_(b.lshr(offset, ir.Constant(I64, 1)), ir.Constant(I64, -(KV_BLOCK // 2)))
    at = pointer(b, b.add(row, b.add(block, within)), lanes_of(I8, vf.ir))
    shift = b.lshr(b.and_(offset, ir.Constant(I64, KV_BLOCK // 2)), ir.Constant(I64, 2))
    words = b.lshr(b.zext(b.load(at, align=1), WORDS), splatted(b, b.trunc(shift, I32), LANES))
    return b.sitofp(b.sub(b.and_(words, const(WORDS, 15)), const(WORDS, 8)), vf.ir)


@vector_op(lambda _row, _offset: vf)
def load_nibbles(b, row, offset):
    """The elements of a q4_0 row from `offset` on, without their scale."""
    return _nibbles_at(b, row, offset)


@vector_op(lambda _row, _offset, n: Grid(1, n.literal_value) if _literals(n) else None)
def load_nibble_row(b, row, offset, n):
    """A row of n vectors of load_nibbles."""
    starts = spaced(b, offset, LANES, n)
    return grid_of(b, [[_nibbles_at(b, row, at) for at in starts]])


@vector_op(lambda starts, _offset, scale: Grid(1, starts.n) if _literals(scale) else None)
def load_q4_each(b, starts, offset, scale):
    """The rows of load_q8_each, for q4_0."""
    block = b.mul(b.sdiv(offset, ir.Constant(I64, KV_BLOCK)), ir.Constant(I64, 2))
    at_scale = b.add(block, ir.Constant(I64, scale))
    cells = [
        b.fmul(_nibbles_at(b, p, offset), _scale_at(b, b.add(p, at_scale)))
        for p in unpacked(b, starts)
    ]
    return grid_of(b, [cells])


@vector_op(lambda _p, _stride, grid: types.void if isinstance(grid, Grid) else None)
def store_crossed_nibbles(b, p, stride, grid):
    """Widen words of eight nibbles like store_crossed_pairs; four rows of the grid are a block.

    A block's low nibbles come first: its rows are those of all low ones, then of all high ones.
    """
    rows = rows_of(b, grid)
    starts = spaced(b, p, stride, 4 * len(rows))
    shorts = ir.VectorType(I16, 2 * LANES)
    for i, (x,) in enumerate(rows):
        bits, first = b.bitcast(x, shorts), 16 * (i // 4) + 2 * (i % 4)
        for row, shift in ((first, 0), (first + 1, 8), (first + 8, 4), (first + 9, 12)):
            nibble = b.and_(b.lshr(bits, const(shorts, shift)), const(shorts, 15))
            pairs = b.sub(nibble, const(shorts, 8))
            b.store(pairs, pointer(b, starts[row], shorts), align=1)


def _q4_0(head_dim: int) -> Rows:
    assert head_dim % KV_BLOCK == 0
    size, half = kv_row("q4_0", head_dim).itemsize, KV_BLOCK // 2

    @njit(error_model="numpy")
    def read(pages, row, out):
        at = pages + size * row
        for d in range(0, head_dim, KV_BLOCK):
            factor = splat_f(load_f16(at + head_dim // 2 + d // KV_BLOCK * 2))
            for i in range(d, d + KV_BLOCK, LANES):
                store_f(out + 4 * i, load_nibbles(at, i) * factor)

    @njit(error_model="numpy")
    def extreme(x):
        """The element of largest magnitude, the first of several."""
        most, found = np.float32(0), np.float32(0)
        for i in range(0, 4 * KV_BLOCK, 4):
            y = load_f32(x + i)
            if abs(y) > most:
                most, found = abs(y), y
        return found

    @njit(error_model="numpy")
    def rounded(x, factor):
        """The floats at x times factor as nibbles, rounded as ggml does: plus 8.5, truncated."""
        y = load_f(x) * factor + splat_f(np.float32(8.5))
        whole = round_i32(y)
        whole = where_less(y, to_f32(whole), whole - splat_i(1), whole)
        return where_less(whole, splat_i(15), whole, splat_i(15))

    @njit(error_model="numpy")
    def write(x, pages, row):
        at = pages + size * row
        for d in range(0, head_dim, KV_BLOCK):
            scale = extreme(x + 4 * d) / np.float32(-8)
            factor = splat_f(ONE / scale if abs(scale) > TINY else np.float32(0))
            for i in range(d, d + half, LANES):
                low, high = rounded(x + 4 * i, factor), rounded(x + 4 * (i + half), factor)
                store_low_bytes(at + (d // 2 + i - d), low + shift_left(high, 4))
            store_f16(at + head_dim // 2 + d // KV_BLOCK * 2, scale)

    @njit(error_model="numpy")
    def copy(pages, row, to_pages, to_row):
        copy_bytes(to_pages + size * to_row, pages + size * row, size)

    return Rows(read, write, copy)


# ---- of any type ---------------------------------------------------------------------------------
def scales_at(type: str, head_dim: int) -> int:
    """Bytes from a quantised row to its scales."""
    return head_dim if type == "q8_0" else head_dim // 2


def crossing(type: str) -> Any:
    """The store function that widens words of quantised keys to rows of int16 pairs."""
    return store_crossed_pairs if type == "q8_0" else store_crossed_nibbles


def loading_quants(type: str, n: int) -> Any:
    """The function load(row, d): a Grid of n vectors, a quantised row's elements from d on."""

    @njit(error_model="numpy")
    def load_q8_0(row, d):
        return load_byte_row(row + d, n)

    @njit(error_model="numpy")
    def load_q4_0(row, d):
        return load_nibble_row(row, d, n)

    return load_q8_0 if type == "q8_0" else load_q4_0


def prefetching(type: str, head_dim: int, n: int, part: int) -> Any:
    """The function ask(p, pages, d): prefetches elements d .. d + part - 1 of n rows.

    p: address of the int32 row indices.

    All parts of a quantised row together include its scales.
    """
    size = kv_row(type, head_dim).itemsize
    n_bytes = min(size, 2 * part)

    @njit(error_model="numpy")
    def ask(p, pages, d):
        prefetch_each(addresses(p, pages + 2 * d, size, n), n_bytes)

    return ask


def loading_each(type: str, head_dim: int) -> Any:
    """The function load(starts, d): elements d .. of rows as floats, a Grid of one row."""
    n_byte = scales_at(type, head_dim)

    @njit(error_model="numpy")
    def load_f16s(starts, d):
        return load_half_each(starts, 2 * d)

    @njit(error_model="numpy")
    def load_q8_0s(starts, d):
        return load_q8_each(starts, d, head_dim)

    @njit(error_model="numpy")
    def load_q4_0s(starts, d):
        return load_q4_each(starts, d, n_byte)

    return {"f16": load_f16s, "q8_0": load_q8_0s, "q4_0": load_q4_0s}[type]


def loading(type: str, head_dim: int, n: int) -> Any:
    """The function load(p, pages, d): loading_each for n rows whose indices are at p."""
    size, load_each = kv_row(type, head_dim).itemsize, loading_each(type, head_dim)

    @njit(error_model="numpy")
    def load(p, pages, d):
        return load_each(addresses(p, pages, size, n), d)

    return load


def loading_one(type: str, head_dim: int) -> Any:
    """The function load(row, d): elements d .. of the row at an address as a float vector."""
    n_byte = scales_at(type, head_dim)

    @njit(error_model="numpy")
    def load_f16s(row, d):
        return load_half(row + 2 * d)

    @njit(error_model="numpy")
    def load_q8_0s(row, d):
        return load_bytes(row + d) * splat_f(load_f16(row + n_byte + d // KV_BLOCK * 2))

    @njit(error_model="numpy")
    def load_q4_0s(row, d):
        return load_nibbles(row, d) * splat_f(load_f16(row + n_byte + d // KV_BLOCK * 2))

    return {"f16": load_f16s, "q8_0": load_q8_0s, "q4_0": load_q4_0s}[type]
