"""Matrix products for many rows of activations: float32 tiles over weights decoded once a call.

A thread decodes a group of weight rows, K_BLOCK elements at a time, into panels of [k][NR] and
multiplies them with all activations, MR rows a register tile (Goto and van de Geijn 2008,
doi 10.1145/1356052.1356053). An element's sum runs over k in order, whatever tile it falls in.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.datamodel import models
from numba.extending import register_model

from tamis.jit_kernels.cpu.decode import decode_of, row_bytes_of
from tamis.jit_kernels.cpu.intrinsic import (
    FLOAT,
    I64,
    int64,
    load_f32,
    op,
    pointer,
    store_f32,
    void,
)
from tamis.jit_kernels.cpu.simd import (
    CPU,
    LANES,
    const,
    fused,
    load_f,
    shuffled,
    splatted,
    store_f,
    vf,
    zero_f,
)
from tamis.jit_kernels.ops import PANEL_SCRATCH

NV = 2  # vectors of weight rows in a tile
NR = NV * LANES
# The sums, a row of weights and a broadcast fill the registers: 32 of 512 bits, 16 of 256.
MR = 14 if CPU.avx512 else 6
K_BLOCK = 256  # elements decoded together: the longest block of a ggml type
UNROLL = 4
zero = np.float32(0)
GROUP = 4  # panels that share a packed tile of activations
# Bytes from one packed row of activations to the next; the extra keeps rows in different sets of
# the cache.
X_STRIDE = 4 * (K_BLOCK + LANES)
PANEL = 4 * K_BLOCK * NR
SPARE_ROW = 4 * (K_BLOCK + LANES)  # a decoded row
SCRATCH = GROUP * PANEL + NR * SPARE_ROW + MR * X_STRIDE + 4 * MR * NR + 64
assert SCRATCH <= PANEL_SCRATCH


class Tile(types.Type):
    """The Numba type of a register tile: an LLVM array of MR * NV vectors."""

    def __init__(self) -> None:
        super().__init__(name=f"tile_{MR}x{NR}")


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, tile: Tile) -> None:
        super().__init__(manager, tile, TILE_IR)


VECTOR, TILE_IR = vf.ir, ir.ArrayType(vf.ir, MR * NV)
tile = Tile()


def _at(b: Any, address: Any, n_bytes: int, kind: Any) -> Any:
    return pointer(b, b.add(address, ir.Constant(I64, n_bytes)), kind)


@op(tile)
def zero_tile(b: Any) -> Any:
    """All sums zero."""
    return ir.Constant(TILE_IR, [const(VECTOR, 0.0)] * (MR * NV))


@op(tile, tile, int64, int64)
def multiply(b: Any, sums: Any, panel: Any, x: Any) -> Any:
    """Add UNROLL values of k: panel f32 [UNROLL, NR] times x, MR rows X_STRIDE bytes apart."""
    cells = [b.extract_value(sums, i) for i in range(MR * NV)]
    for k in range(UNROLL):
        offsets = [4 * (k * NR + j * LANES) for j in range(NV)]
        w = [b.load(_at(b, panel, offset, VECTOR), align=64) for offset in offsets]
        for i in range(MR):
            value = b.load(_at(b, x, X_STRIDE * i + 4 * k, FLOAT), align=4)
            xs = splatted(b, value, LANES)
            for j in range(NV):
                cells[NV * i + j] = fused(b, w[j], xs, cells[NV * i + j])
    for i, cell in enumerate(cells):
        sums = b.insert_value(sums, cell, i)
    return sums


@op(void, tile, int64, int64)
def add_tile(b: Any, sums: Any, y: Any, stride: Any) -> None:
    """Add the tile to MR rows of y, `stride` bytes apart."""
    for i in range(MR):
        row = b.add(y, b.mul(stride, I64(i)))
        for j in range(NV):
            at = _at(b, row, 4 * LANES * j, VECTOR)
            total = b.fadd(b.load(at, align=4), b.extract_value(sums, NV * i + j))
            b.store(total, at, align=4)


@op(void, int64, int64, int64, int64)
def transpose(b: Any, source: Any, source_stride: Any, out: Any, out_stride: Any) -> None:
    """Transpose LANES x LANES float32; strides in bytes."""
    addresses = [b.add(source, b.mul(source_stride, I64(i))) for i in range(LANES)]
    rows = [b.load(pointer(b, at, VECTOR), align=4) for at in addresses]
    step = LANES // 2
    while step:  # swap the off-diagonal squares of `step` lanes, then inside all squares
        for i in (i for i in range(LANES) if not i & step):
            x, y = rows[i], rows[i + step]
            upper = [n if not n & step else LANES + n - step for n in range(LANES)]
            lower = [n + step if not n & step else LANES + n for n in range(LANES)]
            rows[i], rows[i + step] = shuffled(b, x, y, upper), shuffled(b, x, y, lower)
        step //= 2
    for i, row in enumerate(rows):
        b.store(row, pointer(b, b.add(out, b.mul(out_stride, I64(i))), VECTOR), align=4)


@njit(error_model="numpy")
def clear_floats(p, n):
    """Set n floats, a multiple of LANES, to zero."""
    for i in range(0, n, LANES):
        store_f(p + 4 * i, zero_f())


@njit(error_model="numpy")
def pack_x(x, stride, n_row, n, out):
    """Copy n_row rows of n floats to rows of X_STRIDE bytes; the rest of MR rows is zero."""
    whole = n // LANES * LANES
    for i in range(MR):
        to, row = out + X_STRIDE * i, x + stride * i
        if i >= n_row:
            clear_floats(to, K_BLOCK)
            continue
        for k in range(0, whole, LANES):
            store_f(to + 4 * k, load_f(row + 4 * k))
        if whole < n:
            store_f(to + 4 * whole, zero_f())
            for k in range(whole, n):
                store_f32(to + 4 * k, load_f32(row + 4 * k))


@njit(error_model="numpy")
def pack_panel(rows, n, panel):
    """Turn NR decoded rows of n floats into [k][NR], k a multiple of LANES."""
    for k in range(0, n, LANES):
        for j in range(NV):
            at = panel + 4 * (NR * k + LANES * j)
            transpose(rows + SPARE_ROW * LANES * j + 4 * k, SPARE_ROW, at, 4 * NR)


@njit(error_model="numpy")
def multiply_panel(panel, x, n):
    """The tile of n (a multiple of UNROLL) values of k."""
    sums = zero_tile()
    for k in range(0, n, UNROLL):
        sums = multiply(sums, panel + 4 * NR * k, x + 4 * k)
    return sums


@njit(error_model="numpy")
def add_part(sums, spare, y, stride, n_row, n_col):
    """Add the first n_row x n_col sums of a tile to y."""
    clear_floats(spare, MR * NR)
    add_tile(sums, spare, 4 * NR)
    for i in range(n_row):
        for j in range(n_col):
            at = y + stride * i + 4 * j
            store_f32(at, load_f32(at) + load_f32(spare + 4 * (NR * i + j)))


@njit(error_model="numpy")
def start_rows(y, stride, n_tok, n, bias, add):
    """Set n columns of y to the bias or zero; add: keep what is there, plus the bias."""
    if add != 0 and bias == 0:
        return
    for t in range(n_tok):
        row = y + stride * t
        for j in range(n):
            value = load_f32(row + 4 * j) if add != 0 else zero
            if bias != 0:
                value += load_f32(bias + 4 * j)
            store_f32(row + 4 * j, value)


def gemm_of(type: str) -> Any:
    """The function that multiplies a range of weight rows with all rows of x, for one ggml type.

    gemm(w, n_in, first, last, x, n_tok, y, y_stride, bias, add, scratch): y's columns first..last;
    w and bias start at row 0; y_stride in bytes; scratch: PANEL_SCRATCH bytes.
    """
    decode, row_bytes = decode_of(type), row_bytes_of(type)

    @njit(error_model="numpy")
    def decode_panel(w, n_in, r, n_row, k, n, rows, panel):
        """Decode elements k .. k + n of n_row rows from r on into a panel."""
        padded = (n + LANES - 1) // LANES * LANES
        for i in range(NR):
            row = rows + SPARE_ROW * i
            if i >= n_row:
                clear_floats(row, padded)
            else:
                if padded > n:
                    store_f(row + 4 * (padded - LANES), zero_f())
                decode(w + row_bytes(n_in) * (r + i) + row_bytes(k), n, row)
        pack_panel(rows, padded, panel)
        return padded

    @njit(error_model="numpy")
    def gemm(w, n_in, first, last, x, n_tok, y, y_stride, bias, add, scratch):
        panels = (scratch + 63) // 64 * 64
        rows = panels + GROUP * PANEL
        xs = rows + NR * SPARE_ROW
        spare = xs + MR * X_STRIDE
        for r in range(first, last, GROUP * NR):
            n_col = min(last - r, GROUP * NR)
            start_rows(y + 4 * r, y_stride, n_tok, n_col, bias + 4 * r if bias != 0 else 0, add)
            for k in range(0, n_in, K_BLOCK):
                n = min(K_BLOCK, n_in - k)
                padded = n
                for c in range(0, n_col, NR):
                    panel = panels + PANEL * (c // NR)
                    padded = decode_panel(w, n_in, r + c, min(NR, n_col - c), k, n, rows, panel)
                for t in range(0, n_tok, MR):
                    n_row = min(MR, n_tok - t)
                    pack_x(x + 4 * (n_in * t + k), 4 * n_in, n_row, n, xs)
                    for c in range(0, n_col, NR):
                        sums = multiply_panel(panels + PANEL * (c // NR), xs, padded)
                        at = y + y_stride * t + 4 * (r + c)
                        if n_row == MR and n_col - c >= NR:
                            add_tile(sums, at, y_stride)
                        else:
                            add_part(sums, spare, at, y_stride, n_row, min(NR, n_col - c))

    return gemm
