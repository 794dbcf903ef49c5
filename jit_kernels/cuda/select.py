"""Ops that make Selections: windows."""

from tamis.jit_kernels.cuda.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.intrinsic import load_i64, store_i32
from tamis.jit_kernels.ops import STEP


def select_window() -> list[Launch]:
    """Kernel of SELECT_WINDOW: each block writes whole rows, after the sum of those before."""

    def kernel(tid, n_thread, step, indptr, indices, n_row, q_block, block, n_sink, n_recent):
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        n_q_block = (n_tok + q_block - 1) // q_block
        count = 0  # entries of a row of the query blocks so far
        for qb in range(n_q_block):
            oldest = pos + qb * q_block
            newest = pos + min(n_tok, (qb + 1) * q_block) - 1
            low = max(0, oldest - n_recent + 1) // block if n_recent != 0 else 0
            sinks = min(low, (n_sink + block - 1) // block)
            size = sinks + newest // block + 1 - low
            for r in range(n_row):
                row = qb * n_row + r
                if row % n_thread != tid:
                    continue
                begin = count * n_row + r * size
                for i in range(thread(), size, THREADS):
                    store_i32(indices + 4 * (begin + i), i if i < sinks else low + i - sinks)
                if thread() == 0:
                    store_i32(indptr + 4 * (row + 1), begin + size)
                    if row == 0:
                        store_i32(indptr, 0)
            count += size

    return [Launch(kernel)]
