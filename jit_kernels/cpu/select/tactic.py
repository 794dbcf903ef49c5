"""Tactic's ops: K-means over keys, the token budget, the Selection."""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import (
    STEP,
    TACTIC_SAMPLES,
    TACTIC_WORKERS,
    tactic_half_window,
    tactic_list,
)
from tamis.jit_kernels.contract.types import LINE, PAGE
from tamis.jit_kernels.cpu.attention.attend import first_at_least
from tamis.jit_kernels.cpu.attention.attend_batch import widest
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    load_u32,
    lowest_bit,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_outer,
    add_products,
    addresses,
    keep_largest,
    load_column,
    load_half_each,
    load_half_spaced,
    load_row,
    store_grid,
    store_sums,
    transposed,
    zero_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    hmax,
    hsum,
    load_f,
    load_f16x16,
    load_f32x16,
    prefetch,
    round_i32,
    splat_f,
    splat_f32x16,
    store_f,
    store_f16x16,
    store_f32x16,
    store_i,
    vabs,
    vexp,
    vmax,
    vmin,
    zero_f,
    zero_f32x16,
)
from tamis.jit_kernels.cpu.linear.panel import MR, NR, NV
from tamis.jit_kernels.cpu.select.common import key_at

LOWEST = np.float32(-3e38)
ZERO = np.float32(0)
KEYS = 8  # keys whose products with a query are computed together
SOON = 4  # clusters whose lists of positions are prefetched
FINEST = np.float32(65535)  # levels of scores that the sort distinguishes
# logarithm of the largest ratio of a sample's weight to its estimate
LARGEST_RATIO = np.float32(80)
half_window = njit(tactic_half_window)
list_size = njit(tactic_list)


# --- clusters ------------------------------------------------------------------------------------


@njit(error_model="numpy")
def segment_at(extent, s, segment, per_cluster, n_sink):
    """First position, end, first cluster and number of clusters of segment s.

    0 clusters: no such segment.
    """
    first = n_sink + s * segment
    n = max(0, min(load_i64(extent + 8), first + segment) - first)
    return first, first + n, s * (segment // per_cluster), n // per_cluster


@njit(error_model="numpy")
def first_segment(extent, segment, n_sink):
    """The first segment that must be clustered."""
    return (load_i64(extent) - n_sink) // segment


def tactic_seed(head_dim: int) -> Any:
    """Kernel of TACTIC_SEED: threads stride over segments of KV heads."""

    @njit(error_model="numpy")
    def place(centroid, mean, norm, key):
        """Make a key the centroid."""
        total = zero_f32x16()
        for i in range(0, head_dim, 16):
            x = load_f16x16(key + 2 * i)
            store_f32x16(centroid + 4 * i, x)
            store_f16x16(mean + 2 * i, x)
            total += x * x
        store_f32(norm, -hsum(total) / 2)

    def kernel(tid, n_thread, a):
        begin = first_segment(a.extent, a.segment, a.n_sink)
        for item in range(begin * a.n_head_kv + tid, a.n_segment * a.n_head_kv, n_thread):
            h, s = item % a.n_head_kv, item // a.n_head_kv
            first, end, cluster, n_cluster = segment_at(
                a.extent, s, a.segment, a.per_cluster, a.n_sink
            )
            store_i64(a.moving + 8 * (a.n_segment * h + s), 1)
            # Knuth's Algorithm S: each set of n_cluster positions is equally likely.
            state, taken = (a.seed * a.n_head_kv + h) * 1000003 + s, 0
            for j in range(first, end):
                state = state * 6364136223846793005 + 1442695040888963407
                if ((state >> 33) & 0x7FFFFFFF) * (end - j) >> 31 < n_cluster - taken:
                    at = a.n_slot * h + cluster + taken
                    key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
                    mean = a.means + 2 * head_dim * at
                    place(a.centroids + 4 * head_dim * at, mean, a.norms + 4 * at, key)
                    taken += 1

    return kernel


def tactic_assign(head_dim: int) -> Any:
    """Kernel of TACTIC_ASSIGN: threads stride over tiles of NR keys of a segment.

    The nearest centroid is the one with the largest k . c - |c|^2 / 2. Lanes are keys, so that no
    lane is compared with another; the keys' panel ends in a row of ones, then the largest products
    and their centroids.
    """
    many, one, cols, lanes, four = MR, 1, NV, LANES, 4
    row, key_row, panel_row = 4 * head_dim, 2 * head_dim, 4 * NR
    ones, nearest = panel_row * head_dim, panel_row * (head_dim + 1)
    labels_at = nearest + panel_row

    @njit(error_model="numpy")
    def unpack(keys, panel):
        for first in range(0, NR, LANES):
            for k in range(0, head_dim, LANES):
                part = load_half_spaced(keys + key_row * first + 2 * k, key_row, lanes)
                store_grid(panel + panel_row * k + 4 * first, panel_row, transposed(part))
            store_f(panel + ones + 4 * first, splat_f(np.float32(1)))
            store_f(panel + nearest + 4 * first, splat_f(LOWEST))
            store_f(panel + labels_at + 4 * first, zero_f())

    @njit(error_model="numpy")
    def compare(panel, centroids, norms, cluster):
        sums = add_outer(zero_grid(many, cols), norms, four, load_row(panel + ones, cols))
        for k in range(head_dim):
            keys = load_row(panel + panel_row * k, cols)
            sums = add_outer(sums, centroids + 4 * k, row, keys)
        keep_largest(panel + nearest, sums, cluster)

    @njit(error_model="numpy")
    def compare_one(panel, centroids, norms, cluster):
        sums = add_outer(zero_grid(one, cols), norms, four, load_row(panel + ones, cols))
        for k in range(head_dim):
            keys = load_row(panel + panel_row * k, cols)
            sums = add_outer(sums, centroids + 4 * k, row, keys)
        keep_largest(panel + nearest, sums, cluster)

    @njit(error_model="numpy")
    def find_nearest(panel, centroids, norms, first, n):
        """Compare the panel with n centroids, the first of which is number `first`."""
        for i in range(0, n if n >= MR else 0, MR):
            c = min(i, n - MR)  # the last ones are compared again rather than fewer
            compare(panel, centroids + row * c, norms + 4 * c, first + c)
        for c in range(0 if n >= MR else n):
            compare_one(panel, centroids + row * c, norms + 4 * c, first + c)

    def kernel(tid, n_thread, a):
        n_worker = min(n_thread, TACTIC_WORKERS)
        begin, n_tile = first_segment(a.extent, a.segment, a.n_sink), a.segment // NR + 2
        panel = a.panels + panel_row * (head_dim + 3) * tid
        n_item = (a.n_segment - begin) * a.n_head_kv * n_tile if tid < n_worker else 0
        for item in range(tid, n_item, n_worker):
            h, s = item // n_tile % a.n_head_kv, begin + item // n_tile // a.n_head_kv
            first, end, cluster, n_cluster = segment_at(
                a.extent, s, a.segment, a.per_cluster, a.n_sink
            )
            tile = (first // NR + item % n_tile) * NR  # keys that are contiguous in a page
            if n_cluster == 0 or tile >= end:  # a tile of a segment without keys may have no page
                continue
            if load_i64(a.moving + 8 * (a.n_segment * h + s)) == 0:
                continue
            unpack(key_at(a.k_pages, a.k_table, a.n_head_kv, h, tile, head_dim), panel)
            at = a.n_slot * h + cluster
            find_nearest(panel, a.centroids + row * at, a.norms + 4 * at, cluster, n_cluster)
            for j in range(max(first, tile), min(end, tile + NR)):
                # A NaN key is nearest to no centroid: it joins the first.
                label = max(load_i32(panel + labels_at + 4 * (j - tile)), cluster)
                store_i32(a.labels + 4 * (a.capacity * h + j), label)

    return kernel


@njit(error_model="numpy")
def sort_by_label(labels, starts, order, cursor, span, clusters, n_sink):
    """Counting sort of the positions of one segment (see TACTIC_MEAN)."""
    first, end = span
    low, high = clusters
    for c in range(low, high):
        store_i32(cursor + 4 * c, 0)
    for j in range(first, end):
        at = cursor + 4 * load_i32(labels + 4 * j)
        store_i32(at, load_i32(at) + 1)
    before = first - n_sink
    for c in range(low, high):
        size = load_i32(cursor + 4 * c)
        store_i32(starts + 4 * c, before)
        store_i32(cursor + 4 * c, before)
        before += size
    for j in range(first, end):
        at = cursor + 4 * load_i32(labels + 4 * j)
        store_i32(order + 4 * load_i32(at), j)
        store_i32(at, load_i32(at) + 1)


def tactic_mean(head_dim: int) -> Any:
    """Kernel of TACTIC_MEAN: threads stride over segments of KV heads."""

    @njit(error_model="numpy")
    def replace(centroid, mean, norm, members, pages):
        """Make the mean of the members (order, low, high) the centroid.

        Returns whether it moved.
        """
        order, low, high = members
        k_pages, k_table, n_head_kv, h = pages
        part, total, moved = splat_f32x16(np.float32(high - low)), zero_f32x16(), zero_f32x16()
        for i in range(0, head_dim, 16):
            x = zero_f32x16()
            for s in range(low, high):
                j = load_i32(order + 4 * s)
                x += load_f16x16(key_at(k_pages, k_table, n_head_kv, h, j, head_dim) + 2 * i)
            x /= part
            moved = vmax(moved, vabs(x - load_f32x16(centroid + 4 * i)))
            store_f32x16(centroid + 4 * i, x)
            store_f16x16(mean + 2 * i, x)
            total += x * x
        store_f32(norm, -hsum(total) / 2)
        return hmax(moved) > ZERO

    def kernel(tid, n_thread, a):
        begin = first_segment(a.extent, a.segment, a.n_sink)
        for item in range(begin * a.n_head_kv + tid, a.n_segment * a.n_head_kv, n_thread):
            h, s = item % a.n_head_kv, item // a.n_head_kv
            first, end, cluster, n_cluster = segment_at(
                a.extent, s, a.segment, a.per_cluster, a.n_sink
            )
            moves = a.moving + 8 * (a.n_segment * h + s)
            if n_cluster == 0 or load_i64(moves) == 0:
                continue
            last, head_order = cluster + n_cluster, a.order + 4 * a.capacity * h
            head_starts, ends = a.starts + 4 * (a.n_slot + 1) * h, a.cursor + 4 * a.n_slot * h
            sort_by_label(
                a.labels + 4 * a.capacity * h, head_starts, head_order, ends, (first, end),
                (cluster, last), a.n_sink,
            )  # fmt: skip
            if last == load_i64(a.extent + 16):
                store_i32(head_starts + 4 * last, end - a.n_sink)
            changed, pages = 0, (a.k_pages, a.k_table, a.n_head_kv, h)
            for c in range(cluster, last):
                low, high = load_i32(head_starts + 4 * c), load_i32(ends + 4 * c)
                at = a.n_slot * h + c
                centroid, mean = a.centroids + 4 * head_dim * at, a.means + 2 * head_dim * at
                if low < high:
                    members = head_order, low, high
                    changed |= replace(centroid, mean, a.norms + 4 * at, members, pages)
            store_i64(moves, changed)

    return kernel


# --- the budget ----------------------------------------------------------------------------------


def tactic_score(head_dim: int, group: int) -> Any:
    """Kernel of TACTIC_SCORE: threads share the clusters of each KV head, for all of its heads."""
    keys, row = KEYS if group <= 3 else 4 if group <= 6 else 2, 4 * head_dim

    def kernel(tid, n_thread, a):
        n = (load_i64(a.extent + 16) + 15) // 16
        for h in range(a.n_head_kv):
            heads, first = a.q + row * group * h, 2 * head_dim * a.n_slot * h
            for c in range(n * tid // n_thread * 16, n * (tid + 1) // n_thread * 16, keys):
                at = a.means + first + 2 * head_dim * c
                sums = zero_grid(group, keys)
                for d in range(0, head_dim, LANES):
                    query = load_column(heads + 4 * d, row, group)
                    part = load_half_spaced(at + 2 * d, 2 * head_dim, keys)
                    sums = add_products(sums, query, part)
                store_sums(a.scores + 4 * (a.n_slot * group * h + c), 4 * a.n_slot, sums)

    return kernel


@njit(error_model="numpy")
def spread_of(scores, n):
    """The lowest and the highest of n scores.

    Entries up to the next multiple of LANES are readable.
    """
    low = high = load_f32(scores)
    whole = n // LANES * LANES
    if whole > 0:
        least = most = load_f(scores)
        for i in range(LANES, whole, LANES):
            x = load_f(scores + 4 * i)
            least, most = vmin(x, least), vmax(x, most)
        low, high = -hmax(zero_f() - least), hmax(most)
    for i in range(whole, n):
        x = load_f32(scores + 4 * i)
        low, high = min(low, x), max(high, x)
    return low, high


@njit(error_model="numpy")
def sort_clusters(scores, keys, other, counts, rank, n):
    """Cluster numbers by falling score in FINEST steps, ties by number, to rank."""
    low, high = spread_of(scores, n)
    factor, top = splat_f(FINEST / (high - low) if high > low else ZERO), splat_f(high)
    for i in range(0, n, LANES):
        store_i(keys + 4 * i, round_i32((top - load_f(scores + 4 * i)) * factor))
    sort_by_keys(keys, other, counts, rank, n)


@njit(error_model="numpy")
def sort_by_keys(keys, other, counts, rank, n):
    """Sort 0 .. n - 1 by ascending 16-bit key, ties by number, to rank: two passes.

    Of a longer key, such as that of a NaN, the lowest 16 bits count.
    """
    for i in range(0, 512, 16):
        store_f32x16(counts + 4 * i, zero_f32x16())
    for i in range(n):
        key = load_u32(keys + 4 * i)
        for at in (counts + 4 * (key & 255), counts + 1024 + 4 * (key >> 8 & 255)):
            store_i32(at, load_i32(at) + 1)
    before_each(counts)
    before_each(counts + 1024)
    for i in range(n):
        at = counts + 4 * (load_u32(keys + 4 * i) & 255)
        store_i32(other + 4 * load_i32(at), i)
        store_i32(at, load_i32(at) + 1)
    for i in range(n):
        c = load_i32(other + 4 * i)
        at = counts + 1024 + 4 * (load_u32(keys + 4 * c) >> 8 & 255)
        store_i32(rank + 4 * load_i32(at), c)
        store_i32(at, load_i32(at) + 1)


@njit(error_model="numpy")
def before_each(counts):
    """Turn 256 counts into the sums of the counts before each."""
    before = 0
    for i in range(256):
        size = load_i32(counts + 4 * i)
        store_i32(counts + 4 * i, before)
        before += size


@njit(error_model="numpy")
def weight_sum(weights, n):
    """The sum of n weights."""
    total = zero_f()
    for i in range(0, n // LANES * LANES, LANES):
        total += load_f(weights + 4 * i)
    rest = hsum(total)
    for i in range(n // LANES * LANES, n):
        rest += load_f32(weights + 4 * i)
    return float(rest)


@njit(error_model="numpy")
def least_count(weights, n, need):
    """The number of first weights that sum to `need` (n if all do not), and their sum."""
    reached, k = 0.0, 0
    while k < n and reached < need:
        reached += load_f32(weights + 4 * k)
        k += 1
    return k, reached


@njit(error_model="numpy")
def curve_sum(a, b, first, last):
    """Sum over i = first + 1 .. last of max(a / i + b, 0), by the midpoint rule.

    The sum of 1 / i is off by less than 1 / (24 first^2): 1e-4 for 20 exact weights.
    """
    low, high = float(first), float(last)
    if a >= 0.0 and b < 0.0:
        high = min(high, -a / b)  # the curve is negative from there on
    elif a < 0.0:
        low = max(low, -a / b) if b > 0.0 else high
    if high <= low:
        return 0.0
    return a * math.log((high + 0.5) / (low + 0.5)) + b * (high - low)


@njit(error_model="numpy")
def budget(weights, n_first, n, fit, outside, share):
    """Least k whose first k weights reach the share (Alg. 1, line 11).

    outside: weight that is attended anyway and counts, or 0.
    """
    a, b = fit
    total = outside + weight_sum(weights, n_first) + curve_sum(a, b, n_first, n)
    need = share * total - outside
    k, reached = least_count(weights, n_first, need)
    if reached >= need:
        return k
    low, high = n_first, n  # the curve's sum never decreases: bisect
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


@njit(error_model="numpy")
def exponentiate(logits, n, top):
    """Convert logits to weights relative to `top`, at most e^80.

    Overwrites up to the vector's end.
    """
    for i in range(0, n, LANES):
        above = vmin(load_f(logits + 4 * i) - splat_f(top), splat_f(LARGEST_RATIO))
        store_f(logits + 4 * i, vexp(above))


@njit(error_model="numpy")
def highest(logits, n):
    """The largest of n logits."""
    return spread_of(logits, n)[1] if n > 0 else LOWEST


@njit(error_model="numpy")
def note_rows(rows, pages, positions, n):
    """List the rows of n positions, and prefetch their keys: they are read once all are listed."""
    k_pages, k_table, n_head_kv, h, size = pages
    for i in range(n):
        j = load_i32(positions + 4 * i)
        row = (load_i32(k_table + 4 * (j // PAGE)) * n_head_kv + h) * PAGE + j % PAGE
        store_i32(rows + 4 * i, row)
        for line in range(0, size, LINE):
            prefetch(k_pages + size * row + line)


@njit(error_model="numpy")
def list_ranked(to, clusters, low, high):
    """List the positions low .. high - 1 in the order of clusters."""
    order, starts, rank, ends, n_cluster = clusters
    i = first_at_least(ends, 0, n_cluster, low + 1)
    while low < high:
        cluster, end = load_i32(rank + 4 * i), load_i32(ends + 4 * i)
        later = load_i32(rank + 4 * min(i + SOON, n_cluster - 1))
        prefetch(order + 4 * load_i32(starts + 4 * later))
        prefetch(order + 4 * load_i32(starts + 4 * later) + LINE)
        after, n = load_i32(starts + 4 * cluster + 4), min(end, high) - low
        for s in range(after - (end - low), after - (end - low) + n):
            store_i32(to, load_i32(order + 4 * s))
            to += 4
        i, low = i + 1, low + n
    return to


@njit(error_model="numpy")
def list_span(to, low, high):
    """List positions low .. high - 1."""
    for j in range(low, high):
        store_i32(to, j)
        to += 4
    return to


@njit(error_model="numpy")
def estimate(guesses, sizes, weights, first, n, top):
    """Estimate the weights of the clusters from `first` in rank on, with equal members."""
    total = zero_f()
    for i in range(first, n, LANES):
        x = vexp(load_f(guesses + 4 * i) - splat_f(top)) * load_f(sizes + 4 * i)
        store_f(weights + 4 * i, x)
        total += x
    return float(hsum(total))


@njit(error_model="numpy")
def draw(to, clusters, estimates, first, tail, n_sample):
    """List n_sample positions, at equal steps of the clusters' weights, and their estimates."""
    order, starts, rank, _, n_cluster = clusters
    weights, guesses, at_guesses = estimates
    i, before = first, 0.0
    for n in range(n_sample):
        point = (n + 0.5) / n_sample * tail
        while i < n_cluster - 1 and before + load_f32(weights + 4 * i) <= point:
            before += load_f32(weights + 4 * i)
            i += 1
        cluster, weight = load_i32(rank + 4 * i), load_f32(weights + 4 * i)
        low, high = load_i32(starts + 4 * cluster), load_i32(starts + 4 * cluster + 4)
        part = (point - before) / weight if weight > ZERO else 0.0
        within = int(min(part, 1.0) * (high - low)) if part > 0.0 else 0  # NaN: the first
        at = order + 4 * min(high - 1, low + within)
        prefetch(at)
        store_i32(to + 4 * n, at - order)
        store_f32(at_guesses + 4 * n, load_f32(guesses + 4 * i))
    for n in range(n_sample):
        store_i32(to + 4 * n, load_i32(order + load_i32(to + 4 * n)))
    return to + 4 * n_sample


@njit(error_model="numpy")
def mean_ratio(logits, guesses, n):
    """The ratio of samples' weights to their estimates; logits are overwritten."""
    for i in range(0, n, LANES):
        ratio = load_f(logits + 4 * i) - load_f(guesses + 4 * i)
        store_f(logits + 4 * i, vexp(vmin(ratio, splat_f(LARGEST_RATIO))))
    return weight_sum(logits, n) / n


@njit(error_model="numpy")
def follow(scores, clusters, guesses, sizes, scale):
    """In the order of rank, write positions up to a cluster's end, its scaled score and size.

    Up to LANES - 1 empty clusters follow.
    """
    _, starts, rank, ends, n_cluster = clusters
    total = 0
    for i in range(n_cluster):
        c = load_i32(rank + 4 * i)
        size = load_i32(starts + 4 * c + 4) - load_i32(starts + 4 * c)
        total += size
        store_i32(ends + 4 * i, total)
        store_f32(guesses + 4 * i, load_f32(scores + 4 * c) * scale)
        store_f32(sizes + 4 * i, np.float32(size))
    store_f(guesses + 4 * n_cluster, splat_f(LOWEST))
    store_f(sizes + 4 * n_cluster, zero_f())


def weighing(head_dim: int, n_head: int) -> Any:
    """The function weigh(heads, k_pages, rows, end, logits, stride, scale).

    The scaled products of n_head neighbouring queries with the keys of the rows listed up to `end`,
    to logits + stride * head; KEYS more rows and LANES more logits are written.
    """
    n_key = widest(n_head, lambda n: KEYS % n == 0)
    lanes_row, size = 4 * head_dim, 2 * head_dim

    @njit(error_model="numpy")
    def weigh(heads, k_pages, rows, end, logits, stride, scale):
        last = load_i32(end - 4) if end > rows else 0
        for i in range(KEYS):
            store_i32(end + 4 * i, last)
        for i in range(0, (end - rows) // 4, n_key):
            keys = addresses(rows + 4 * i, k_pages, size, n_key)
            sums = zero_grid(n_head, n_key)
            for d in range(0, head_dim, LANES):
                query = load_column(heads + 4 * d, lanes_row, n_head)
                sums = add_products(sums, query, load_half_each(keys, 2 * d))
            store_sums(logits + 4 * i, stride, sums)
        for g in range(n_head):
            for i in range(0, (end - rows) // 4, LANES):
                at = logits + stride * g + 4 * i
                store_f(at, load_f(at) * splat_f(scale))

    return weigh


@njit(error_model="numpy")
def room_of(a, r):
    """A head's scratch, see ops.tactic_work: arrays over ordered clusters, and the other lists.

    The former are the clusters' ends, guesses, sizes and weights; the latter counts, samples'
    guesses, rows and logits.
    """
    row, n_list = 4 * (a.n_slot + 16), list_size(a.capacity)
    room = a.work + 4 * (row + 512 + TACTIC_SAMPLES + 2 * n_list) * r
    counts = room + 4 * row
    at_samples = counts + 4 * 512
    rows = at_samples + 4 * TACTIC_SAMPLES
    lists = counts, at_samples, rows, rows + 4 * n_list
    return (room, room + row, room + 2 * row, room + 3 * row), lists


@njit(error_model="numpy")
def windows_of(n):
    """The centres of two windows of the order, and their first, end, first, end."""
    x_1, x_2, half = n // 10, n * 6 // 10, half_window(n)
    first, other = (
        (max(0, x_1 - half), min(n, x_1 + half)),
        (max(0, x_2 - half), min(n, x_2 + half)),
    )
    return x_1, x_2, (*first, *other)


@njit(error_model="numpy")
def first_of(a, ends, n_cluster, n):
    """The number of first positions that are weighted, of n; with samples, of whole clusters."""
    n_least = max(20, int(a.first_share * n))
    if a.n_sample == 0:
        return min(n, n_least), 0
    last = first_at_least(ends, 0, n_cluster - 1, n_least)
    return load_i32(ends + 4 * last), last


def tactic_rank() -> Any:
    """Kernel of TACTIC_RANK: threads stride over query heads."""

    @njit(error_model="numpy")
    def list_weighed(a, to, clusters, estimates, n_kv):
        """List the positions that a head weights; returns the list's end."""
        ends, guesses, sizes, weights, at_samples = estimates
        end, n_cluster = load_i64(a.extent + 8), clusters[4]
        n_first, last = first_of(a, ends, n_cluster, end - a.n_sink)
        to = list_ranked(to, clusters, 0, n_first)
        if a.n_sample == 0:
            low_1, high_1, low_2, high_2 = windows_of(end - a.n_sink)[2]
            to = list_ranked(to, clusters, low_1, high_1)
            to = list_ranked(to, clusters, low_2, high_2)
        if a.counted != 0:
            to = list_span(list_span(to, 0, a.n_sink), end, n_kv)
        if a.n_sample > 0:
            top = load_f32(guesses)
            tail = estimate(guesses, sizes, weights, last + 1, n_cluster, top)
            if tail > 0.0:
                of_samples = weights, guesses, at_samples
                to = draw(to, clusters, of_samples, last + 1, tail, a.n_sample)
        return to

    def kernel(tid, n_thread, a):
        n_kv, n_cluster = load_i64(a.step + STEP.pos) + 1, load_i64(a.extent + 16)
        for r in range(tid, a.n_head, n_thread):
            store_i32(a.counts + 4 * r, 0)
            if n_cluster == 0:
                continue
            h, (of_clusters, lists) = r // a.heads_per_kv, room_of(a, r)
            ends, guesses, sizes, weights = of_clusters
            own, ranked = a.scores + 4 * a.n_slot * r, a.rank + 4 * a.n_slot * r
            sort_clusters(own, guesses, sizes, lists[0], ranked, n_cluster)
            if a.share >= 1:
                continue
            head_starts = a.starts + 4 * (a.n_slot + 1) * h
            clusters = a.order + 4 * a.capacity * h, head_starts, ranked, ends, n_cluster
            follow(own, clusters, guesses, sizes, a.scale)
            listed = a.sets + 4 * a.set_capacity * r
            estimates = ends, guesses, sizes, weights, lists[1]
            to = list_weighed(a, listed, clusters, estimates, n_kv)
            store_i32(a.counts + 4 * r, (to - listed) // 4)

    return kernel


def tactic_budget(head_dim: int) -> Any:
    """Kernel of TACTIC_BUDGET: threads stride over query heads."""
    weigh, size = weighing(head_dim, 1), 2 * head_dim

    @njit(error_model="numpy")
    def fit_budget(a, logits, n_first, n_all):
        """The budget of Alg. 1; see 4.4."""
        n = load_i64(a.extent + 8) - a.n_sink
        exponentiate(logits, n_all, highest(logits, n_all))
        x_1, x_2, (low_1, high_1, low_2, high_2) = windows_of(n)
        n_1, n_2 = high_1 - low_1, high_2 - low_2
        at_1 = logits + 4 * n_first
        at_2, at_3 = at_1 + 4 * n_1, at_1 + 4 * (n_1 + n_2)
        mu_1, mu_2 = weight_sum(at_1, n_1) / n_1, weight_sum(at_2, n_2) / n_2
        fit = fitted(mu_1, mu_2, max(1, x_1), max(2, x_2))
        outside = weight_sum(at_3, n_all - n_first - n_1 - n_2)
        return budget(logits, n_first, n, fit, outside, a.share)

    @njit(error_model="numpy")
    def sample_budget(a, logits, n_all, of_clusters, first, at_samples):
        """Whole clusters whose weight reaches the share, the rest estimated from samples."""
        (ends, guesses, sizes, weights), (n_first, last) = of_clusters, first
        n_cluster, end = load_i64(a.extent + 16), load_i64(a.extent + 8)
        n_exact, factor = n_first, 0.0
        if a.counted != 0:
            n_exact += a.n_sink + load_i64(a.step + STEP.pos) + 1 - end
        if n_all > n_exact:
            ratio = mean_ratio(logits + 4 * n_exact, at_samples, a.n_sample)
            factor = ratio * (1.0 + a.margin)
        top = max(highest(logits, n_exact), load_f32(guesses))
        exponentiate(logits, n_exact, top)
        outside = weight_sum(logits + 4 * n_first, n_exact - n_first)
        exact = weight_sum(logits, n_first)
        tail = estimate(guesses, sizes, weights, last + 1, n_cluster, top)
        need = a.share * (outside + exact + factor * tail) - outside
        k, reached = least_count(logits, n_first, need)
        i = first_at_least(ends, 0, n_cluster - 1, k) if k > 0 else -1
        while reached < need and i < n_cluster - 1:
            i += 1
            reached += factor * load_f32(weights + 4 * i)
        return load_i32(ends + 4 * i) if i >= 0 else 0

    def kernel(tid, n_thread, a):
        end, n_cluster = load_i64(a.extent + 8), load_i64(a.extent + 16)
        for r in range(tid, a.n_row, n_thread):
            store_i32(a.keep + 4 * r, end - a.n_sink if n_cluster > 0 else 0)
            if n_cluster == 0 or a.share >= 1:
                continue
            h, (of_clusters, lists) = r // a.heads_per_kv, room_of(a, r)
            _, at_samples, rows, logits = lists
            begin = load_i32(a.indptr + 4 * r)
            n_all = load_i32(a.indptr + 4 * r + 4) - begin
            pages = a.k_pages, a.k_table, a.n_head_kv, h, size
            note_rows(rows, pages, a.places + 4 * begin, n_all)
            weigh(a.q + 4 * head_dim * r, a.k_pages, rows, rows + 4 * n_all, logits, 0, a.scale)
            first = first_of(a, of_clusters[0], n_cluster, end - a.n_sink)
            if a.n_sample == 0:
                n_kept = fit_budget(a, logits, first[0], n_all)
            else:
                n_kept = sample_budget(a, logits, n_all, of_clusters, first, at_samples)
            store_i32(a.keep + 4 * r, n_kept)

    return kernel


# --- the selection -------------------------------------------------------------------------------


def tactic_mark(group: int) -> Any:
    """Kernel of TACTIC_MARK: threads stride over rows.

    A head keeps the first members of a cluster: if its last one is marked, all of them are.
    """

    @njit(error_model="numpy")
    def is_marked(row, j):
        return load_i64(row + 8 * (j >> 6)) >> (j & 63) & 1

    @njit(error_model="numpy")
    def mark(row, members, n):
        """Set the bits of n positions; return how many were not set."""
        found = 0
        for i in range(n):
            j = load_i32(members + 4 * i)
            before = load_i64(row + 8 * (j >> 6))
            after = before | (1 << (j & 63))
            found += before != after
            store_i64(row + 8 * (j >> 6), after)
        return found

    def kernel(tid, n_thread, a):
        for r in range(tid, a.n_row, n_thread):
            row, h, found = a.marks + a.capacity // 8 * r, r * group // a.heads_per_kv, 0
            n_cluster = load_i64(a.extent + 16)
            head_starts = a.starts + 4 * (a.n_slot + 1) * h
            head_order = a.order + 4 * a.capacity * h
            for word in range((load_i64(a.extent + 8) + 63) // 64):
                store_i64(row + 8 * word, 0)
            for head in range(r * group, (r + 1) * group):
                left, i = load_i32(a.keep + 4 * head), 0
                while left > 0:
                    cluster = load_i32(a.rank + 4 * (a.n_slot * head + i))
                    later = load_i32(a.rank + 4 * (a.n_slot * head + min(i + SOON, n_cluster - 1)))
                    soon = load_i32(head_starts + 4 * later)
                    prefetch(head_order + 4 * soon)
                    prefetch(head_order + 4 * soon + LINE)
                    at = head_starts + 4 * cluster
                    members = head_order + 4 * load_i32(at)
                    n = min(left, load_i32(at + 4) - load_i32(at))
                    if n > 0 and not is_marked(row, load_i32(members + 4 * (n - 1))):
                        found += mark(row, members, n)
                    left, i = left - n, i + 1
            store_i32(a.count + 4 * r, found)

    return kernel


def tactic_select() -> Any:
    """Kernel of TACTIC_SELECT: threads stride over rows."""

    def kernel(tid, n_thread, a):
        n_kv = load_i64(a.step + STEP.pos) + 1
        first = min(a.n_sink, n_kv)
        end = min(n_kv, max(first, load_i64(a.extent + 8)))
        n_outside = first + n_kv - end
        store_i32(a.indptr, 0)
        for r in range(tid, a.n_row, n_thread):
            begin = n_outside * r
            for i in range(r):
                begin += load_i32(a.count + 4 * i)
            at, row = a.indices + 4 * begin, a.marks + a.capacity // 8 * r
            for j in range(first):
                store_i32(at, j)
                at += 4
            for word in range((load_i64(a.extent + 8) + 63) // 64):
                left = load_i64(row + 8 * word)
                while left != 0:
                    store_i32(at, 64 * word + lowest_bit(left))
                    left &= left - 1
                    at += 4
            for j in range(end, n_kv):
                store_i32(at, j)
                at += 4
            store_i32(a.indptr + 4 * (r + 1), begin + n_outside + load_i32(a.count + 4 * r))

    return kernel
