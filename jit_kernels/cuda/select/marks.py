"""Rows of a Selection of single positions, from marks of a window of positions at a time."""

from typing import Any

from numba import cuda, int32, uint8

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARPS,
    Launch,
    block_before,
    sync_block,
    thread,
)
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_i32, load_i64, store_i32

WINDOW = 1 << 14  # positions, a byte each
SHARE = WINDOW // THREADS


def add_up(tid, n_thread, a):
    """Kernel that makes of a Selection's sizes of rows, which indptr has, where they begin."""
    if tid != 0:
        return
    parts, begin = cuda.shared.array(WARPS, int32), 0
    n_rows = (load_i64(a.step + STEP.n_tok) + a.q_block - 1) // a.q_block * a.n_row
    for first in range(0, n_rows, THREADS):
        r = first + thread()
        mine = load_i32(a.indptr + 4 * (r + 1)) if r < n_rows else 0
        before, total = block_before(int32(mine), parts)
        if r < n_rows:
            store_i32(a.indptr + 4 * (r + 1), begin + before + mine)
        begin += total
    if thread() == 0:
        store_i32(a.indptr, 0)


@device
def row_end(a, r):
    """The position after a row's last query."""
    n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
    return pos + min(n_tok, (r // a.n_row + 1) * a.q_block)


def marked(mark: Any) -> list[Launch]:
    """Kernels that write a Selection: rows' sizes, their sums, their entries.

    mark(a, r, marks, first, end) sets those of marks[j - first], first <= j < end, that row r has;
    a block's work. Blocks stride over rows.
    """

    @device
    def mark_window(a, r, marks, first, end):
        for i in range(thread(), WINDOW, THREADS):
            marks[i] = uint8(0)
        sync_block()
        mark(a, r, marks, first, min(end, first + WINDOW))
        sync_block()
        mine = int32(0)
        for i in range(SHARE * thread(), SHARE * (thread() + 1)):
            mine += int32(marks[i])
        return mine

    def count(tid, n_thread, a):
        parts, marks = cuda.shared.array(WARPS, int32), cuda.shared.array(WINDOW, uint8)
        n_rows = (load_i64(a.step + STEP.n_tok) + a.q_block - 1) // a.q_block * a.n_row
        for r in range(tid, n_rows, n_thread):
            mine, end = int32(0), row_end(a, r)
            for first in range(0, end, WINDOW):
                mine += mark_window(a, r, marks, first, end)
                sync_block()  # before the next window's marks overwrite what is read here
            _, total = block_before(int32(mine), parts)
            if thread() == 0:
                store_i32(a.indptr + 4 * (r + 1), total)

    def write(tid, n_thread, a):
        parts, marks = cuda.shared.array(WARPS, int32), cuda.shared.array(WINDOW, uint8)
        n_rows = (load_i64(a.step + STEP.n_tok) + a.q_block - 1) // a.q_block * a.n_row
        for r in range(tid, n_rows, n_thread):
            out, end = a.indices + 4 * load_i32(a.indptr + 4 * r), row_end(a, r)
            for first in range(0, end, WINDOW):
                mine = mark_window(a, r, marks, first, end)
                before, total = block_before(int32(mine), parts)
                to = out + 4 * before
                for i in range(SHARE * thread(), SHARE * (thread() + 1)):
                    if marks[i] != 0:
                        store_i32(to, first + i)
                        to += 4
                out += 4 * total
                sync_block()  # before the next window's marks overwrite what is read here

    return [Launch(kernel) for kernel in (count, add_up, write)]
