"""BigBird's op: sinks, a window and random blocks."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_i64, store_i32
from tamis.jit_kernels.cpu.select.common import write_ends


@njit(error_model="numpy")
def following(state):
    """Knuth's 64-bit linear congruential generator (MMIX)."""
    return state * 6364136223846793005 + 1442695040888963407


@njit(error_model="numpy")
def write_random(out, low, high, n, state):
    """Write n of low .. high - 1, ascending, each set as likely as any other (algorithm S)."""
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

    def kernel(
        tid, n_thread, step, indptr, indices, n_row, q_block, block, n_sink, n_recent, n_random,
        seed,
    ):  # fmt: skip
        if tid != 0:
            return
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        count = 0
        store_i32(indptr, 0)
        for qb in range((n_tok + q_block - 1) // q_block):
            oldest = pos + qb * q_block
            newest = pos + min(n_tok, (qb + 1) * q_block) - 1
            low = max(0, oldest - n_recent + 1) // block
            sinks = min(low, n_sink)
            n = min(n_random, low - sinks)
            for r in range(n_row):
                state = following(following((seed * n_row + r) * 1048583 + oldest // block))
                write_ends(indices, count, sinks, 0, 0)
                write_random(indices + 4 * (count + sinks), sinks, low, n, state)
                count = write_ends(indices, count + sinks + n, 0, low, newest // block + 1)
                store_i32(indptr + 4 * (qb * n_row + r + 1), count)

    return kernel
