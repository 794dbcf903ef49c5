"""Matrix products for many rows of activations: tiles over weights that are decoded once a call.

Activations are packed once, in blocks of MR rows: K_BLOCK elements of all rows, then the next ones,
since rows a power of two apart would conflict in a cache. A thread decodes a group of weight rows,
K_BLOCK elements at a time, into panels and multiplies them with all blocks (Goto and van de Geijn
2008, doi 10.1145/1356052.1356053). An element's sum runs over k in order, whatever tile it falls
in.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import (
    PACKED_ROWS,
    PANEL_SCRATCH,
    STRIP,
    STRIP_TYPES,
    packed_form,
    strip_block,
)
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, store_f32
from tamis.jit_kernels.cpu.lang.simd import CPU, LANES, load_f, prefetch, store_f
from tamis.jit_kernels.cpu.linear import gemm_f32, gemm_i8, gemm_i16
from tamis.jit_kernels.cpu.linear.dequant import decode_of, row_bytes_of
from tamis.jit_kernels.cpu.linear.interleaved import OF_TYPE
from tamis.jit_kernels.cpu.linear.panel import DEPTH, K_BLOCK, NR, ROW, clear

zero = np.float32(0)
GROUP = 4  # panels of K_BLOCK that are multiplied with a block one after another


class Operands(NamedTuple):
    """The operands of a product: addresses, and numbers of elements."""

    packed: int  # n_row rows of x as PACK_ROWS leaves them
    n_row: int
    w: int  # n_out rows of n_in weights
    bias: int  # f32 [n_out], or 0
    y: int
    n_in: int
    n_out: int
    y_stride: int  # elements from one row of y to the next
    add: int  # 1: adds to y


def tiles_of(form: str) -> ModuleType:
    """The module of tiles for a form of packed rows.

    Float weights need all bits of the activations: integers are for quantised ones.
    """
    if form == "bytes" and CPU.fused:
        return gemm_i8
    return gemm_i16 if form != "float" and CPU.vnni else gemm_f32


@njit(error_model="numpy")
def copy_part(source, source_stride, to, to_stride, n_row, n_col):
    """Copy n_row rows of n_col floats; strides in bytes."""
    whole = n_col // LANES * LANES
    for i in range(n_row):
        for j in range(0, whole, LANES):
            store_f(to + to_stride * i + 4 * j, load_f(source + source_stride * i + 4 * j))
        for j in range(whole, n_col):
            store_f32(to + to_stride * i + 4 * j, load_f32(source + source_stride * i + 4 * j))


@njit(error_model="numpy")
def start_rows(y, stride, n_tok, n, bias, add):
    """Set n columns of y to the bias or zero; add: keep the values, plus the bias."""
    if add != 0 and bias == 0:
        return
    for t in range(n_tok):
        row = y + stride * t
        for j in range(n):
            value = load_f32(row + 4 * j) if add != 0 else zero
            if bias != 0:
                value += load_f32(bias + 4 * j)
            store_f32(row + 4 * j, value)


def panels_of(type: str, tiles: ModuleType) -> Any:
    """The function that dequantizes elements k .. k + n of n_row rows of w from r on into panels.

    decode_panels(a, r, n_row, k, n, rows, panels), a: Operands. It returns the number of panels.
    """
    decode, row_bytes, pack_panel = decode_of(type), row_bytes_of(type), tiles.pack_panel
    size = tiles.PANEL

    @njit(error_model="numpy")
    def decode_panels(a, r, n_row, k, n, rows, panels):
        n_panel = (n + DEPTH - 1) // DEPTH
        for i in range(NR):
            row = rows + ROW * i
            if i >= n_row or n < DEPTH * n_panel:
                clear(row, 4 * DEPTH * n_panel)
            if i < n_row:
                decode(a.w + row_bytes(a.n_in) * (r + i) + row_bytes(k), n, row)
        for i in range(n_panel):
            pack_panel(rows + 4 * DEPTH * i, panels + size * i)
        return n_panel

    return decode_panels


def panels_of_strips(type: str, tiles: ModuleType) -> Any:
    """The same function for interleaved weights: r is a multiple of STRIP, n of 32, n_row of STRIP.

    It prefetches the weights that are multiplied after these.
    """
    write, block, size = tiles.strip_writer(type), OF_TYPE[type].block, strip_block(type)
    panel_size, n_strip = tiles.PANEL, NR // STRIP

    @njit(error_model="numpy")
    def decode_panels(a, r, n_row, k, n, rows, panels):
        strip_size, part = a.n_in // block * STRIP * size, STRIP * size
        for s in range(n_row // STRIP):
            next = a.w + strip_size * (r // STRIP + s) + part * ((k + n) // block)
            for line in range(0, part * n // block, 64):
                prefetch(next + line)
        for i in range(n // DEPTH):
            panel = panels + panel_size * i
            if n_row < NR:
                clear(panel, panel_size)
            for s in range(n_strip):
                if STRIP * s < n_row:
                    strip = a.w + strip_size * (r // STRIP + s)
                    write(strip, k + DEPTH * i, panel, STRIP * s, rows)
        return n // DEPTH

    return decode_panels


def gemm_of(type: str) -> Any:
    """The function that multiplies ranges of weight rows and of rows of x, for one ggml type.

    gemm(a, columns, rows_of_x, scratch), a: Operands: computes y's columns first .. last - 1 and
    its rows `rows_of_x`, a pair whose first is a multiple of the tiles' MR; scratch: PANEL_SCRATCH.
    """
    tiles = tiles_of(packed_form(type))
    in_strips = STRIP_TYPES.get(type)
    decode_panels = panels_of_strips(in_strips, tiles) if in_strips else panels_of(type, tiles)
    add_tiles, MR = tiles.tiles_of(in_strips), tiles.MR
    in_turn = MR * tiles.IN_TURN
    panel_size, run_size = tiles.PANEL, tiles.BLOCK * (K_BLOCK // DEPTH)
    group_size = K_BLOCK // DEPTH * panel_size
    assert GROUP * group_size + NR * ROW + 4 * MR * NR + 64 <= PANEL_SCRATCH
    assert tiles.BLOCK <= 4 * DEPTH * MR  # packed_bytes relies on it
    assert MR <= PACKED_ROWS

    @njit(error_model="numpy")
    def add_panels(panels, block, n, at, n_row, n_col, spare):
        """Add the products of n panels and blocks to n_row x n_col sums; at: y and its stride."""
        y, stride = at
        whole, row = n_row == MR and n_col == NR, 4 * NR
        to, to_stride = (y, stride) if whole else (spare, row)
        if not whole:
            clear(spare, row * MR)
            copy_part(y, stride, spare, row, n_row, n_col)
        add_tiles(panels, block, n, to, to_stride)
        if not whole:
            copy_part(spare, row, y, stride, n_row, n_col)

    @njit(error_model="numpy")
    def gemm(a, columns, rows_of_x, scratch):
        groups = (scratch + 63) // 64 * 64
        rows = groups + GROUP * group_size
        spare = rows + NR * ROW
        slice_size = run_size * ((a.n_row + MR - 1) // MR)
        first_row, last_row = rows_of_x
        (first, last), y_stride = columns, 4 * a.y_stride
        for r in range(first, last, GROUP * NR):
            n_col, bias_at = min(last - r, GROUP * NR), a.bias + 4 * r if a.bias != 0 else 0
            start_at = a.y + y_stride * first_row + 4 * r
            start_rows(start_at, y_stride, last_row - first_row, n_col, bias_at, a.add)
            for k in range(0, a.n_in, K_BLOCK):
                n, n_panel = min(K_BLOCK, a.n_in - k), 0
                blocks = a.packed + slice_size * (k // K_BLOCK)
                for c in range(0, n_col, NR):
                    panels = groups + group_size * (c // NR)
                    n_row = min(NR, n_col - c)
                    n_panel = decode_panels(a, r + c, n_row, k, n, rows, panels)
                for start in range(first_row, last_row, in_turn):
                    for c in range(0, n_col, NR):
                        panels, n_left = groups + group_size * (c // NR), min(NR, n_col - c)
                        for t in range(start, min(start + in_turn, last_row), MR):
                            block = blocks + run_size * (t // MR)
                            at = a.y + y_stride * t + 4 * (r + c), y_stride
                            n_row = min(MR, last_row - t)
                            add_panels(panels, block, n_panel, at, n_row, n_left, spare)

    return gemm
