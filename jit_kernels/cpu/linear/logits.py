"""The largest logits, and the sum that normalises their probabilities."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, store_f32, store_i32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    bits_above,
    fma,
    hmax,
    hsum,
    load_f,
    lowest_bit,
    splat_f,
    vexp,
    vmax,
    zero_f,
)

LOWEST, NOTHING = np.float32(-3e38), np.float32(-np.inf)


@njit(error_model="numpy")
def largest(x, n):
    """The largest of n floats, at least LOWEST."""
    tops, whole = splat_f(LOWEST), n // LANES * LANES
    for i in range(0, whole, LANES):
        tops = vmax(tops, load_f(x + 4 * i))
    top = hmax(tops)
    for i in range(whole, n):
        top = max(top, load_f32(x + 4 * i))
    return top


@njit(error_model="numpy")
def exp_sum(x, n, top):
    """The sum of exp(x - top) of n floats; NaN if one of them is."""
    sums, whole = zero_f(), n // LANES * LANES
    for i in range(0, whole, LANES):
        values = load_f(x + 4 * i)
        # vexp gives a number for NaN; LOWEST, and not -inf, times 0 is 0.
        sums = fma(vmax(splat_f(LOWEST), values), zero_f(), sums + vexp(values - splat_f(top)))
    total = hsum(sums)
    for i in range(whole, n):
        total += np.exp(load_f32(x + 4 * i) - top)
    return total


@njit(error_model="numpy")
def worst_of(ids, values, n):
    """The entry that is replaced first: the smallest, of equal ones that with the highest id."""
    at = 0
    for i in range(1, n):
        a, b = load_f32(values + 4 * i), load_f32(values + 4 * at)
        if a < b or (a == b and load_i32(ids + 4 * i) > load_i32(ids + 4 * at)):
            at = i
    return at


@njit(error_model="numpy")
def keep(ids, values, n, j, x):
    """Replace the worst entry by j; returns the value that the next one must exceed."""
    at = worst_of(ids, values, n)
    store_i32(ids + 4 * at, j)
    store_f32(values + 4 * at, x)
    return load_f32(values + 4 * worst_of(ids, values, n))


@njit(error_model="numpy")
def best_of(x, low, high, ids, values, n):
    """Keep the n best of entries low .. high - 1; missing ones have id -1."""
    for i in range(n):
        store_i32(ids + 4 * i, -1)
        store_f32(values + 4 * i, NOTHING)
    bar, whole = NOTHING, low + (high - low) // LANES * LANES
    for j in range(low, whole, LANES):
        above = bits_above(load_f(x + 4 * j), splat_f(bar))
        while above != 0:
            i = j + lowest_bit(above)
            if load_f32(x + 4 * i) > bar:
                bar = keep(ids, values, n, i, load_f32(x + 4 * i))
            above &= above - 1
    for j in range(whole, high):
        if load_f32(x + 4 * j) > bar:
            bar = keep(ids, values, n, j, load_f32(x + 4 * j))


def logit_parts() -> Any:
    """Kernel of LOGIT_PARTS: threads stride over parts."""

    def kernel(tid, n_thread, a):
        size = (a.n_vocab + a.n_part - 1) // a.n_part
        for p in range(tid, a.n_part, n_thread):
            low = min(p * size, a.n_vocab)
            high = min(low + size, a.n_vocab)
            top = largest(a.logits + 4 * low, high - low)
            store_f32(a.sums + 8 * p, top)
            store_f32(a.sums + 8 * p + 4, exp_sum(a.logits + 4 * low, high - low, top))
            best_of(
                a.logits, low, high, a.ids + 4 * a.n_best * p, a.values + 4 * a.n_best * p, a.n_best
            )

    return kernel


@njit(error_model="numpy")
def next_best(ids, values, n, last_id, last):
    """The best entry after (last, last_id), by falling value and rising id; -1: none."""
    at = -1
    for i in range(n):
        j, x = load_i32(ids + 4 * i), load_f32(values + 4 * i)
        if j >= 0 and (x < last or (x == last and j > last_id)):
            top = load_f32(values + 4 * at) if at >= 0 else NOTHING
            if at < 0 or x > top or (x == top and j < load_i32(ids + 4 * at)):
                at = i
    return at


def logit_best() -> Any:
    """Kernel of LOGIT_BEST: one thread selects the best of the parts one by one."""

    def kernel(tid, n_thread, a):
        if tid == 0:
            last_id, last = -1, np.float32(np.inf)
            for i in range(a.n_best):
                at = next_best(a.ids, a.values, a.n_best * a.n_part, last_id, last)
                last_id = load_i32(a.ids + 4 * at) if at >= 0 else -1
                last = load_f32(a.values + 4 * at) if at >= 0 else NOTHING
                store_i32(a.best_ids + 4 * i, last_id)
                store_f32(a.best_values + 4 * i, last)
            top, exps = LOWEST, np.float32(0)
            for p in range(a.n_part):
                top = max(top, load_f32(a.sums + 8 * p))
            for p in range(a.n_part):
                exps += load_f32(a.sums + 8 * p + 4) * np.exp(load_f32(a.sums + 8 * p) - top)
            store_f32(a.total, top)
            store_f32(a.total + 4, exps)

    return kernel
