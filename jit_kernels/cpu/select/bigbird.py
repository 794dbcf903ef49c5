"""BigBird's op: sinks, a window and random blocks."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_i64, store_i32
from tamis.jit_kernels.cpu.select.common import write_ends


@njit(error_model="numpy")
def following(state):
    """The next state of Knuth's 64-bit linear congruential generator (MMIX)."""
    return state * 6364136223846793005 + 1442695040888963407


@njit(error_model="numpy")
def write_random(out, low, high, n, state):
    """Write a uniform sample of n of low .. high - 1, ascending (Knuth's algorithm S)."""
    count = 0
    for b in range(low, high):
        if count == n:
            break
        state = following(state)
        if (state >> 33 & 0x7FFFFFFF) % (high - b) < n - count:
            store_i32(out + 4 * count, b)
            count += 1


def bigbird_select() -> Any:
    """Kernel of BIGBIRD_SELECT. Some ten thousand draws at most: one thread makes them."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        count = 0
        store_i32(a.indptr, 0)
        for qb in range((n_tok + a.q_block - 1) // a.q_block):
            oldest = pos + qb * a.q_block
            newest = pos + min(n_tok, (qb + 1) * a.q_block) - 1
            low = max(0, oldest - a.n_recent + 1) // a.block
            sinks = min(low, a.n_sink)
            n = min(a.n_random, low - sinks)
            for r in range(a.n_row):
                state = following(following((a.seed * a.n_row + r) * 1048583 + oldest // a.block))
                write_ends(a.indices, count, sinks, 0, 0)
                write_random(a.indices + 4 * (count + sinks), sinks, low, n, state)
                count = write_ends(a.indices, count + sinks + n, 0, low, newest // a.block + 1)
                store_i32(a.indptr + 4 * (qb * a.n_row + r + 1), count)

    return kernel
