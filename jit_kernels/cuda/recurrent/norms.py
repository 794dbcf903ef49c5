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
from tamis.jit_kernels.cuda.linear.activation import ACTIVATIONS


def l2_norm() -> list[Launch]:
    """Kernel of L2_NORM: warps stride over rows."""

    def kernel(tid, n_thread, a):
        n_row = load_i64(a.step + STEP.n_tok) * a.rows_per_tok
        for r in range(tid * WARPS + warp(), n_row, n_thread * WARPS):
            row = a.x + 4 * (a.stride * (r // a.rows_per_tok) + a.n * (r % a.rows_per_tok))
            squares = float32(0)
            for i in range(lane(), a.n, WARP):
                squares += load_f32(row + 4 * i) * load_f32(row + 4 * i)
            scale = float32(1) / math.sqrt(warp_sum(squares) + a.eps)
            for i in range(lane(), a.n, WARP):
                store_f32(row + 4 * i, load_f32(row + 4 * i) * scale)

    return [Launch(kernel)]


def gated_norm(order: str, activation: str) -> list[Launch]:
    """Kernel of GATED_NORM: each block takes whole rows."""
    function, gate_first = ACTIVATIONS[activation], {"norm": False, "gate": True}[order]

    def kernel(tid, n_thread, a):
        n_row = load_i64(a.step + STEP.n_tok) * a.rows_per_tok
        for r in range(tid, n_row, n_thread):
            t, j = r // a.rows_per_tok, r % a.rows_per_tok
            row, out, weights = a.x + 4 * a.n * r, a.y + 4 * a.n * r, a.w + 4 * a.w_step * j
            gates, squares = a.z + 4 * (a.z_stride * t + a.n * j), float32(0)
            for i in range(thread(), a.n, THREADS):
                value = load_f32(row + 4 * i)
                if gate_first:
                    value *= function(load_f32(gates + 4 * i))
                squares += value * value
            scale = float32(1) / math.sqrt(block_sum(squares) / float32(a.n) + a.eps)
            for i in range(thread(), a.n, THREADS):
                gated = load_f32(row + 4 * i) * function(load_f32(gates + 4 * i))
                store_f32(out + 4 * i, gated * scale * load_f32(weights + 4 * i))

    return [Launch(kernel)]
