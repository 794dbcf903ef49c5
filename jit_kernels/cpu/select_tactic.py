"""Tactic's ops: K-means over keys, the token budget by a fitted curve, the Selection."""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    load_u32,
    store_f32,
    store_i32,
    store_i64,
    store_u8,
)
from tamis.jit_kernels.cpu.select import key_at, ordered
from tamis.jit_kernels.cpu.simd import (
    LANES,
    broadcast_f,
    broadcast_half,
    fma,
    hmax,
    lane,
    load_f,
    load_f16x16,
    load_f32x16,
    store_f,
    store_f32x16,
    vexp,
    vmax,
    zero_f,
    zero_f32x16,
)
from tamis.jit_kernels.cpu.tile import dot_half
from tamis.jit_kernels.ops import STEP

PANEL = 32  # clusters whose centroids lie together
FAR = np.float32(1e30)  # half the squared length of a centroid that is not there
LOWEST = np.float32(-3e38)
ZERO = np.float32(0)
TILE = 64  # keys that a thread compares with all centroids at once


@njit(error_model="numpy")
def centroid_at(centroids, n_panel, head_dim, h, cluster):
    """Address of the first element of a centroid; the next ones are 4 * PANEL bytes apart."""
    panel = n_panel * h + cluster // PANEL
    return centroids + 4 * (PANEL * head_dim * panel + cluster % PANEL)


# --- clusters ------------------------------------------------------------------------------------


def tactic_seed(head_dim: int) -> Any:
    """Kernel of TACTIC_SEED: threads take KV heads in turn."""

    @njit(error_model="numpy")
    def place(centroids, norm_at, key):
        """Make a key the centroid at `centroids`."""
        total = ZERO
        for i in range(0, head_dim, 16):
            x = load_f16x16(key + 2 * i)
            for n in range(16):
                value = lane(x, n)
                store_f32(centroids + 4 * PANEL * (i + n), value)
                total += value * value
        store_f32(norm_at, total / 2)

    def kernel(
        tid, n_thread, step, k_pages, k_table, extent, centroids, norms, moving, n_head_kv,
        n_panel, per_cluster, n_sink, n_local, seed,
    ):  # fmt: skip
        n = max(0, load_i64(step + STEP.pos) + 1 - n_local - n_sink)
        n_cluster = n // per_cluster
        if tid == 0:
            store_i64(extent, n_sink + n if n_cluster > 0 else 0)
            store_i64(extent + 8, n_cluster)
        for h in range(tid, n_head_kv, n_thread):
            store_i64(moving + 8 * h, 1)
            head_norms = norms + 4 * PANEL * n_panel * h
            for i in range(PANEL * n_panel):
                store_f32(head_norms + 4 * i, FAR)
            # Knuth's Algorithm S: each set of n_cluster positions is equally likely.
            state, taken = seed * n_head_kv + h, 0
            for i in range(n):
                state = state * 6364136223846793005 + 1442695040888963407
                if ((state >> 33) & 0x7FFFFFFF) * (n - i) >> 31 < n_cluster - taken:
                    key = key_at(k_pages, k_table, n_head_kv, h, n_sink + i, head_dim)
                    at = centroid_at(centroids, n_panel, head_dim, h, taken)
                    place(at, head_norms + 4 * taken, key)
                    taken += 1

    return kernel


@njit(error_model="numpy")
def improve(best, label, cluster, low, high):
    """Where a lane of low, then high, exceeds the value at best: store it and its cluster."""
    top = hmax(vmax(low, high))
    if top > load_f32(best):
        store_f32(best, top)
        for n in range(2 * LANES):
            if (lane(low, n) if n < LANES else lane(high, n - LANES)) == top:
                store_i32(label, cluster + n)
                break


def tactic_assign(head_dim: int) -> Any:
    """Kernel of TACTIC_ASSIGN: threads take tiles of keys in turn.

    The nearest centroid is the one with the largest k . c - |c|^2 / 2.
    """

    @njit(error_model="numpy")
    def compare(keys, panel, norms, low, high):
        """Four keys with 2 * LANES centroids, whose lanes are in `low` and `high` norms."""
        a, b, c, d = keys
        a0, a1 = zero_f() - low, zero_f() - high
        b0, b1, c0, c1, d0, d1 = a0, a1, a0, a1, a0, a1
        for i in range(head_dim):
            x, y = load_f(panel + 4 * PANEL * i), load_f(panel + 4 * (PANEL * i + LANES))
            k = broadcast_half(a + 2 * i)
            a0, a1 = fma(k, x, a0), fma(k, y, a1)
            k = broadcast_half(b + 2 * i)
            b0, b1 = fma(k, x, b0), fma(k, y, b1)
            k = broadcast_half(c + 2 * i)
            c0, c1 = fma(k, x, c0), fma(k, y, c1)
            k = broadcast_half(d + 2 * i)
            d0, d1 = fma(k, x, d0), fma(k, y, d1)
        return a0, a1, b0, b1, c0, c1, d0, d1

    @njit(error_model="numpy")
    def assign_four(keys, panel, norms, best, labels, last, cluster):
        """The keys of four positions; those after number `last` repeat it."""
        low, high = load_f(norms), load_f(norms + 4 * LANES)
        a0, a1, b0, b1, c0, c1, d0, d1 = compare(keys, panel, norms, low, high)
        improve(best, labels, cluster, a0, a1)
        if last >= 1:
            improve(best + 4, labels + 4, cluster, b0, b1)
        if last >= 2:
            improve(best + 8, labels + 8, cluster, c0, c1)
        if last >= 3:
            improve(best + 12, labels + 12, cluster, d0, d1)

    def kernel(
        tid, n_thread, k_pages, k_table, extent, centroids, norms, moving, labels, best, n_head_kv,
        n_panel, capacity, n_sink,
    ):  # fmt: skip
        end, n_cluster = load_i64(extent), load_i64(extent + 8)
        n_tile = (max(0, end - n_sink) + TILE - 1) // TILE
        for item in range(tid, n_tile * n_head_kv, n_thread):
            h, first = item % n_head_kv, n_sink + item // n_head_kv * TILE
            stop = min(end, first + TILE)
            if load_i64(moving + 8 * h) == 0:
                continue
            for j in range(first, stop):
                store_f32(best + 4 * (capacity * h + j), LOWEST)
            for cluster in range(0, n_cluster, 2 * LANES):
                panel = centroid_at(centroids, n_panel, head_dim, h, cluster)
                norm_at = norms + 4 * (PANEL * n_panel * h + cluster)
                for j in range(first, stop, 4):
                    last = min(3, stop - 1 - j)
                    keys = (
                        key_at(k_pages, k_table, n_head_kv, h, j, head_dim),
                        key_at(k_pages, k_table, n_head_kv, h, j + min(1, last), head_dim),
                        key_at(k_pages, k_table, n_head_kv, h, j + min(2, last), head_dim),
                        key_at(k_pages, k_table, n_head_kv, h, j + last, head_dim),
                    )
                    at = 4 * (capacity * h + j)
                    assign_four(keys, panel, norm_at, best + at, labels + at, last, cluster)

    return kernel


@njit(error_model="numpy")
def sort_by_label(labels, starts, order, first, end, n_cluster):
    """Counting sort of positions first .. end - 1 (see TACTIC_MEAN)."""
    for i in range(n_cluster + 1):
        store_i32(starts + 4 * i, 0)
    for j in range(first, end):
        at = starts + 4 * (load_i32(labels + 4 * j) + 1)
        store_i32(at, load_i32(at) + 1)
    for i in range(n_cluster):
        store_i32(starts + 4 * (i + 1), load_i32(starts + 4 * (i + 1)) + load_i32(starts + 4 * i))
    for j in range(first, end):
        at = starts + 4 * load_i32(labels + 4 * j)
        store_i32(order + 4 * load_i32(at), j)
        store_i32(at, load_i32(at) + 1)
    for i in range(n_cluster, 0, -1):  # each start has become the next one
        store_i32(starts + 4 * i, load_i32(starts + 4 * (i - 1)))
    store_i32(starts, 0)


def tactic_mean(head_dim: int) -> Any:
    """Kernel of TACTIC_MEAN: threads take KV heads in turn."""

    @njit(error_model="numpy")
    def replace(centroid, norm_at, sums, count):
        """Make sums / count the centroid; whether that changed it."""
        changed, total = 0, ZERO
        for i in range(head_dim):
            value = load_f32(sums + 4 * i) / np.float32(count)
            at = centroid + 4 * PANEL * i
            changed |= value != load_f32(at)
            store_f32(at, value)
            total += value * value
        store_f32(norm_at, total / 2)
        return changed

    def kernel(
        tid, n_thread, k_pages, k_table, extent, centroids, norms, moving, labels, starts, order,
        sums, n_head_kv, n_panel, capacity, n_sink,
    ):  # fmt: skip
        end, n_cluster = load_i64(extent), load_i64(extent + 8)
        for h in range(tid, n_head_kv, n_thread):
            if load_i64(moving + 8 * h) == 0:
                continue
            head_starts = starts + 4 * (PANEL * n_panel + 1) * h
            head_order, total = order + 4 * capacity * h, sums + 4 * head_dim * h
            sort_by_label(
                labels + 4 * capacity * h, head_starts, head_order, n_sink, end, n_cluster
            )
            changed = 0
            for c in range(n_cluster):
                low, high = load_i32(head_starts + 4 * c), load_i32(head_starts + 4 * c + 4)
                if low == high:
                    continue
                for i in range(0, head_dim, 16):
                    store_f32x16(total + 4 * i, zero_f32x16())
                for s in range(low, high):
                    j = load_i32(head_order + 4 * s)
                    key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
                    for i in range(0, head_dim, 16):
                        at = total + 4 * i
                        store_f32x16(at, load_f32x16(at) + load_f16x16(key + 2 * i))
                centroid = centroid_at(centroids, n_panel, head_dim, h, c)
                norm_at = norms + 4 * (PANEL * n_panel * h + c)
                changed |= replace(centroid, norm_at, total, high - low)
            store_i64(moving + 8 * h, changed)

    return kernel


# --- the budget ----------------------------------------------------------------------------------


@njit(error_model="numpy")
def sort_clusters(scores, keys, other, counts, rank, n):
    """Cluster numbers by falling score, ties by number, to rank: radix sort, a byte a pass."""
    for i in range(n):
        store_i32(keys + 4 * i, 0x7FFFFFFF - ordered(load_f32(scores + 4 * i)))
        store_i32(rank + 4 * i, i)
    source, target = rank, other
    for shift in range(0, 32, 8):
        for i in range(256):
            store_i32(counts + 4 * i, 0)
        for i in range(n):
            at = counts + 4 * ((load_u32(keys + 4 * i) >> shift) & 255)
            store_i32(at, load_i32(at) + 1)
        before = 0
        for i in range(256):
            size = load_i32(counts + 4 * i)
            store_i32(counts + 4 * i, before)
            before += size
        for i in range(n):
            c = load_i32(source + 4 * i)
            at = counts + 4 * ((load_u32(keys + 4 * c) >> shift) & 255)
            store_i32(target + 4 * load_i32(at), c)
            store_i32(at, load_i32(at) + 1)
        source, target = target, source  # after four passes the result is in rank again


@njit(error_model="numpy")
def curve_sum(a, b, first, last):
    """Sum over i = first + 1 .. last of max(a / i + b, 0), by the midpoint rule.

    The sum of 1 / i is off by less than 1 / (24 first^2): 1e-4 for 20 exact weights.
    """
    low, high = float(first), float(last)
    if a >= 0.0 and b < 0.0:
        high = min(high, -a / b)  # from there on the curve is below zero
    elif a < 0.0:
        low = max(low, -a / b) if b > 0.0 else high
    if high <= low:
        return 0.0
    return a * math.log((high + 0.5) / (low + 0.5)) + b * (high - low)


@njit(error_model="numpy")
def weight_sum(weights, n):
    """The sum of n weights."""
    total = 0.0
    for i in range(n):
        total += load_f32(weights + 4 * i)
    return total


@njit(error_model="numpy")
def budget(weights, n_first, n, fit, outside, share):
    """Least k whose first k weights reach the share (Alg. 1, line 11).

    outside: weight that is attended anyway and counts, or 0.
    """
    a, b = fit
    total = outside + weight_sum(weights, n_first) + curve_sum(a, b, n_first, n)
    need = share * total - outside
    reached, k = 0.0, 0
    while k < n_first and reached < need:
        reached += load_f32(weights + 4 * k)
        k += 1
    if reached >= need:
        return k
    low, high = n_first, n  # the curve's sum never falls: bisect
    while high - low > 1:
        middle = (low + high) // 2
        if reached + curve_sum(a, b, n_first, middle) >= need:
            high = middle
        else:
            low = middle
    return high


@njit(error_model="numpy")
def fitted(mu_1, mu_2, x_1, x_2):
    """The a and b of y = a / x + b through (x_1, mu_1) and (x_2, mu_2) (4.4)."""
    a = (mu_1 - mu_2) / (1.0 / x_1 - 1.0 / x_2)
    return a, mu_2 - a / x_2


def tactic_budget(head_dim: int) -> Any:
    """Kernel of TACTIC_BUDGET: threads take query heads in turn."""

    @njit(error_model="numpy")
    def score_clusters(head, panels, scores, n_cluster):
        for c in range(0, n_cluster, LANES):
            panel = panels + 4 * (PANEL * head_dim * (c // PANEL) + c % PANEL)
            total = zero_f()
            for i in range(head_dim):
                total = fma(broadcast_f(head + 4 * i), load_f(panel + 4 * PANEL * i), total)
            store_f(scores + 4 * c, total)

    @njit(error_model="numpy")
    def logits_of(head, keys, order, starts, rank, low, high, out, scale):
        """Scaled scores of the positions number low .. high - 1 in the order of clusters."""
        k_pages, k_table, n_head_kv, h = keys
        i, seen = 0, 0
        while seen < high:
            cluster = load_i32(rank + 4 * i)
            first, end = load_i32(starts + 4 * cluster), load_i32(starts + 4 * cluster + 4)
            for s in range(max(0, low - seen), min(end - first, high - seen)):
                j = load_i32(order + 4 * (first + s))
                key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
                store_f32(out + 4 * (seen + s - low), dot_half(head, key, head_dim) * scale)
            i, seen = i + 1, seen + end - first
        return out + 4 * (high - low)

    @njit(error_model="numpy")
    def logits_outside(head, keys, low, high, out, scale):
        k_pages, k_table, n_head_kv, h = keys
        for j in range(low, high):
            key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
            store_f32(out + 4 * (j - low), dot_half(head, key, head_dim) * scale)
        return out + 4 * max(0, high - low)

    @njit(error_model="numpy")
    def exponentiate(logits, end):
        """Logits to weights, relative to the largest; up to 15 floats after the end change too."""
        top, n = LOWEST, (end - logits) // 4
        for i in range(n):
            top = max(top, load_f32(logits + 4 * i))
        for i in range(n):
            store_f32(logits + 4 * i, load_f32(logits + 4 * i) - top)
        for at in range(logits, end, 4 * LANES):
            store_f(at, vexp(load_f(at)))

    @njit(error_model="numpy")
    def choose(head, keys, clusters, room, span, counted, share, first_share, scale):
        """The number of positions to keep of one head, with its clusters ranked."""
        order, starts, rank = clusters
        n_sink, end, n_kv = span
        n = end - n_sink
        n_first = min(n, max(20, int(first_share * n)))
        half = max(16, n // 200)
        x_1, x_2 = n // 10, n * 6 // 10
        low_1, high_1 = max(0, x_1 - half), min(n, x_1 + half)
        low_2, high_2 = max(0, x_2 - half), min(n, x_2 + half)
        at_1 = logits_of(head, keys, order, starts, rank, 0, n_first, room, scale)
        at_2 = logits_of(head, keys, order, starts, rank, low_1, high_1, at_1, scale)
        at_3 = logits_of(head, keys, order, starts, rank, low_2, high_2, at_2, scale)
        stop = at_3
        if counted != 0:
            stop = logits_outside(head, keys, 0, n_sink, stop, scale)
            stop = logits_outside(head, keys, end, n_kv, stop, scale)
        exponentiate(room, stop)
        mu_1 = weight_sum(at_1, high_1 - low_1) / (high_1 - low_1)
        mu_2 = weight_sum(at_2, high_2 - low_2) / (high_2 - low_2)
        fit = fitted(mu_1, mu_2, max(1, x_1), max(2, x_2))
        outside = weight_sum(at_3, (stop - at_3) // 4)
        return budget(room, n_first, n, fit, outside, share)

    def kernel(
        tid, n_thread, step, q, k_pages, k_table, extent, centroids, starts, order, rank, keep,
        work, n_head, heads_per_kv, n_head_kv, n_panel, capacity, n_sink, counted, share_f,
        first_share_f, scale_f,
    ):  # fmt: skip
        n_kv = load_i64(step + STEP.pos) + 1
        end, n_cluster = load_i64(extent), load_i64(extent + 8)
        n_slot = PANEL * n_panel
        n_room = capacity + capacity // 50 + 64 + 16
        work_size = n_room + 3 * n_slot + 256
        for r in range(tid, n_head, n_thread):
            store_i32(keep + 4 * r, 0)
            if n_cluster == 0:
                continue
            h, head, room = r // heads_per_kv, q + 4 * head_dim * r, work + 4 * work_size * r
            scores = room + 4 * n_room
            sort_keys, other = scores + 4 * n_slot, scores + 8 * n_slot
            ranked = rank + 4 * n_slot * r
            score_clusters(head, centroid_at(centroids, n_panel, head_dim, h, 0), scores, n_cluster)
            sort_clusters(scores, sort_keys, other, scores + 12 * n_slot, ranked, n_cluster)
            if share_f >= 1:
                store_i32(keep + 4 * r, end - n_sink)
                continue
            keys = (k_pages, k_table, n_head_kv, h)
            clusters = (
                order + 4 * capacity * h, starts + 4 * (n_slot + 1) * h, ranked,
            )  # fmt: skip
            n_kept = choose(
                head, keys, clusters, room, (n_sink, end, n_kv), counted, share_f, first_share_f,
                scale_f,
            )  # fmt: skip
            store_i32(keep + 4 * r, n_kept)

    return kernel


# --- the selection -------------------------------------------------------------------------------


def tactic_mark(group: int) -> Any:
    """Kernel of TACTIC_MARK: threads take rows in turn."""

    def kernel(
        tid, n_thread, extent, starts, order, rank, keep, marks, count, n_row, heads_per_kv,
        n_panel, capacity,
    ):  # fmt: skip
        n_slot = PANEL * n_panel
        for r in range(tid, n_row, n_thread):
            row, h, found = marks + capacity * r, r * group // heads_per_kv, 0
            for at in range(row, row + (load_i64(extent) + 7) // 8 * 8, 8):
                store_i64(at, 0)
            for head in range(r * group, (r + 1) * group):
                left, i = load_i32(keep + 4 * head), 0
                while left > 0:
                    cluster = load_i32(rank + 4 * (n_slot * head + i))
                    at = starts + 4 * ((n_slot + 1) * h + cluster)
                    first = load_i32(at)
                    n = min(left, load_i32(at + 4) - first)
                    for s in range(first, first + n):
                        mark = row + load_i32(order + 4 * (capacity * h + s))
                        found += 1 - load_u8(mark)
                        store_u8(mark, 1)
                    left, i = left - n, i + 1
            store_i32(count + 4 * r, found)

    return kernel


def tactic_select() -> Any:
    """Kernel of TACTIC_SELECT: threads take rows in turn."""

    def kernel(tid, n_thread, step, extent, marks, count, indptr, indices, n_row, capacity, n_sink):
        n_kv = load_i64(step + STEP.pos) + 1
        first = min(n_sink, n_kv)
        end = max(first, load_i64(extent))
        n_outside = first + n_kv - end
        store_i32(indptr, 0)
        for r in range(tid, n_row, n_thread):
            begin = n_outside * r
            for i in range(r):
                begin += load_i32(count + 4 * i)
            at, row = indices + 4 * begin, marks + capacity * r
            for j in range(first):
                store_i32(at, j)
                at += 4
            for word in range(first // 8 * 8, end, 8):
                if load_i64(row + word) == 0:
                    continue
                for j in range(max(first, word), min(end, word + 8)):
                    if load_u8(row + j) != 0:
                        store_i32(at, j)
                        at += 4
            for j in range(end, n_kv):
                store_i32(at, j)
                at += 4
            store_i32(indptr + 4 * (r + 1), begin + n_outside + load_i32(count + 4 * r))

    return kernel
