"""Norms of recurrent layers: of queries and keys, and of gated outputs."""

from typing import Any

import numpy as np

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, lane, load_f, splat_f, store_f
from tamis.jit_kernels.cpu.linear.activation import ACTIVATIONS
from tamis.jit_kernels.cpu.linear.norm import normalise, scale_of


def l2_norm() -> Any:
    """Kernel of L2_NORM: threads stride over rows."""

    def kernel(tid, n_thread, a):
        whole = a.n // LANES * LANES
        # 1 / sqrt(sum + eps) is 1 / sqrt(mean + eps / n), divided by sqrt(n).
        root = np.float32(1) / np.sqrt(np.float32(a.n))
        for r in range(tid, load_i64(a.step + STEP.n_tok) * a.rows_per_tok, n_thread):
            row = a.x + 4 * (a.stride * (r // a.rows_per_tok) + a.n * (r % a.rows_per_tok))
            scale = scale_of(row, a.n, a.eps / np.float32(a.n)) * root
            for i in range(0, 4 * whole, 4 * LANES):
                store_f(row + i, load_f(row + i) * splat_f(scale))
            for i in range(4 * whole, 4 * a.n, 4):
                store_f32(row + i, load_f32(row + i) * scale)

    return kernel


def gated_norm(order: str, activation: str) -> Any:
    """Kernel of GATED_NORM: threads stride over rows."""
    function, gate_first = ACTIVATIONS[activation], {"norm": False, "gate": True}[order]

    def kernel(tid, n_thread, a):
        whole = a.n // LANES * LANES
        for r in range(tid, load_i64(a.step + STEP.n_tok) * a.rows_per_tok, n_thread):
            t, j = r // a.rows_per_tok, r % a.rows_per_tok
            row, out, weights = a.x + 4 * a.n * r, a.y + 4 * a.n * r, a.w + 4 * a.w_step * j
            gates = a.z + 4 * (a.z_stride * t + a.n * j)
            if not gate_first:
                normalise(row, weights, out, a.n, a.eps, 0)
                row = out
            for i in range(0, 4 * whole, 4 * LANES):
                store_f(out + i, load_f(row + i) * function(load_f(gates + i)))
            for i in range(4 * whole, 4 * a.n, 4):
                one = lane(function(splat_f(load_f32(gates + i))), 0)
                store_f32(out + i, load_f32(row + i) * one)
            if gate_first:
                normalise(out, weights, out, a.n, a.eps, 0)

    return kernel
