"""Root mean square norm of rows."""

import math

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, block_sum, thread
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, store_f32


def rms_norm(add: int) -> list[Launch]:
    """Kernel of RMS_NORM: each block takes whole rows."""

    def kernel(tid, n_thread, a):
        n_row = load_i64(a.step + STEP.n_tok) * a.rows_per_tok
        source = a.x + 4 * a.n * a.rows_per_tok * load_i64(a.step + STEP.row)
        for r in range(tid, n_row, n_thread):
            row, out = source + 4 * a.n * r, a.y + 4 * a.n * r
            squares = float32(0)
            for i in range(thread(), a.n, THREADS):
                squares += load_f32(row + 4 * i) * load_f32(row + 4 * i)
            scale = float32(1) / math.sqrt(block_sum(squares) / float32(a.n) + a.eps)
            for i in range(thread(), a.n, THREADS):
                value = load_f32(row + 4 * i) * scale * load_f32(a.w + 4 * i)
                store_f32(out + 4 * i, value + load_f32(out + 4 * i) if add else value)

    return [Launch(kernel)]
