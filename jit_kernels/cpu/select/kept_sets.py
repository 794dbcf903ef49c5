"""Index sets that persist between steps: those of H2O and SnapKV, and Selections of them."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.select.common import (
    LOWEST,
    copy_row,
    middle,
    ordered,
    threshold,
    write_best,
    write_ends,
)


@njit(error_model="numpy")
def keep(row, low, high, k, kept):
    """Write a set: its size, then the k best of positions low .. high - 1 by scores `row`."""
    n = max(0, min(k, high - low))
    store_i32(kept, n)
    if n == high - low:
        write_ends(kept + 4, 0, 0, low, high)
    elif n > 0:
        write_best(row, low, high, n, kept + 4)


def kept_sets() -> Any:
    """Kernel of KEPT_SETS: threads stride over rows."""

    def kernel(tid, n_thread, a):
        pos, first = load_i64(a.step + STEP.pos), load_i64(a.begin)
        for r in range(tid, a.n_row, n_thread):
            owner = load_i32(a.owners + 4 * r) if a.owners != 0 else r
            own, out = a.kept + 4 * (1 + a.n_keep) * owner, a.sets + 4 * a.set_capacity * r
            n, count = write_ends(out, 0, min(a.n_sink, pos + 1), 0, 0), load_i32(own)
            copy_row(own + 4, out + 4 * n, count)
            store_i32(a.counts + 4 * r, write_ends(out, n + count, 0, first, pos + 1))

    return kernel


@njit(error_model="numpy")
def replace(row, kept, n_keep, newcomer):
    """Add a position to the set; beyond n_keep, evict the one with the smallest sum."""
    n = load_i32(kept)
    if n < n_keep:
        store_i32(kept, n + 1)
        store_i32(kept + 4 * (1 + n), newcomer)
        return
    worst, least = n, load_f32(row + 4 * newcomer)
    for i in range(n):
        x = load_f32(row + 4 * load_i32(kept + 4 * (1 + i)))
        if x < least:
            worst, least = i, x
    if worst < n:
        for i in range(worst, n - 1):
            store_i32(kept + 4 * (1 + i), load_i32(kept + 4 * (2 + i)))
        store_i32(kept + 4 * n, newcomer)


def h2o_keep() -> Any:
    """Kernel of H2O_KEEP: threads stride over rows."""

    def kernel(tid, n_thread, a):
        low, high = middle(load_i64(a.step + STEP.pos), a.n_sink, a.n_local, 0)
        if tid == 0:
            store_i64(a.begin, high)
        for r in range(tid, a.n_row, n_thread):
            row, own = a.sums + 4 * a.capacity * r, a.kept + 4 * (1 + a.n_keep) * r
            if a.fresh != 0:
                keep(row, low, high, a.n_keep, own)
            elif high > low:
                replace(row, own, a.n_keep, high - 1)

    return kernel


@njit(error_model="numpy")
def pool_row(row, low, high, radius, average, out):
    """Pool entries low .. high - 1: the sum (average) or maximum over a window of +-radius."""
    for j in range(low, high):
        first, last = max(low, j - radius), min(high - 1, j + radius)
        total = best = load_f32(row + 4 * first)
        for i in range(first + 1, last + 1):
            x = load_f32(row + 4 * i)
            total += x
            best = max(best, x)
        store_f32(out + 4 * j, total if average != 0 else best)


def snapkv_keep() -> Any:
    """Kernel of SNAPKV_KEEP: one thread, once a prompt."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        low, high = middle(load_i64(a.step + STEP.pos), a.n_sink, a.n_local, 0)
        store_i64(a.begin, high)
        for i in range(a.n_row * a.capacity):
            store_f32(a.pooled + 4 * i, LOWEST)
        for r in range(a.n_row):
            at = 4 * a.capacity * r
            pool_row(a.sums + at, low, high, a.pool // 2, a.average, a.pooled + at)
        total, bar, above = a.n_top * a.n_row, ordered(LOWEST), 0
        if 0 < a.n_top < high - low:
            bar = threshold(a.pooled, 0, a.n_row * a.capacity, total)
            for i in range(a.n_row * a.capacity):
                above += ordered(load_f32(a.pooled + 4 * i)) > bar
        ties = total - above
        for r in range(a.n_row):
            row, best = a.pooled + 4 * a.capacity * r, 0
            for j in range(low, high):
                order = ordered(load_f32(row + 4 * j))
                tie = order == bar and ties > 0
                ties -= tie
                best += order > bar or tie
            share = a.n_top + np.float64(a.ada) * (best - a.n_top)
            keep(row, low, high, min(a.n_keep, int(share + 1e-6)), a.kept + 4 * (1 + a.n_keep) * r)

    return kernel
