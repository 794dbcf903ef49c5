"""Routing of a mixture of experts and the sum of what the chosen ones give."""

from typing import Any

import numpy as np

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, load_i64, store_f32, store_i32
from tamis.jit_kernels.cpu.linear.matmul import moe_matmul

__all__ = ["moe_matmul", "moe_route", "moe_sum"]


def moe_route() -> Any:
    """Kernel of MOE_ROUTE: each thread routes whole tokens; ties go to the lower expert."""

    def kernel(tid, n_thread, a):
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            row = a.logits + 4 * a.n_expert * t
            chosen = a.ids + 4 * a.n_used * t
            share = a.weights + 4 * a.n_used * t
            top = load_f32(row)
            for e in range(1, a.n_expert):
                top = max(top, load_f32(row + 4 * e))
            total = np.float32(0)
            for e in range(a.n_expert):
                total += np.exp(load_f32(row + 4 * e) - top)
            kept = np.float32(0)
            for s in range(a.n_used):
                best = -1
                for e in range(a.n_expert):
                    taken = False
                    for before in range(s):
                        taken = taken or load_i32(chosen + 4 * before) == e
                    if not taken and (best < 0 or load_f32(row + 4 * e) > load_f32(row + 4 * best)):
                        best = e
                weight = np.exp(load_f32(row + 4 * best) - top) / total
                store_i32(chosen + 4 * s, best)
                store_f32(share + 4 * s, weight)
                kept += weight
            if a.norm != 0:
                for s in range(a.n_used):
                    store_f32(share + 4 * s, load_f32(share + 4 * s) / kept)

    return kernel


def moe_sum() -> Any:
    """Kernel of MOE_SUM: each thread takes whole tokens."""

    def kernel(tid, n_thread, a):
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            for s in range(a.n_used):
                weight = load_f32(a.weights + 4 * (a.n_used * t + s))
                row = a.x + 4 * a.n * (a.n_used * t + s)
                for i in range(a.n):
                    at = a.y + 4 * (a.n * t + i)
                    store_f32(at, load_f32(at) + weight * load_f32(row + 4 * i))

    return kernel
