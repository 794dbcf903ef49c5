"""Routing of a mixture of experts and the sum of the chosen experts' outputs."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import LEAST_SUM, STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, load_i64, store_f32, store_i32
from tamis.jit_kernels.cpu.linear.activation import softplus
from tamis.jit_kernels.cpu.linear.moe_matmul import moe_matmul

__all__ = ["moe_bias", "moe_groups", "moe_matmul", "moe_route", "moe_sum"]


@njit(error_model="numpy")
def exponential(x):
    """exp(x) of a float32."""
    return np.exp(x)


@njit(error_model="numpy")
def sigmoid(x):
    """1 / (1 + exp(-x)) of a float32."""
    return np.float32(1) / (np.float32(1) + np.exp(-x))


@njit(error_model="numpy")
def root_softplus(x):
    """sqrt(log(1 + exp(x))) of a float32."""
    return np.sqrt(softplus(x))


@njit(error_model="numpy")
def itself(x):
    """The argument, unchanged."""
    return x


# The function of a logit minus the largest, before division by the total: see MOE_ROUTE.
SCORES: dict[str, Any] = {
    "softmax": exponential,
    "sigmoid": sigmoid,
    "softplus": root_softplus,
    "chosen": itself,
}


@njit(error_model="numpy")
def drop_groups(keys, n_expert, n_group, n_group_used):
    """Set the keys of all but the n_group_used best groups to the lowest value."""
    n = n_expert // n_group
    lowest = np.float32(-np.inf)
    for _ in range(n_group - n_group_used):
        worst, least = -1, lowest
        for g in range(n_group - 1, -1, -1):
            first, second = lowest, lowest
            for e in range(n * g, n * g + n):
                key = load_f32(keys + 4 * e)
                second = max(second, min(first, key))
                first = max(first, key)
            # A dropped group has no key left; of equal ones the last is dropped.
            if first > lowest and (worst < 0 or first + second < least):
                worst, least = g, first + second
        for e in range(n * worst, n * worst + n):
            store_f32(keys + 4 * e, lowest)


def moe_route(score: str) -> Any:
    """Kernel of MOE_ROUTE: each thread routes whole tokens."""
    score_of, is_softmax, is_chosen = SCORES[score], score == "softmax", score == "chosen"

    def kernel(tid, n_thread, a):
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            row, keys = a.logits + 4 * a.n_expert * t, a.logits + 4 * a.n_expert * t
            chosen = a.ids + 4 * a.n_used * t
            share = a.weights + 4 * a.n_used * t
            top, total = np.float32(0), np.float32(1)
            if is_softmax or is_chosen:
                top = load_f32(row)
                for e in range(1, a.n_expert):
                    top = max(top, load_f32(row + 4 * e))
            if is_softmax:
                total = np.float32(0)
                for e in range(a.n_expert):
                    total += np.exp(load_f32(row + 4 * e) - top)
            if a.keys != 0:
                keys = a.keys + 4 * a.n_expert * t
                for e in range(a.n_expert):
                    key = score_of(load_f32(row + 4 * e) - top) / total
                    if a.bias != 0:
                        key += load_f32(a.bias + 4 * e)
                    store_f32(keys + 4 * e, key)
                drop_groups(keys, a.n_expert, a.n_group, a.n_group_used)
            kept = np.float32(0)
            for s in range(a.n_used):
                best, n_choice = -1, a.n_expert
                if a.tokens != 0:
                    token = load_i32(a.tokens + 4 * t)
                    best, n_choice = load_i32(a.table + 4 * (a.n_used * token + s)), 0
                for e in range(n_choice):
                    taken = False
                    for before in range(s):
                        taken = taken or load_i32(chosen + 4 * before) == e
                    if not taken and (
                        best < 0 or load_f32(keys + 4 * e) > load_f32(keys + 4 * best)
                    ):
                        best = e
                weight = score_of(load_f32(row + 4 * best) - top) / total
                weight = np.exp(weight) if is_chosen else weight
                store_i32(chosen + 4 * s, best)
                store_f32(share + 4 * s, weight)
                kept += weight
            scale = np.float32(a.scale)
            if a.norm != 0 or is_chosen:
                scale /= kept if is_chosen else max(kept, np.float32(LEAST_SUM))
            for s in range(a.n_used):
                store_f32(share + 4 * s, load_f32(share + 4 * s) * scale)

    return kernel


def moe_bias() -> Any:
    """Kernel of MOE_BIAS: threads stride over slots."""

    def kernel(tid, n_thread, a):
        for slot in range(tid, load_i64(a.step + STEP.n_tok) * a.n_used, n_thread):
            bias = a.bias + 4 * a.n * load_i32(a.ids + 4 * slot)
            for i in range(a.n):
                at = a.y + 4 * (a.n * slot + i)
                store_f32(at, load_f32(at) + load_f32(bias + 4 * i))

    return kernel


def moe_groups() -> Any:
    """Kernel of MOE_GROUPS: each thread takes whole tokens."""

    def kernel(tid, n_thread, a):
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            logits = a.logits + 4 * a.n_expert * t
            top, all_of_them, total = load_f32(logits), np.float32(0), np.float32(0)
            for i in range(1, a.n_expert):
                top = max(top, load_f32(logits + 4 * i))
            for i in range(a.n_expert):
                all_of_them += np.exp(load_f32(logits + 4 * i) - top)
            for s in range(a.n_used):
                group = load_i32(a.ids + 4 * (a.n_chosen * t + s)) // a.n_each
                weight = np.exp(load_f32(logits + 4 * group) - top) / all_of_them
                store_i32(a.groups + 4 * (a.n_used * t + s), group)
                store_f32(a.weights + 4 * (a.n_used * t + s), weight)
                total += weight
            for s in range(a.n_used):
                at = a.weights + 4 * (a.n_used * t + s)
                store_f32(at, load_f32(at) / max(total, np.float32(LEAST_SUM)))

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
                    before = load_f32(at) if a.add != 0 or s > 0 else np.float32(0)
                    store_f32(at, before + weight * load_f32(row + 4 * i))

    return kernel
