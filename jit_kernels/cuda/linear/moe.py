"""Routing of a mixture of experts and the sum of what the chosen ones give."""

from numba import float32, int32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    thread,
    warp,
    warp_max,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_i64,
    quotient,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cuda.lang.ptx import exp2, lowest_of_warp
from tamis.jit_kernels.cuda.linear.activation import LOG2_E
from tamis.jit_kernels.cuda.linear.moe_matmul import moe_matmul

__all__ = ["moe_matmul", "moe_route", "moe_sum"]

INFINITY = float("inf")


@device
def next_best(row, n, last):
    """The largest of n float32 and its number, of those after `last`: ties go to the lower one.

    last: the same of the one before; all lanes of a warp call it. Where none is left (of what is
    not a number, none is) the number is n.
    """
    value, number = last
    best, at = float32(-INFINITY), int32(n)
    for i in range(lane(), n, WARP):
        x = load_f32(row + 4 * i)
        if (x < value or (x == value and i > number)) and (at == n or x > best):
            best, at = x, int32(i)
    top = warp_max(best)
    return top, lowest_of_warp(at if best == top else int32(n))


def moe_route() -> list[Launch]:
    """Kernel of MOE_ROUTE: warps take tokens in turn."""

    def kernel(tid, n_thread, a):
        for t in range(tid * WARPS + warp(), load_i64(a.step + STEP.n_tok), n_thread * WARPS):
            row = a.logits + 4 * a.n_expert * t
            chosen = a.ids + 4 * a.n_used * t
            share = a.weights + 4 * a.n_used * t
            last = float32(INFINITY), int32(-1)
            top, _ = next_best(row, a.n_expert, last)
            total = float32(0)
            for e in range(lane(), a.n_expert, WARP):
                total += exp2((load_f32(row + 4 * e) - top) * float32(LOG2_E))
            total, kept = warp_sum(total), float32(0)
            for s in range(a.n_used):
                last = next_best(row, a.n_expert, last)
                weight = exp2((last[0] - top) * float32(LOG2_E)) / total
                kept += weight
                if lane() == s % WARP:
                    store_i32(chosen + 4 * s, min(last[1], a.n_expert - 1))
                    store_f32(share + 4 * s, weight)
            if a.norm != 0:
                for s in range(lane(), a.n_used, WARP):  # what the same lane has written
                    store_f32(share + 4 * s, load_f32(share + 4 * s) / kept)

    return [Launch(kernel)]


def moe_sum() -> list[Launch]:
    """Kernel of MOE_SUM: threads share the elements of all rows."""

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            t = quotient(i, a.n)
            value, row = load_f32(a.y + 4 * i), a.x + 4 * (a.n * (a.n_used - 1) * t + i)
            for s in range(a.n_used):
                weight = load_f32(a.weights + 4 * (a.n_used * t + s))
                value += weight * load_f32(row + 4 * a.n * s)
            store_f32(a.y + 4 * i, value)

    return [Launch(kernel, blocks=4)]
