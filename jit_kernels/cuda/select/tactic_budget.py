"""Tactic's budget: take clusters by descending score, and find how many positions to select.

A block for each query head sorts its clusters, and blocks list parts of the keys to weigh; then
blocks weigh these parts, and a block for each head concludes.

Sums are float64, of float32 weights.
"""

import math
from typing import Any, NamedTuple

from numba import cuda, float32, float64, int32, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP, TACTIC_SAMPLES, tactic_half_window, tactic_list
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E, first_at_least
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, staging
from tamis.jit_kernels.cuda.kv.kv_rows import key_row
from tamis.jit_kernels.cuda.lang.grid import (
    MOST_THREADS,
    MOST_WARPS,
    THREADS,
    Launch,
    block_before,
    largest,
    sum_of,
    sums_before,
    sync_block,
    thread,
    threads,
    total_of,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    int64,
    load_f32,
    load_i32,
    load_i64,
    ordered,
    quotient,
    rounded,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    exp2,
    inverse_root,
    load_shared,
    load_shared_i64,
    shared_address,
    store_shared_i64,
)
from tamis.jit_kernels.cuda.select.common import LOWEST

LARGEST_RATIO = 80.0  # logarithm of what a sample may weigh beside its estimate
RANKED = 8192  # clusters that a block holds while they are ranked
BINS = 4096  # that scores are counted in before those of a bin are compared
WIDTH = 8.0  # standard deviations of scores that bins share
list_size = device(tactic_list)
half_window = device(tactic_half_window)


# ---- over a block --------------------------------------------------------------------------------
@device
def largest_of(floats, n, sums):
    """The maximum of n float32s; LOWEST if n is 0."""
    mine = LOWEST
    for i in range(thread(), n, THREADS):
        mine = max(mine, float64(load_f32(floats + 4 * i)))
    return largest(mine, sums)


@device
def least_count(weights, n, need, sums, found):
    """The shortest prefix of weights whose sum reaches `need` (n if none does), and the whole sum.

    A thread has neighbouring ones. found: a shared array of two int32.
    """
    if thread() == 0:
        found[0] = n
    sync_block()
    share = (n + THREADS - 1) // THREADS
    first, mine = min(n, share * thread()), 0.0
    end = min(n, first + share)
    for i in range(first, end):
        mine += float64(load_f32(weights + 4 * i))
    reached, total = sums_before(mine, sums)
    if reached < need and need <= reached + mine:
        i = first
        reached += float64(load_f32(weights + 4 * i))
        while reached < need and i < end - 1:
            i += 1
            reached += float64(load_f32(weights + 4 * i))
        found[0] = i + 1
    sync_block()
    k = found[0] if need > 0 else 0
    sync_block()
    return k, total


# ---- the order -----------------------------------------------------------------------------------
@device
def bin_of(x, scale):
    """The bin of a score; bins are linear in it, from high scores down."""
    high, factor = scale
    return max(0, min(BINS - 1, rounded((high - x) * factor)))


@device
def scale_of(scores, n, tops):
    """The score of the first bin, and what a distance from it is multiplied by.

    Bins share WIDTH standard deviations round the mean: a score far from all takes no room. Sums
    are of distances from one score.
    """
    i, origin, mine, squares = thread(), load_f32(scores), float32(0), float32(0)
    while i < n:  # a range divides by its step
        x = load_f32(scores + 4 * i) - origin
        x = x if abs(x) < float32(1e15) else float32(0)
        mine, squares = mine + x, squares + x * x
        i += threads()
    mean = total_of(mine, tops) / float32(n)
    spread = total_of(squares, tops) / float32(n) - mean * mean
    if not spread > float32(1e-30):
        return origin, float32(0)
    deviation = inverse_root(spread) * spread
    first = origin + mean + float32(WIDTH / 2) * deviation
    return first, float32((BINS - 1) / WIDTH) / deviation


@device
def place_bins(bins, parts):
    """Make where bins begin of how many they hold."""
    share, mine = quotient(BINS, threads()), int32(0)
    first = share * thread()
    for i in range(share):
        mine += bins[first + i]
    before, _ = block_before(int32(mine), parts)
    for i in range(share):
        size = bins[first + i]
        bins[first + i] = before
        before += size
    sync_block()


@device
def word_of(x, i):
    """A number that is larger the earlier score x of cluster i is in the order."""
    return int64(ordered(x)) << 31 | 0x7FFFFFFF - i


@device
def binned(scores, listed, shared, p):
    """Entry p of the scores by bin, as word_of has it."""
    if p < RANKED:
        return load_shared_i64(uint32(shared + 8 * p))
    i = load_i32(listed + 4 * p)
    return word_of(load_f32(scores + 4 * i), i)


@device
def order_clusters(scores, n, listed, rank, arrays):
    """Rank n scores by falling value, ties by index: each is compared with those of its bin.

    listed: scratch for n int32. arrays: shared ones of BINS int32, of an int32 and of a float32 a
    warp, and the address of RANKED int64.
    """
    bins, parts, tops, shared = arrays
    i = thread()
    while i < BINS:
        bins[i] = 0
        i += threads()
    scale = scale_of(scores, n, tops)
    sync_block()
    i = thread()
    while i < n:
        at = bin_of(load_f32(scores + 4 * i), scale)
        cuda.atomic.add(bins, at, 1)  # type: ignore[call-arg]
        i += threads()
    sync_block()
    place_bins(bins, parts)
    i = thread()
    while i < n:
        x = load_f32(scores + 4 * i)
        place: Any = cuda.atomic.add(bins, bin_of(x, scale), 1)  # type: ignore[call-arg]
        if place < RANKED:
            store_shared_i64(uint32(shared + 8 * place), word_of(x, i))
        else:
            store_i32(listed + 4 * place, i)
        i += threads()
    sync_block()  # a bin is now where it ends
    i = thread()
    while i < n:
        x = load_f32(scores + 4 * i)
        own, at = word_of(x, i), bin_of(x, scale)
        p, end = bins[at - 1] if at > 0 else int32(0), bins[at]
        to = p
        while p < end:
            to += 1 if binned(scores, listed, shared, p) > own else 0
            p += 1
        store_i32(rank + 4 * to, i)
        i += threads()
    sync_block()


class Lists(NamedTuple):
    """A head's scratch: addresses of lists."""

    logits: Any  # of the listed keys
    guesses: Any  # of clusters in the order of rank
    sizes: Any  # scratch while they are ranked
    weights: Any  # running sums
    at_samples: Any  # guesses of the clusters that samples are of


@device
def follow(scores, starts, rank, tables, n_cluster, scale, parts):
    """For clusters in rank order: cumulative positions, scaled score, size.

    A thread has neighbouring ones.
    """
    (ends, guesses, sizes), total = tables, 0
    share = quotient(n_cluster + threads() - 1, threads())
    first = min(n_cluster, share * thread())
    end = min(n_cluster, first + share)
    for i in range(first, end):
        at = starts + 4 * load_i32(rank + 4 * i)
        total += load_i32(at + 4) - load_i32(at)
    total, _ = block_before(int32(total), parts)
    for i in range(first, end):
        c = load_i32(rank + 4 * i)
        n = load_i32(starts + 4 * c + 4) - load_i32(starts + 4 * c)
        total += n
        store_i32(ends + 4 * i, total)
        store_f32(guesses + 4 * i, load_f32(scores + 4 * c) * scale)
        store_f32(sizes + 4 * i, float32(n))
    sync_block()


# ---- listed keys ---------------------------------------------------------------------------------
@device
def list_ranked(to, clusters, low, high):
    """List members low .. high - 1, counted in rank order; return the list's end."""
    order, starts, rank, ends, n_cluster = clusters
    for p in range(low + thread(), high, THREADS):
        i = first_at_least(ends, 0, n_cluster, p + 1)
        after = load_i32(starts + 4 * load_i32(rank + 4 * i) + 4)
        j = load_i32(order + 4 * (after - (load_i32(ends + 4 * i) - p)))
        store_i32(to + 4 * (p - low), j)
    return to + 4 * max(0, high - low)


@device
def list_span(to, low, high):
    """List positions low .. high - 1; return the list's end."""
    for j in range(low + thread(), high, THREADS):
        store_i32(to + 4 * (j - low), j)
    return to + 4 * max(0, high - low)


class Weighed(NamedTuple):
    """Positions whose keys are weighed: some in the order of rank, the others in the cache."""

    first: Any  # of the order: so many first ones
    low_1: Any  # and two ranges
    high_1: Any
    low_2: Any
    high_2: Any
    n_sink: Any  # of the cache: so many first ones
    end: Any  # and another range
    n_kv: Any


@device
def n_weighed(w):
    """The number of weighed positions in the order of rank, and of all."""
    n = w.first + w.high_1 - w.low_1 + w.high_2 - w.low_2
    return n, n + w.n_sink + w.n_kv - w.end


@device
def weighed_at(w, i):
    """The i-th weighed position: its number in the order or in the cache, and which of the two."""
    n_1, n_2 = w.high_1 - w.low_1, w.high_2 - w.low_2
    if i < w.first:
        return i, True
    i -= w.first
    if i < n_1:
        return w.low_1 + i, True
    i -= n_1
    if i < n_2:
        return w.low_2 + i, True
    i -= n_2
    return (i if i < w.n_sink else w.end + i - w.n_sink), False


@device
def list_weighed(to, clusters, w, low, high):
    """List the weighed positions low .. high - 1."""
    order, starts, rank, ends, n_cluster = clusters
    for i in range(low + thread(), high, threads()):
        j, ranked = weighed_at(w, i)
        if ranked:
            c = first_at_least(ends, 0, n_cluster, j + 1)
            after = load_i32(starts + 4 * load_i32(rank + 4 * c) + 4)
            j = load_i32(order + 4 * (after - (load_i32(ends + 4 * c) - j)))
        store_i32(to + 4 * i, j)


@device
def exponentiate(logits, n, top):
    """Replace logits by exp(logit - top), at most e^80."""
    for i in range(thread(), n, THREADS):
        above = min(load_f32(logits + 4 * i) - top, float32(LARGEST_RATIO))
        store_f32(logits + 4 * i, exp2(above * float32(LOG2_E)))
    sync_block()


def summing(weight: Any) -> Any:
    """The function that writes the running sums of weight(of, i), i = first .. n - 1."""

    @device
    def running_sums(of, weights, first, n, sums):
        reached = 0.0
        for start in range(first, n, THREADS):
            i, x = start + thread(), 0.0
            if i < n:
                x = float64(weight(of, i))
            before, total = sums_before(x, sums)
            if i < n:
                store_f32(weights + 4 * i, float32(reached + before + x))
            reached += total
        sync_block()
        return reached

    return running_sums


@device
def first_above(weights, low, high, value):
    """The first of the running sums low .. high - 1 that is above the value, or high - 1."""
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if float64(load_f32(weights + 4 * middle)) > value:
            high = middle
        else:
            low = middle + 1
    return low


@device
def draw(to, clusters, lists, first, tail, n_sample):
    """List n_sample positions at equal steps of the clusters' weights, with their estimates."""
    order, starts, rank, _, n_cluster = clusters
    weights, n = lists.weights, thread()
    if n < n_sample:
        point = (n + 0.5) / n_sample * tail
        i = first_above(weights, first, n_cluster, point)
        before = float64(load_f32(weights + 4 * (i - 1))) if i > first else 0.0
        weight = float64(load_f32(weights + 4 * i)) - before
        cluster = load_i32(rank + 4 * i)
        low, high = load_i32(starts + 4 * cluster), load_i32(starts + 4 * cluster + 4)
        within = int((point - before) / weight * (high - low)) if weight > 0.0 else 0
        store_i32(to + 4 * n, load_i32(order + 4 * min(high - 1, low + max(0, within))))
        store_f32(lists.at_samples + 4 * n, load_f32(lists.guesses + 4 * i))
    sync_block()


def weighing(head_dim: int, group: int) -> Any:
    """The function that writes the scaled products of queries with listed keys to logits.

    listed: their KV head, their places, and how many there are. Queries lie one after the other,
    their logits `stride` bytes apart.
    """

    @device
    def key_of(keys, i):
        k_pages, k_table, n_head_kv, h, places, n = keys
        j = load_i32(places + 4 * min(i, n - 1))
        row = key_row(k_table, n_head_kv, h, j)
        return k_pages + 2 * head_dim * row if i < n else 0

    stage = staging(head_dim, group, key_of)

    @device
    def weigh(a, shared, heads, listed, logits, stride):
        h, places, n = listed
        sync_block()
        for start in range(0, n, SPAN):
            keys = a.k_pages, a.k_table, a.n_head_kv, h, places, n
            stage(shared, heads, group, keys, start)
            if start + thread() < n:
                for g in range(group):
                    x = load_shared(uint32(shared + ROW * g + 4 * thread())) * a.scale
                    store_f32(logits + stride * g + 4 * (start + thread()), x)
            sync_block()  # before the next span's products overwrite what is read here

    return weigh


# ---- Alg. 1 --------------------------------------------------------------------------------------
@device
def curve_sum(a, b, first, last):
    """Sum over i = first + 1 .. last of max(a / i + b, 0), by the midpoint rule."""
    low, high = float64(first), float64(last)
    if a >= 0.0 and b < 0.0:
        high = min(high, -a / b)  # from there on the curve is below zero
    elif a < 0.0:
        low = max(low, -a / b) if b > 0.0 else high
    if high <= low:
        return 0.0
    return a * math.log((high + 0.5) / (low + 0.5)) + b * (high - low)


@device
def windows_of(n):
    """The centres and half width of the two windows that the fitted curve goes through."""
    return n // 10, n * 6 // 10, half_window(n)


@device
def curve_budget(logits, sizes, n, share, sums, found):
    """The least k whose first k weights reach the share (Alg. 1, line 11), by a fitted curve (4.4).

    sizes: how many of the weights are the first ones, how many each window has, and how many are
    outside of the clusters.
    """
    n_first, n_1, n_2, n_outside = sizes
    x_1, x_2, _ = windows_of(n)
    at_2, at_3 = n_first + n_1, n_first + n_1 + n_2
    mu_1 = sum_of(logits, n_first, at_2, sums) / n_1
    mu_2 = sum_of(logits, at_2, at_3, sums) / n_2
    x_1, x_2 = max(1, x_1), max(2, x_2)
    a = (mu_1 - mu_2) / (1.0 / x_1 - 1.0 / x_2)
    b = mu_2 - a / x_2
    outside = sum_of(logits, at_3, at_3 + n_outside, sums)
    first = sum_of(logits, 0, n_first, sums)
    need = share * (outside + first + curve_sum(a, b, n_first, n)) - outside
    k, reached = least_count(logits, n_first, need, sums, found)
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


@device
def room_of(a, r):
    """A head's scratch, laid out as ops.tactic_work says: the clusters' ends, and the lists."""
    n_list, row = list_size(a.capacity), 4 * (a.n_slot + 16)
    room = a.work + (4 * row + 4 * (512 + TACTIC_SAMPLES + 2 * n_list)) * r
    at_samples = room + 4 * row + 4 * 512
    logits = at_samples + 4 * (TACTIC_SAMPLES + n_list)  # after the CPU's rows
    return room, Lists(logits, room + row, room + 2 * row, room + 3 * row, at_samples)


@device
def clusters_of(a, r, ends):
    """A head's clusters: positions by cluster, their starts, the order of rank, and their ends."""
    h = r // a.heads_per_kv
    starts, n_cluster = a.starts + 4 * (a.n_slot + 1) * h, load_i64(a.extent + 16)
    return a.order + 4 * a.capacity * h, starts, a.rank + 4 * a.n_slot * r, ends, n_cluster


@device
def weighed_of(a, ends):
    """The positions that a head weighs: the first ones, two windows, and those in no cluster.

    A head that samples weighs whole clusters instead of windows.
    """
    end, n_cluster = load_i64(a.extent + 8), load_i64(a.extent + 16)
    n, n_kv, n_sink = end - a.n_sink, load_i64(a.step + STEP.pos) + 1, a.n_sink
    n_first = max(20, int(a.first_share * n))
    if a.counted == 0:
        n_kv, n_sink = end, 0
    if a.n_sample > 0:
        last = first_at_least(ends, 0, n_cluster - 1, n_first)
        return Weighed(load_i32(ends + 4 * last), 0, 0, 0, 0, n_sink, end, n_kv), last
    x_1, x_2, half = windows_of(n)
    low_1, high_1 = max(0, x_1 - half), min(n, x_1 + half)
    low_2, high_2 = max(0, x_2 - half), min(n, x_2 + half)
    return Weighed(min(n, n_first), low_1, high_1, low_2, high_2, n_sink, end, n_kv), 0


@device
def guessed(of, i):
    """A cluster's estimated weight: its size times exp(centroid logit)."""
    guesses, sizes, top = of
    away = (load_f32(guesses + 4 * i) - top) * float32(LOG2_E)
    return exp2(away) * load_f32(sizes + 4 * i)


@device
def mean_ratio(logits, guesses, n, sums):
    """The mean ratio of the samples' true weights to their estimates."""
    x = 0.0
    if thread() < n:
        ratio = load_f32(logits + 4 * thread()) - load_f32(guesses + 4 * thread())
        x = float64(exp2(min(ratio, float32(LARGEST_RATIO)) * float32(LOG2_E)))
    return sums_before(x, sums)[1] / n


running_sums = summing(guessed)


def _budgets() -> tuple[Any, Any]:
    """The functions that select positions by a fitted curve and by sampling."""

    @device
    def by_curve(a, lists, w, sums, found):
        logits, n = lists.logits, w.end - a.n_sink
        n_ranked, n_all = n_weighed(w)
        exponentiate(logits, n_all, float32(largest_of(logits, n_all, sums)))
        sizes = w.first, w.high_1 - w.low_1, w.high_2 - w.low_2, n_all - n_ranked
        return curve_budget(logits, sizes, n, float64(a.share), sums, found)

    @device
    def by_samples(a, lists, ends, weighed, n_all, sums, found):
        """Whole clusters whose weight reaches the share, the rest estimated from samples."""
        logits, share, (w, last) = lists.logits, float64(a.share), weighed
        (n_first, n_exact), n_cluster, factor = n_weighed(w), load_i64(a.extent + 16), 0.0
        if n_all > n_exact:
            ratio = mean_ratio(logits + 4 * n_exact, lists.at_samples, a.n_sample, sums)
            factor = ratio * (1.0 + float64(a.margin))
        top = max(float32(largest_of(logits, n_exact, sums)), load_f32(lists.guesses))
        exponentiate(logits, n_exact, top)
        outside, exact = sum_of(logits, n_first, n_exact, sums), sum_of(logits, 0, n_first, sums)
        of = lists.guesses, lists.sizes, top
        tail = running_sums(of, lists.weights, last + 1, n_cluster, sums)
        need = share * (outside + exact + factor * tail) - outside
        k, reached = least_count(logits, n_first, need, sums, found)
        if k == 0:
            return 0
        i = first_at_least(ends, 0, n_cluster - 1, k)
        if reached < need and last < n_cluster - 1:
            more = (need - reached) / factor if factor > 0.0 else tail
            i = first_above(lists.weights, last + 1, n_cluster, more)
        return load_i32(ends + 4 * i)

    return by_curve, by_samples


def tactic_rank() -> list[Launch]:
    """Kernels of TACTIC_RANK: the order, and what is to be weighed; blocks stride over heads."""

    def rank(tid, n_thread, a):
        parts, tops = cuda.shared.array(MOST_WARPS, int32), cuda.shared.array(MOST_WARPS, float32)
        shared = shared_address(cuda.shared.array(0, uint8))
        bins, n_cluster = cuda.shared.array(BINS, int32), load_i64(a.extent + 16)
        for r in range(tid, a.n_head if n_cluster > 0 else 0, n_thread):
            ends, lists = room_of(a, r)
            _, starts, ranked, _, _ = clusters_of(a, r, ends)
            own, arrays = a.scores + 4 * a.n_slot * r, (bins, parts, tops, shared)
            order_clusters(own, n_cluster, lists.sizes, ranked, arrays)
            tables = ends, lists.guesses, lists.sizes
            follow(own, starts, ranked, tables, n_cluster, a.scale, parts)

    def list_parts(tid, n_thread, a):
        sums, n_part = cuda.shared.array(THREADS, float64), max(1, n_thread // a.n_head)
        n_cluster = load_i64(a.extent + 16)
        for item in range(tid, a.n_head * n_part, n_thread):
            r, part, n = item // n_part, item % n_part, 0
            if n_cluster > 0 and a.share < 1:
                ends, lists = room_of(a, r)
                (w, last), clusters = weighed_of(a, ends), clusters_of(a, r, ends)
                n, to = n_weighed(w)[1], a.sets + 4 * a.set_capacity * r
                share = (n + n_part - 1) // n_part
                low, high = min(n, share * part), min(n, share * (part + 1))
                list_weighed(to, clusters, w, low, high)
                if part == 0 and a.n_sample > 0:
                    of = lists.guesses, lists.sizes, load_f32(lists.guesses)
                    tail = running_sums(of, lists.weights, last + 1, n_cluster, sums)
                    if tail > 0.0:
                        draw(to + 4 * n, clusters, lists, last + 1, tail, a.n_sample)
                        n += a.n_sample
            if part == 0 and thread() == 0:
                store_i32(a.counts + 4 * r, n)

    return [Launch(rank, shared=8 * RANKED, threads=MOST_THREADS), Launch(list_parts)]


def tactic_budget(head_dim: int) -> list[Launch]:
    """Kernels of TACTIC_BUDGET: the weights, the budgets; blocks stride over heads."""
    weigh, (by_curve, by_samples) = weighing(head_dim, 1), _budgets()

    def gauge(tid, n_thread, a):
        shared, n_part = shared_address(cuda.shared.array(0, uint8)), max(1, n_thread // a.n_row)
        for item in range(tid, a.n_row * n_part, n_thread):
            r, part = item // n_part, item % n_part
            begin = load_i32(a.indptr + 4 * r)
            n = load_i32(a.indptr + 4 * r + 4) - begin
            share = (n + n_part - 1) // n_part
            low, high = min(n, share * part), min(n, share * (part + 1))
            places, to = a.places + 4 * (begin + low), room_of(a, r)[1].logits + 4 * low
            head = a.q + 4 * head_dim * r
            weigh(a, shared, head, (r // a.heads_per_kv, places, high - low), to, 0)

    def conclude(tid, n_thread, a):
        sums, found = cuda.shared.array(THREADS, float64), cuda.shared.array(2, int32)
        n_cluster = load_i64(a.extent + 16)
        for r in range(tid, a.n_row, n_thread):
            n_kept = load_i64(a.extent + 8) - a.n_sink if n_cluster > 0 else 0
            if n_cluster > 0 and a.share < 1:
                ends, lists = room_of(a, r)
                w, last = weighed_of(a, ends)
                if a.n_sample == 0:
                    n_kept = by_curve(a, lists, w, sums, found)
                else:
                    n_all = load_i32(a.indptr + 4 * r + 4) - load_i32(a.indptr + 4 * r)
                    n_kept = by_samples(a, lists, ends, (w, last), n_all, sums, found)
            if thread() == 0:
                store_i32(a.keep + 4 * r, n_kept)
            sync_block()  # before the next head's sums overwrite what is read here

    return [Launch(gauge, blocks=2, shared=ROW), Launch(conclude)]
