"""Norms of rows: RMS norm and LayerNorm."""

import math

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, block_sum, thread
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, store_f32


def rms_norm(add: int) -> list[Launch]:
    """Kernel of RMS_NORM: each block takes whole rows."""

    def kernel(tid, n_thread, a):
        n_row = load_i64(a.step + STEP.n_tok) * a.rows_per_tok
        source = a.x + 4 * a.x_stride * load_i64(a.step + STEP.row)
        for r in range(tid, n_row, n_thread):
            t, first = r // a.rows_per_tok, a.n * (r % a.rows_per_tok)
            row, out = source + 4 * (a.x_stride * t + first), a.y + 4 * (a.y_stride * t + first)
            squares = float32(0)
            for i in range(thread(), a.n, THREADS):
                squares += load_f32(row + 4 * i) * load_f32(row + 4 * i)
            scale = float32(1) / math.sqrt(block_sum(squares) / float32(a.n) + a.eps)
            for i in range(thread(), a.n, THREADS):
                value = load_f32(row + 4 * i) * scale * load_f32(a.w + 4 * i)
                store_f32(out + 4 * i, value + load_f32(out + 4 * i) if add else value)

    return [Launch(kernel)]


def layer_norm() -> list[Launch]:
    """Kernel of LAYER_NORM: each block takes whole rows."""

    def kernel(tid, n_thread, a):
        n_row = load_i64(a.step + STEP.n_tok) * a.rows_per_tok
        source = a.x + 4 * a.n * a.rows_per_tok * load_i64(a.step + STEP.row)
        for r in range(tid, n_row, n_thread):
            row, out = source + 4 * a.n * r, a.y + 4 * a.n * r
            w, total, squares = a.w + 4 * a.w_step * (r % a.rows_per_tok), float32(0), float32(0)
            for i in range(thread(), a.n, THREADS):
                total += load_f32(row + 4 * i)
            mean = block_sum(total) / float32(a.n)
            for i in range(thread(), a.n, THREADS):
                squares += (load_f32(row + 4 * i) - mean) * (load_f32(row + 4 * i) - mean)
            scale = float32(1) / math.sqrt(block_sum(squares) / float32(a.n) + a.eps)
            for i in range(thread(), a.n, THREADS):
                value = (load_f32(row + 4 * i) - mean) * scale
                if a.w != 0:
                    value *= load_f32(w + 4 * i)
                if a.bias != 0:
                    value += load_f32(a.bias + 4 * i)
                store_f32(out + 4 * i, value)

    return [Launch(kernel)]
