"""Mixture of experts: routing, and the weighted sum of the chosen experts' outputs."""

import math
from typing import Any

from numba import cuda, float32, int32

from tamis.jit_kernels.contract.ops import LEAST_SUM, STEP
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
    load_i32,
    load_i64,
    quotient,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cuda.lang.ptx import exp2, lowest_of_warp, shuffle
from tamis.jit_kernels.cuda.linear.activation import LOG2_E, over_one_plus_exp, softplus
from tamis.jit_kernels.cuda.linear.moe_matmul import moe_matmul

__all__ = ["moe_bias", "moe_groups", "moe_matmul", "moe_route", "moe_sum"]

INFINITY = float("inf")


@device
def next_best(row, n, last):
    """The largest of n float32 after `last` in order, and its index; ties: the lower index.

    last: the previous result; all lanes of a warp call it. If none is left (NaNs do not count) the
    index is n.
    """
    value, number = last
    best, at = float32(-INFINITY), int32(n)
    for i in range(lane(), n, WARP):
        x = load_f32(row + 4 * i)
        if (x < value or (x == value and i > number)) and (at == n or x > best):
            best, at = x, int32(i)
    top = warp_max(best)
    return top, lowest_of_warp(at if best == top else int32(n))


@device
def exponential(x):
    """exp(x)."""
    return exp2(x * float32(LOG2_E))


@device
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return over_one_plus_exp(float32(1), x)


@device
def root_softplus(x):
    """sqrt(log(1 + exp(x)))."""
    return math.sqrt(softplus(x))


@device
def itself(x):
    """Identity: x."""
    return x


# The function of a logit minus the largest, before division by the total: see MOE_ROUTE.
SCORES: dict[str, Any] = {
    "softmax": exponential,
    "sigmoid": sigmoid,
    "softplus": root_softplus,
    "chosen": itself,
}


@device
def drop_groups(keys, n_expert, n_group, n_group_used):
    """Set the keys of all but the n_group_used best groups to the lowest; one lane per group."""
    n, g = n_expert // n_group, lane()
    first, second = float32(-INFINITY), float32(-INFINITY)
    for e in range(n * g, n * min(g + 1, n_group)):
        key = load_f32(keys + 4 * e)
        second = max(second, min(first, key))
        first = max(first, key)
    mine, before = first + second, int32(0)
    for other in range(n_group):
        value = shuffle(mine, other)
        before += int32(value > mine or (value == mine and other < g))
    if g < n_group and before >= n_group_used:
        for e in range(n * g, n * g + n):
            store_f32(keys + 4 * e, float32(-INFINITY))


def moe_route(score: str) -> list[Launch]:
    """Kernel of MOE_ROUTE: warps stride over tokens."""
    score_of, is_softmax, is_chosen = SCORES[score], score == "softmax", score == "chosen"

    def kernel(tid, n_thread, a):
        for t in range(tid * WARPS + warp(), load_i64(a.step + STEP.n_tok), n_thread * WARPS):
            row = a.logits + 4 * a.n_expert * t
            keys = row
            chosen = a.ids + 4 * a.n_used * t
            share = a.weights + 4 * a.n_used * t
            last = float32(INFINITY), int32(-1)
            top, total = float32(0), float32(1)
            if is_softmax or is_chosen:
                top, _ = next_best(row, a.n_expert, last)
            if is_softmax:
                total = float32(0)
                for e in range(lane(), a.n_expert, WARP):
                    total += exponential(load_f32(row + 4 * e) - top)
                total = warp_sum(total)
            if a.keys != 0:
                keys = a.keys + 4 * a.n_expert * t
                for e in range(lane(), a.n_expert, WARP):
                    key = score_of(load_f32(row + 4 * e) - top) / total
                    store_f32(keys + 4 * e, key + load_f32(a.bias + 4 * e) if a.bias != 0 else key)
                cuda.syncwarp()
                if a.n_group > 1:
                    drop_groups(keys, a.n_expert, a.n_group, a.n_group_used)
                    cuda.syncwarp()
            kept = float32(0)
            for s in range(a.n_used):
                if a.tokens != 0:
                    token = load_i32(a.tokens + 4 * t)
                    best = load_i32(a.table + 4 * (a.n_used * token + s))
                else:
                    last = next_best(keys, a.n_expert, last)
                    best = min(last[1], a.n_expert - 1)
                weight = score_of(load_f32(row + 4 * best) - top) / total
                weight = exponential(weight) if is_chosen else weight
                kept += weight
                if lane() == s % WARP:
                    store_i32(chosen + 4 * s, best)
                    store_f32(share + 4 * s, weight)
            scale = float32(a.scale)
            if a.norm != 0 or is_chosen:
                scale /= kept if is_chosen else max(kept, float32(LEAST_SUM))
            for s in range(lane(), a.n_used, WARP):  # what the same lane has written
                store_f32(share + 4 * s, load_f32(share + 4 * s) * scale)

    return [Launch(kernel)]


def moe_bias() -> list[Launch]:
    """Kernel of MOE_BIAS: threads share the elements of all rows."""

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n_used * a.n
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            slot = quotient(i, a.n)
            bias = a.bias + 4 * a.n * load_i32(a.ids + 4 * slot)
            value = load_f32(a.y + 4 * i) + load_f32(bias + 4 * (i - a.n * slot))
            store_f32(a.y + 4 * i, value)

    return [Launch(kernel, blocks=4)]


def moe_groups() -> list[Launch]:
    """Kernel of MOE_GROUPS: each thread takes whole tokens."""

    def kernel(tid, n_thread, a):
        for t in range(tid * THREADS + thread(), load_i64(a.step + STEP.n_tok), n_thread * THREADS):
            logits, all_of_them, total = a.logits + 4 * a.n_expert * t, float32(0), float32(0)
            top = load_f32(logits)
            for i in range(1, a.n_expert):
                top = max(top, load_f32(logits + 4 * i))
            for i in range(a.n_expert):
                all_of_them += exponential(load_f32(logits + 4 * i) - top)
            for s in range(a.n_used):
                group = load_i32(a.ids + 4 * (a.n_chosen * t + s)) // a.n_each
                weight = exponential(load_f32(logits + 4 * group) - top) / all_of_them
                store_i32(a.groups + 4 * (a.n_used * t + s), group)
                store_f32(a.weights + 4 * (a.n_used * t + s), weight)
                total += weight
            for s in range(a.n_used):
                at = a.weights + 4 * (a.n_used * t + s)
                store_f32(at, load_f32(at) / max(total, float32(LEAST_SUM)))

    return [Launch(kernel)]


def moe_sum() -> list[Launch]:
    """Kernel of MOE_SUM: threads share the elements of all rows."""

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            t = quotient(i, a.n)
            value = load_f32(a.y + 4 * i) if a.add != 0 else float32(0)
            row = a.x + 4 * (a.n * (a.n_used - 1) * t + i)
            for s in range(a.n_used):
                weight = load_f32(a.weights + 4 * (a.n_used * t + s))
                value += weight * load_f32(row + 4 * a.n * s)
            store_f32(a.y + 4 * i, value)

    return [Launch(kernel, blocks=4)]
