"""HShare's ops: which rows retrieve anew, their sets, and which heads and layers share a set."""

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

GONE = -1.0  # below every similarity: an item that no longer takes part


def hshare_gate(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of HSHARE_GATE: threads stride over KV heads."""
    size, rows_per_kv = 4 * head_dim, heads // group

    def kernel(tid, n_thread, a):
        for h in range(tid, a.n_head_kv, n_thread):
            n, to = 0, a.asking + size * heads * h
            for r in range(rows_per_kv * h, rows_per_kv * (h + 1)):
                if a.fresh != 0:
                    store_i32(a.owners + 4 * r, a.first + r)
                if load_i32(a.owners + 4 * r) == a.first + r:
                    copy_row(a.q + size * group * r, to + size * n, head_dim * group)
                    n += group
            store_i32(a.n_asking + 4 * h, n)

    return kernel


def hshare_keep() -> Any:
    """Kernel of HSHARE_KEEP: threads stride over rows."""

    def kernel(tid, n_thread, a):
        low, high = middle(load_i64(a.step + STEP.pos), a.n_sink, a.n_local, 0)
        if tid == 0:
            store_i64(a.begin, high)
        for r in range(tid, a.n_row, n_thread):
            if load_i32(a.owners + 4 * r) != a.first + r:
                continue
            own, n = a.kept + 4 * (1 + a.n_keep) * r, min(a.n_keep, high - low)
            store_i32(own, n)
            if n == high - low:
                write_ends(own + 4, 0, 0, low, high)
            elif n > 0:
                scored = r // a.rows_per_kv * a.rows_per_kv  # retrieving rows are scored in order
                for other in range(scored, r):
                    scored += load_i32(a.owners + 4 * other) == a.first + other
                found = a.order + 4 * a.capacity * r
                row = a.scores + 4 * a.capacity * a.group * scored
                tops = a.maxima + a.capacity // 4 * a.group * scored
                keep_top(row, found, survivors(row, tops, low, high, n, found), n)
                copy_row(found, own + 4, n)

    return kernel


@njit(error_model="numpy")
def n_common(a, b):
    """The number of positions that two sets have in common."""
    n_a, n_b = load_i32(a), load_i32(b)
    i, j, n = 1, 1, 0
    while i <= n_a and j <= n_b:
        x, y = load_i32(a + 4 * i), load_i32(b + 4 * j)
        n += x == y
        i, j = i + (x <= y), j + (y <= x)
    return n


@njit(error_model="numpy")
def share(alike, n, n_own, chosen):
    """Alg. 1: merge the most similar pair of owners until n_own are left.

    alike f32 [n, n], similarity of pairs i < j, overwritten; chosen int32 [n] gets the owners.
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
        """Write the similarity of all pairs of a layer's rows to alike: positions in common."""
        for i in range(n):
            for j in range(i + 1, n):
                x = n_common(kept + size * i, kept + size * j)
                store_f32(alike + 4 * (n * i + j), x)

    @njit(error_model="numpy")
    def layers_alike(kept, layers, size, n, n_row, alike):
        """Write the similarity of all pairs of layers to alike: positions in common."""
        for i in range(n):
            for j in range(i + 1, n):
                a, b, x = load_i32(layers + 4 * i), load_i32(layers + 4 * j), 0
                for r in range(n_row):
                    x += n_common(kept + size * (n_row * a + r), kept + size * (n_row * b + r))
                store_f32(alike + 4 * (n * i + j), x)

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        size = 4 * (1 + a.n_keep)
        for i in range(a.n_layer):
            first = a.n_row * load_i32(a.layers + 4 * i)
            rows_alike(a.kept + size * first, size, a.n_row, a.alike)
            share(a.alike, a.n_row, a.n_row_own, a.chosen)
            for r in range(a.n_row):
                store_i32(a.owners + 4 * (first + r), first + load_i32(a.chosen + 4 * r))
        layers_alike(a.kept, a.layers, size, a.n_layer, a.n_row, a.alike)
        share(a.alike, a.n_layer, a.n_layer_own, a.chosen)
        for i in range(a.n_layer):
            layer, owner = load_i32(a.layers + 4 * i), load_i32(a.chosen + 4 * i)
            if owner != i:
                source = a.owners + 4 * a.n_row * load_i32(a.layers + 4 * owner)
                copy_row(source, a.owners + 4 * a.n_row * layer, a.n_row)

    return kernel
