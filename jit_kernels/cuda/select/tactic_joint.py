"""Tactic's budget for the heads of a KV head together: one order of the clusters, one set.

A block's work a KV head. Sums are float64, of float32 weights.
"""

from typing import Any

from numba import cuda, float32, float64, int32, uint8

from tamis.jit_kernels.contract.ops import STEP, TACTIC_SAMPLES
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E, first_at_least
from tamis.jit_kernels.cuda.attention.score import ROW
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARPS,
    Launch,
    sum_of,
    sums_before,
    sync_block,
    thread,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    f32_bits,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cuda.lang.ptx import exp2, shared_address
from tamis.jit_kernels.cuda.select.tactic_budget import (
    COUNTS,
    DIGIT,
    draw,
    exponentiate,
    follow,
    largest_of,
    least_count,
    list_ranked,
    list_size,
    list_span,
    sort_pass,
    summing,
    weighing,
)

TINY = 1e-30
OCTAVE = 14  # bits of a float32 that do not count in an order: 512 steps an octave are left
LAST = 65535  # of the steps: 2^127 below the first


@device
def write_sizes(starts, sizes, n_cluster):
    """The clusters' sizes as float32."""
    for i in range(thread(), n_cluster, THREADS):
        n = load_i32(starts + 4 * i + 4) - load_i32(starts + 4 * i)
        store_f32(sizes + 4 * i, float32(n))


@device
def make_density(scores, score_row, sizes, density, facts, group, n_cluster, sums):
    """The clusters' density: the sum over heads of a member's estimated share of all weight.

    scores become weights. facts: of each head the top, then of each the weight outside.
    """
    for i in range(thread(), n_cluster, THREADS):
        store_f32(density + 4 * i, float32(0))
    for g in range(group):
        own, mine = scores + score_row * g, 0.0
        exponentiate(own, n_cluster, load_f32(facts + 4 * g))
        for i in range(thread(), n_cluster, THREADS):
            mine += float64(load_f32(own + 4 * i) * load_f32(sizes + 4 * i))
        inside = sums_before(mine, sums)[1]
        factor = float32(1.0 / (inside + float64(load_f32(facts + 4 * (group + g)))))
        for i in range(thread(), n_cluster, THREADS):
            x = load_f32(density + 4 * i) + load_f32(own + 4 * i) * factor
            store_f32(density + 4 * i, x)
    sync_block()


@device
def order_by(density, keys, other, rank, n, counts, parts, sums):
    """Cluster numbers by falling density to rank, ties by number."""
    top = int32(f32_bits(float32(largest_of(density, n, sums)))) >> OCTAVE
    for i in range(thread(), n, THREADS):
        below = top - (int32(f32_bits(load_f32(density + 4 * i))) >> OCTAVE)
        store_i32(keys + 4 * i, min(LAST, below))
    sync_block()
    sort_pass(keys, 0, other, n, 0, counts, parts)
    sync_block()
    sort_pass(keys, other, rank, n, DIGIT, counts, parts)
    sync_block()


@device
def estimated(of, i):
    """A cluster's estimated share of all weight: its members' density times their number."""
    densities, sizes = of
    return load_f32(densities + 4 * i) * load_f32(sizes + 4 * i)


sum_tail = summing(estimated)


@device
def sampled(logits, densities, n_sample, tail, sums):
    """The weight of the clusters that were sampled by density."""
    x = 0.0
    if thread() < n_sample:
        density = max(load_f32(densities + 4 * thread()), float32(TINY))
        x = float64(load_f32(logits + 4 * thread()) / density)
    return sums_before(x, sums)[1] / n_sample * tail


@device
def guess_tail(scores, rank, sizes, weights, first, n, sums):
    """A head's estimated weights of the clusters in order from `first` on, and their sum."""
    mine = 0.0
    for i in range(first + thread(), n, THREADS):
        x = load_f32(scores + 4 * load_i32(rank + 4 * i)) * load_f32(sizes + 4 * i)
        store_f32(weights + 4 * i, x)
        mine += float64(x)
    return sums_before(mine, sums)[1]


@device
def nth_smallest(counts, n, k):
    """The smallest count that k of n counts do not exceed."""
    found = 0
    for i in range(n):
        this, below = load_i32(counts + 4 * i), 0
        for j in range(n):
            other = load_i32(counts + 4 * j)
            below += 1 if other < this or (other == this and j <= i) else 0
        if below == k:
            found = this
    return found


def _choosing(group: int, weigh: Any) -> Any:
    """The function that gives the number of positions with which n_reach heads reach the share."""

    @device
    def reached_by(own, tables, at_scores, clusters, first, facts, sampling, share, sums, found):
        """How many positions in order one head needs; facts: its weight outside of the clusters."""
        (_, sizes, weights), (rank, ends, n_cluster) = tables, clusters[2:]
        n_first, (n_drawn, at_samples, tail, margin) = load_i32(ends + 4 * (first - 1)), sampling
        rest, factor = 0.0, 0.0
        if n_drawn > 0:
            own_samples = own + 4 * n_first
            rest = sampled(own_samples, at_samples, n_drawn, tail, sums) * (1.0 + float64(margin))
        guess = guess_tail(at_scores, rank, sizes, weights, first, n_cluster, sums)
        if guess > 0.0:
            factor = rest / guess
        outside = float64(load_f32(facts))
        need = share * (outside + sum_of(own, 0, n_first, sums) + rest) - outside
        k, reached = least_count(own, n_first, need, sums, found)
        if reached >= need or need <= 0.0:
            return k
        if factor <= 0.0:
            return load_i32(ends + 4 * (n_cluster - 1))
        more = (need - reached) / factor
        n, _ = least_count(weights + 4 * first, n_cluster - first, more, sums, found)
        return load_i32(ends + 4 * (first + n - 1))

    @device
    def choose(
        shared, heads, pages, clusters, lists, tables, scores, facts, limits, sampling, scale,
        sums, found,
    ):  # fmt: skip
        (rows, logits, stride), (own_scores, score_row) = lists, scores
        (first_count, share, n_reach), (n_sample, margin, at_samples) = limits, sampling
        (densities, sizes, weights), (ends, n_cluster) = tables, clusters[3:]
        first = first_at_least(ends, 0, n_cluster - 1, first_count) + 1
        n_first = load_i32(ends + 4 * (first - 1))
        tail = sum_tail((densities, sizes), weights, first, n_cluster, sums)
        at, n_drawn = list_ranked(rows, pages, clusters, 0, n_first), 0
        if tail > 0.0:
            draw(at, pages, clusters, tables, first, tail, n_sample, at_samples)
            n_drawn = n_sample
        weigh(shared, heads, pages[0], rows, n_first + n_drawn, logits, stride, scale)
        counts = facts + 8 * group
        for g in range(group):
            own = logits + stride * g
            exponentiate(own, n_first + n_drawn, load_f32(facts + 4 * g))
            drawn = n_drawn, at_samples, tail, margin
            n = reached_by(
                own, tables, own_scores + score_row * g, clusters, first, facts + 4 * (group + g),
                drawn, share, sums, found,
            )  # fmt: skip
            if thread() == 0:
                store_i32(counts + 4 * g, n)
            sync_block()  # before the next head's weights overwrite what is read here
        return nth_smallest(counts, group, n_reach)

    return choose


def _facts_of(group: int, weigh: Any) -> Any:
    """The function that writes each head's highest logit and the weight outside of the clusters."""

    @device
    def weigh_outside(shared, heads, pages, lists, span, facts, scale, sums):
        (rows, logits, stride), (n_sink, end, n_kv) = lists, span
        at = list_span(list_span(rows, pages, 0, n_sink), pages, end, n_kv)
        n = (at - rows) // 4
        weigh(shared, heads, pages[0], rows, n, logits, stride, scale)
        for g in range(group):
            own = logits + stride * g
            top = float32(largest_of(own, n, sums))
            exponentiate(own, n, top)
            total = float32(sum_of(own, 0, n, sums))
            if thread() == 0:
                store_f32(facts + 4 * g, top)
                store_f32(facts + 4 * (group + g), total)
        sync_block()

    @device
    def scale_scores(scores, score_row, facts, n_cluster, scale, sums):
        """Scale scores; where the highest is above the top outside, it is the head's top."""
        for g in range(group):
            own, outside = scores + score_row * g, load_f32(facts + 4 * g)
            for i in range(thread(), n_cluster, THREADS):
                store_f32(own + 4 * i, load_f32(own + 4 * i) * scale)
            sync_block()
            top = float32(largest_of(own, n_cluster, sums))
            if top > outside and thread() == 0:
                lower = exp2((outside - top) * float32(LOG2_E)) * load_f32(facts + 4 * (group + g))
                store_f32(facts + 4 * (group + g), lower)
                store_f32(facts + 4 * g, top)
        sync_block()

    return weigh_outside, scale_scores


def tactic_joint(head_dim: int, group: int) -> list[Launch]:
    """Kernel of TACTIC_JOINT: blocks take KV heads in turn."""
    weigh = weighing(head_dim, group)
    choose, (weigh_outside, scale_scores) = _choosing(group, weigh), _facts_of(group, weigh)

    def kernel(
        tid, n_thread, step, q, k_pages, k_table, extent, scores, starts, order, sizes, density,
        rank, keep, work, n_head_kv, n_slot, capacity, n_sink, counted, n_sample, n_reach, share_f,
        first_share_f, margin_f, scale_f,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, uint8))
        parts, counts = cuda.shared.array(WARPS, int32), cuda.shared.array(COUNTS, int32)
        sums, found = cuda.shared.array(THREADS, float64), cuda.shared.array(2, int32)
        end, n_cluster = load_i64(extent + 8), load_i64(extent + 16)
        n_list, row = list_size(capacity), 4 * (n_slot + 16)
        # As ops.tactic_joint_work.
        work_size = 4 * row + 4 * (512 + TACTIC_SAMPLES + 4 * group + (group + 1) * n_list)
        n_kv = load_i64(step + STEP.pos) + 1
        for h in range(tid, n_head_kv, n_thread):
            room, n_kept = work + work_size * h, 0
            ends, densities, by_rank, weights = room, room + row, room + 2 * row, room + 3 * row
            at_samples = room + 4 * row + 4 * 512
            facts = at_samples + 4 * TACTIC_SAMPLES
            rows = facts + 16 * group
            lists = rows, rows + 4 * n_list, 4 * n_list
            heads, ranked = q + 4 * head_dim * group * h, rank + 4 * n_slot * h
            own, head_starts = scores + 4 * n_slot * group * h, starts + 4 * (n_slot + 1) * h
            own_sizes, own_density = sizes + 4 * n_slot * h, density + 4 * n_slot * h
            pages = k_pages, k_table, n_head_kv, h
            if n_cluster > 0:
                write_sizes(head_starts, own_sizes, n_cluster)
                span = (n_sink, end, n_kv) if counted != 0 else (0, end, end)
                weigh_outside(shared, heads, pages, lists, span, facts, scale_f, sums)
                scale_scores(own, 4 * n_slot, facts, n_cluster, scale_f, sums)
                make_density(own, 4 * n_slot, own_sizes, own_density, facts, group, n_cluster, sums)
                order_by(own_density, densities, by_rank, ranked, n_cluster, counts, parts, sums)
                n_kept = end - n_sink
            if n_cluster > 0 and share_f < 1:
                tables = ends, densities, by_rank
                follow(own_density, head_starts, ranked, tables, n_cluster, float32(1), parts)
                clusters = order + 4 * capacity * h, head_starts, ranked, ends, n_cluster
                limits = max(20, int(first_share_f * (end - n_sink))), float64(share_f), n_reach
                n_kept = choose(
                    shared, heads, pages, clusters, lists, (densities, by_rank, weights),
                    (own, 4 * n_slot), facts, limits, (n_sample, margin_f, at_samples), scale_f,
                    sums, found,
                )  # fmt: skip
            if thread() == 0:
                store_i32(keep + 4 * h, n_kept)
            sync_block()  # before the next head's lists overwrite what is read here

    return [Launch(kernel, shared=ROW * group)]
