"""Rows of a Selection of single positions, from bits of a window of positions at a time."""

from typing import Any

from numba import cuda, int32, uint32

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
from tamis.jit_kernels.cuda.lang.ptx import count_bits
from tamis.jit_kernels.cuda.lang.radix_topk import write_word

WORD = 32  # positions a word
WORDS = 4096  # of a window
WINDOW = WORD * WORDS


def add_up(tid, n_thread, a):
    """Kernel that replaces the sizes of a Selection's rows in indptr with the rows' starts."""
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


@device
def mark_range(words, low, high):
    """Set bits low .. high - 1 of a window; the range may be empty."""
    while low < high:
        n, at = min(WORD - low % WORD, high - low), low // WORD
        bits = uint32(uint32(0xFFFFFFFF) >> uint32(WORD - n)) << uint32(low % WORD)
        cuda.atomic.or_(words, at, uint32(bits))  # type: ignore[call-arg]
        low += n


def marked(mark: Any) -> list[Launch]:
    """Kernels that write a Selection: rows' sizes, their sums, their entries.

    mark(a, r, words, first, end) sets a bit j - first, first <= j < end, for each position j of row
    r, by `mark_range`; a block's work. Blocks stride over rows.
    """

    @device
    def mark_window(a, r, words, first, end):
        """Mark a window, and return how many bits a thread's words have, and the words' range."""
        high = min(end, first + WINDOW)
        n_word = (high - first + WORD - 1) // WORD
        share = (n_word + THREADS - 1) // THREADS
        for i in range(thread(), n_word, THREADS):
            words[i] = uint32(0)
        sync_block()
        mark(a, r, words, first, high)
        sync_block()
        mine, begin = int32(0), share * thread()
        stop = min(n_word, begin + share)
        for i in range(begin, stop):
            mine += int32(count_bits(words[i]))
        return mine, begin, stop

    def count(tid, n_thread, a):
        parts, words = cuda.shared.array(WARPS, int32), cuda.shared.array(WORDS, uint32)
        n_rows = (load_i64(a.step + STEP.n_tok) + a.q_block - 1) // a.q_block * a.n_row
        for r in range(tid, n_rows, n_thread):
            mine, end = int32(0), row_end(a, r)
            for first in range(0, end, WINDOW):
                mine += mark_window(a, r, words, first, end)[0]
                sync_block()  # before the next window's bits overwrite what is read here
            _, total = block_before(int32(mine), parts)
            if thread() == 0:
                store_i32(a.indptr + 4 * (r + 1), total)

    def write(tid, n_thread, a):
        parts, words = cuda.shared.array(WARPS, int32), cuda.shared.array(WORDS, uint32)
        n_rows = (load_i64(a.step + STEP.n_tok) + a.q_block - 1) // a.q_block * a.n_row
        for r in range(tid, n_rows, n_thread):
            out, end = a.indices + 4 * load_i32(a.indptr + 4 * r), row_end(a, r)
            for first in range(0, end, WINDOW):
                mine, begin, stop = mark_window(a, r, words, first, end)
                before, total = block_before(int32(mine), parts)
                to = out + 4 * before
                for i in range(begin, stop):
                    to = write_word(to, words[i], first + WORD * i)
                out += 4 * total
                sync_block()  # before the next window's bits overwrite what is read here

    return [Launch(count, blocks=4), Launch(add_up), Launch(write, blocks=4)]
