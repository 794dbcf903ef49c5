"""HShare's ops: which rows retrieve, what they keep, and who shares whose set."""

from typing import Any

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
from tamis.jit_kernels.cpu.select.common import copy_row, keep_top, middle, survivors, write_ends

GONE = -1.0  # below every likeness: an item that no longer takes part


def hshare_gate(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of HSHARE_GATE: threads take KV heads in turn."""
    size, rows_per_kv = 4 * head_dim, heads // group

    def kernel(tid, n_thread, step, q, owners, asking, n_asking, n_head_kv, first, fresh):
        for h in range(tid, n_head_kv, n_thread):
            n, to = 0, asking + size * heads * h
            for r in range(rows_per_kv * h, rows_per_kv * (h + 1)):
                if fresh != 0:
                    store_i32(owners + 4 * r, first + r)
                if load_i32(owners + 4 * r) == first + r:
                    copy_row(q + size * group * r, to + size * n, head_dim * group)
                    n += group
            store_i32(n_asking + 4 * h, n)

    return kernel


def hshare_keep() -> Any:
    """Kernel of HSHARE_KEEP: threads take rows in turn."""

    def kernel(
        tid, n_thread, step, owners, scores, maxima, order, kept, begin, n_row, rows_per_kv, group,
        capacity, n_keep, n_sink, n_local, first,
    ):  # fmt: skip
        low, high = middle(load_i64(step + STEP.pos), n_sink, n_local, 0)
        if tid == 0:
            store_i64(begin, high)
        for r in range(tid, n_row, n_thread):
            if load_i32(owners + 4 * r) != first + r:
                continue
            own, n = kept + 4 * (1 + n_keep) * r, min(n_keep, high - low)
            store_i32(own, n)
            if n == high - low:
                write_ends(own + 4, 0, 0, low, high)
            elif n > 0:
                scored = r // rows_per_kv * rows_per_kv  # rows that retrieve are scored in order
                for other in range(scored, r):
                    scored += load_i32(owners + 4 * other) == first + other
                found = order + 4 * capacity * r
                row = scores + 4 * capacity * group * scored
                tops = maxima + capacity // 4 * group * scored
                keep_top(row, found, survivors(row, tops, low, high, n, found), n)
                copy_row(found, own + 4, n)

    return kernel


@njit(error_model="numpy")
def n_common(a, b):
    """How many positions two kept sets have in common."""
    n_a, n_b = load_i32(a), load_i32(b)
    i, j, n = 1, 1, 0
    while i <= n_a and j <= n_b:
        x, y = load_i32(a + 4 * i), load_i32(b + 4 * j)
        n += x == y
        i, j = i + (x <= y), j + (y <= x)
    return n


@njit(error_model="numpy")
def share(alike, n, n_own, chosen):
    """Alg. 1: the most alike pair of owners becomes one, until n_own are left.

    alike f32 [n, n] of pairs i < j, used up; chosen int32 [n]: whose set each takes.
    """
    for i in range(n):
        store_i32(chosen + 4 * i, i)
    for _ in range(n - n_own):
        best, first, second = GONE, 0, 0
        for i in range(n):
            for j in range(i + 1, n):
                x = load_f32(alike + 4 * (n * i + j))
                if x > best:
                    best, first, second = x, i, j
        for i in range(n):
            if load_i32(chosen + 4 * i) == second:
                store_i32(chosen + 4 * i, first)
            store_f32(alike + 4 * (n * i + second), GONE)
            store_f32(alike + 4 * (n * second + i), GONE)


def hshare_map() -> Any:
    """Kernel of HSHARE_MAP: one thread, once a prompt."""

    @njit(error_model="numpy")
    def rows_alike(kept, size, n, alike):
        """Of the rows of one layer."""
        for i in range(n):
            for j in range(i + 1, n):
                x = n_common(kept + size * i, kept + size * j)
                store_f32(alike + 4 * (n * i + j), x)

    @njit(error_model="numpy")
    def layers_alike(kept, layers, size, n, n_row, alike):
        """Of the layers, row by row."""
        for i in range(n):
            for j in range(i + 1, n):
                a, b, x = load_i32(layers + 4 * i), load_i32(layers + 4 * j), 0
                for r in range(n_row):
                    x += n_common(kept + size * (n_row * a + r), kept + size * (n_row * b + r))
                store_f32(alike + 4 * (n * i + j), x)

    def kernel(
        tid, n_thread, kept, layers, owners, alike, chosen, n_layer, n_row, n_keep, n_layer_own,
        n_row_own,
    ):  # fmt: skip
        if tid != 0:
            return
        size = 4 * (1 + n_keep)
        for i in range(n_layer):
            first = n_row * load_i32(layers + 4 * i)
            rows_alike(kept + size * first, size, n_row, alike)
            share(alike, n_row, n_row_own, chosen)
            for r in range(n_row):
                store_i32(owners + 4 * (first + r), first + load_i32(chosen + 4 * r))
        layers_alike(kept, layers, size, n_layer, n_row, alike)
        share(alike, n_layer, n_layer_own, chosen)
        for i in range(n_layer):
            layer, owner = load_i32(layers + 4 * i), load_i32(chosen + 4 * i)
            if owner != i:
                source = owners + 4 * n_row * load_i32(layers + 4 * owner)
                copy_row(source, owners + 4 * n_row * layer, n_row)

    return kernel
