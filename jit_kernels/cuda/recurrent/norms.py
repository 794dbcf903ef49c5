"""Norms of recurrent layers: of queries and keys, and of gated outputs."""

import math

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    block_sum,
    lane,
    thread,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.recurrent.elementwise import ACTIVATIONS


def l2_norm() -> list[Launch]:
    """Kernel of L2_NORM: warps take rows in turn."""

    def kernel(tid, n_thread, step, x, n, rows_per_tok, stride, eps_f):
        n_row = load_i64(step + STEP.n_tok) * rows_per_tok
        for r in range(tid * WARPS + warp(), n_row, n_thread * WARPS):
            row = x + 4 * (stride * (r // rows_per_tok) + n * (r % rows_per_tok))
            squares = float32(0)
            for i in range(lane(), n, WARP):
                squares += load_f32(row + 4 * i) * load_f32(row + 4 * i)
            scale = float32(1) / math.sqrt(warp_sum(squares) + eps_f)
            for i in range(lane(), n, WARP):
                store_f32(row + 4 * i, load_f32(row + 4 * i) * scale)

    return [Launch(kernel)]


def gated_norm(order: str, activation: str) -> list[Launch]:
    """Kernel of GATED_NORM: each block takes whole rows."""
    function, gate_first = ACTIVATIONS[activation], {"norm": False, "gate": True}[order]

    def kernel(tid, n_thread, step, x, z, w, y, n, rows_per_tok, z_stride, w_step, eps_f):
        n_row = load_i64(step + STEP.n_tok) * rows_per_tok
        for r in range(tid, n_row, n_thread):
            t, j = r // rows_per_tok, r % rows_per_tok
            row, out, weights = x + 4 * n * r, y + 4 * n * r, w + 4 * w_step * j
            gates, squares = z + 4 * (z_stride * t + n * j), float32(0)
            for i in range(thread(), n, THREADS):
                value = load_f32(row + 4 * i)
                if gate_first:
                    value *= function(load_f32(gates + 4 * i))
                squares += value * value
            scale = float32(1) / math.sqrt(block_sum(squares) / float32(n) + eps_f)
            for i in range(thread(), n, THREADS):
                gated = load_f32(row + 4 * i) * function(load_f32(gates + 4 * i))
                store_f32(out + 4 * i, gated * scale * load_f32(weights + 4 * i))

    return [Launch(kernel)]
