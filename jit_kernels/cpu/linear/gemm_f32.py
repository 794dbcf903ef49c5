"""Tiles of float32, for CPUs that multiply pairs of int16 no faster.

A block is f32 [MR, DEPTH], a panel f32 [DEPTH, NR].
"""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import STRIP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, store_f32
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_outer,
    load_grid,
    load_row,
    store_grid,
)
from tamis.jit_kernels.cpu.lang.simd import LANES, load_f, load_f32x16, store_f, store_f32x16
from tamis.jit_kernels.cpu.linear.interleaved import decoder_of
from tamis.jit_kernels.cpu.linear.panel import (
    DEPTH,
    MR,
    NV,
    WORD_ROW,
    block_at,
    clear,
    transpose_words,
)

X_ROW = 4 * DEPTH
BLOCK, PANEL = MR * X_ROW, DEPTH * WORD_ROW  # bytes
IN_TURN = 1  # blocks that a panel is multiplied with one after another


@njit(error_model="numpy")
def pack_row(x, n, blocks, slice_size, i, spare):
    """Write row i of the blocks of n floats, padded with zeros."""
    for first in range(0, n, DEPTH):
        row = block_at(blocks, slice_size, first, BLOCK) + X_ROW * i
        at, rest = x + 4 * first, min(DEPTH, n - first)
        whole = rest // LANES * LANES
        if whole < DEPTH:
            clear(row, X_ROW)
        for k in range(0, whole, LANES):
            store_f(row + 4 * k, load_f(at + 4 * k))
        for k in range(whole, rest):
            store_f32(row + 4 * k, load_f32(at + 4 * k))


@njit(error_model="numpy")
def start_blocks(n_block, n_row, block):
    """Write zeros where n_row rows do not fill the blocks."""
    if n_row < MR:
        clear(block, n_block * BLOCK)


@njit(error_model="numpy")
def pack_panel(rows, panel):
    """Write the panel of NR decoded rows, ROW bytes apart, which may be overwritten."""
    for k in range(0, DEPTH, LANES):
        transpose_words(rows + 4 * k, panel + WORD_ROW * k)


def strip_writer(type: str) -> Any:
    """The function write(strip, k, panel, first, spare): STRIP of a panel's rows, from `first` on.

    It writes elements k .. k + DEPTH of a strip; spare: 2560 bytes.
    """
    decode = decoder_of(type)

    @njit(error_model="numpy")
    def write(strip, k, panel, first, spare):
        decode(strip, k, spare, spare + 4 * STRIP * DEPTH)
        for i in range(DEPTH):
            store_f32x16(panel + WORD_ROW * i + 4 * first, load_f32x16(spare + 4 * STRIP * i))

    return write


def tiles_of(type: str | None) -> Any:
    """The function add(panels, blocks, n, y, stride), which adds n products at y.

    They are MR rows of NR floats.
    """

    @njit(error_model="numpy")
    def add_tile(panel, block, y, stride):
        sums = load_grid(y, stride, MR, NV)
        for k in range(DEPTH):
            sums = add_outer(sums, block + 4 * k, X_ROW, load_row(panel + WORD_ROW * k, NV))
        store_grid(y, stride, sums)

    @njit(error_model="numpy")
    def add_tiles(panels, blocks, n, y, stride):
        for i in range(n):
            add_tile(panels + PANEL * i, blocks + BLOCK * i, y, stride)

    return add_tiles
