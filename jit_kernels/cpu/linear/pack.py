"""Rows prepared for matrix products: normed or gated if asked, then in the products' form.

Few rows become their floats and, for quantised weights, the planes of gemv.py after them; many
become the blocks of the tiles in gemm.py.
"""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import FEW_ROWS, STEP, matmul_scratch
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, lane, load_f, splat_f, store_f
from tamis.jit_kernels.cpu.linear.activation import gelu, silu
from tamis.jit_kernels.cpu.linear.gemm import tiles_of
from tamis.jit_kernels.cpu.linear.gemm_i8 import largest_of
from tamis.jit_kernels.cpu.linear.gemv import ALL_BITS, CHUNK, write_planes
from tamis.jit_kernels.cpu.linear.norm import scale_of
from tamis.jit_kernels.cpu.linear.panel import DEPTH, K_BLOCK, share_of

scratch_of = njit(matmul_scratch)
SHARE = np.float32(3)  # see limit_of; 2 marks twice the blocks for a sixth of the error


@njit(error_model="numpy")
def limit_of(x, n):
    """The limit above which blocks keep all bits, for the largest of their 32 elements."""
    total = np.float32(0)
    for k in range(0, n, DEPTH):
        total += largest_of(x + 4 * k)
    return SHARE * total / np.float32(n // DEPTH)


@njit
def copied(x, other, scale):
    """The elements, unchanged."""
    return x


@njit
def normed(x, other, scale):
    """Elements over their row's root mean square, times weights."""
    return x * scale * other


@njit
def silu_gated(x, other, scale):
    """SiLU of a gate's elements, times the other branch's."""
    return silu(x) * other


@njit
def gelu_gated(x, other, scale):
    """GELU of a gate's elements, times the other branch's."""
    return gelu(x) * other


SOURCES = {"rows": copied, "norm": normed, "silu": silu_gated, "gelu": gelu_gated}


def writer_of(source: str) -> Any:
    """The function write(x, other, n, scale, to): n elements of a source, as floats."""
    value, has_other = SOURCES[source], source != "rows"

    @njit(error_model="numpy")
    def write(x, other, n, scale, to):
        scales, whole = splat_f(scale), n // LANES * LANES
        for i in range(0, whole, LANES):
            left = load_f(x + 4 * i)
            right = load_f(other + 4 * i) if has_other else left
            store_f(to + 4 * i, value(left, right, scales))
        for i in range(whole, n):
            left = splat_f(load_f32(x + 4 * i))
            right = splat_f(load_f32(other + 4 * i)) if has_other else left
            store_f32(to + 4 * i, lane(value(left, right, scales), 0))

    return write


def pack_row(form: str) -> Any:
    """The function pack(x, n, to): one row in the form of pack_rows for few rows."""
    write, quantised = writer_of("rows"), form != "float"

    @njit(error_model="numpy")
    def pack(x, n, to):
        write(x, x, n, np.float32(1), to)
        if quantised:
            whole = n // CHUNK * CHUNK
            write_planes(to, whole, to + 4 * n, (0, whole), ALL_BITS)

    return pack


def pack_gathered(form: str) -> Any:
    """The function pack(x, n, rows, n_row, to, spare): scattered rows of x as blocks.

    rows: the address of int32 [n_row], and a divisor: row i of the blocks is row list[i] // divisor
    of x. spare: n / 8 + 128 bytes.
    """
    tiles = tiles_of(form)
    pack_in_blocks, start_blocks, MR = tiles.pack_row, tiles.start_blocks, tiles.MR
    run_size = tiles.BLOCK * (K_BLOCK // DEPTH)

    @njit(error_model="numpy")
    def pack(x, n, rows, n_row, to, spare):
        slice_size = run_size * ((n_row + MR - 1) // MR)
        for t in range(0, n_row, MR):
            block, n_here = to + run_size * (t // MR), min(MR, n_row - t)
            for k in range(0, n, K_BLOCK):
                n_block = (min(K_BLOCK, n - k) + DEPTH - 1) // DEPTH
                start_blocks(n_block, n_here, block + slice_size * (k // K_BLOCK))
            for i in range(n_here):
                row = load_i32(rows[0] + 4 * (t + i)) // rows[1]
                pack_in_blocks(x + 4 * n * row, n, block, slice_size, i, spare)

    return pack


def pack_rows(form: str, source: str) -> Any:
    """Kernel of PACK_ROWS: threads share the chunks of few rows, or take blocks of MR rows."""
    tiles = tiles_of(form)
    pack_in_blocks, start_blocks, size, MR = (
        tiles.pack_row,
        tiles.start_blocks,
        tiles.BLOCK,
        tiles.MR,
    )
    write, quantised = writer_of(source), form != "float"
    may_shorten = form == "bytes"
    is_norm, as_is, other_rows = source == "norm", source == "rows", source in ("silu", "gelu")

    @njit(error_model="numpy")
    def row_scale(row, n, eps):
        return scale_of(row, n, eps) if is_norm else np.float32(1)

    @njit(error_model="numpy")
    def pack_few(share, row, other, n, eps, to, is_short):
        first, last = share
        scale, skip = row_scale(row, n, eps), 4 * first
        write(row + skip, other + skip, last - first, scale, to + skip)
        if quantised:
            whole = n // CHUNK * CHUNK
            limit = limit_of(to, whole) if is_short else ALL_BITS
            write_planes(to, whole, to + 4 * n, (first, min(last, whole)), limit)

    @njit(error_model="numpy")
    def pack_block(a, x, other, n_row, block, slice_size, scratch):
        """Pack rows of x; `other` has rows at the same distance, or one row for all."""
        n, eps = a.n, a.eps
        floats, spare, apart = scratch, scratch + 4 * n, 4 * n if other_rows else 0
        for k in range(0, n, K_BLOCK):
            n_block = (min(K_BLOCK, n - k) + DEPTH - 1) // DEPTH
            start_blocks(n_block, n_row, block + slice_size * (k // K_BLOCK))
        for i in range(n_row):
            at = x + 4 * n * i
            if not as_is:
                write(at, other + apart * i, n, row_scale(at, n, eps), floats)
                at = floats
            pack_in_blocks(at, n, block, slice_size, i, spare)

    def kernel(tid, n_thread, a):
        n_tok, mine = load_i64(a.step + STEP.n_tok), a.scratch + tid * scratch_of(a.n)
        row, apart = 4 * a.n, 4 * a.n if other_rows else 0
        x = a.x + row * load_i64(a.step + STEP.row)
        other = a.other + apart * load_i64(a.step + STEP.row)
        if n_tok <= FEW_ROWS:
            is_short = may_shorten and 0 < load_i64(a.step + STEP.exact_rows) < n_tok
            # If a limit covers a whole row, threads share the rows.
            share = (0, a.n) if is_short else share_of(tid, n_thread, a.n, CHUNK)
            first, apart_in_turn = (tid, n_thread) if is_short else (0, 1)
            for t in range(first, n_tok, apart_in_turn):
                at = x + row * t, other + apart * t
                pack_few(share, at[0], at[1], a.n, a.eps, a.packed + 2 * row * t, is_short)
            return
        run_size = size * (K_BLOCK // DEPTH)
        slice_size = run_size * ((n_tok + MR - 1) // MR)
        for t in range(MR * tid, n_tok, MR * n_thread):
            block, n_row = a.packed + run_size * (t // MR), min(MR, n_tok - t)
            at = x + row * t, other + apart * t
            pack_block(a, at[0], at[1], n_row, block, slice_size, mine)

    return kernel
