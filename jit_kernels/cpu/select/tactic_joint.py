"""Tactic's budget for the heads of a KV head together: one order of the clusters, one set."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP, TACTIC_SAMPLES
from tamis.jit_kernels.cpu.attention.attend import first_at_least
from tamis.jit_kernels.cpu.lang.intrinsic import (
    f32_bits,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    hsum,
    load_f,
    splat_f,
    store_f,
    vmax,
    zero_f,
)
from tamis.jit_kernels.cpu.select.tactic import (
    draw,
    exponentiate,
    follow,
    highest,
    list_ranked,
    list_size,
    list_span,
    note_rows,
    sort_by_keys,
    weighing,
    weight_sum,
)

TINY = np.float32(1e-30)
OCTAVE = 14  # bits of a float32 that are ignored in an order: 512 steps per octave are left


@njit(error_model="numpy")
def estimate_all(scores, sizes, n_cluster, scale, top):
    """Convert scores to weights relative to `top`.

    Returns the sum over clusters of size times weight.
    """
    for i in range(0, n_cluster, LANES):
        store_f(scores + 4 * i, load_f(scores + 4 * i) * splat_f(scale))
    exponentiate(scores, n_cluster, top)
    return product_sum(scores, sizes, n_cluster)


@njit(error_model="numpy")
def product_sum(x, y, n):
    """The sum of the products of n floats, up to the next multiple of LANES."""
    total = zero_f()
    for i in range(0, n, LANES):
        total += load_f(x + 4 * i) * load_f(y + 4 * i)
    return float(hsum(total))


@njit(error_model="numpy")
def add_share(density, weights, n_cluster, factor):
    """Add weights times factor to the densities."""
    for i in range(0, n_cluster, LANES):
        x = load_f(density + 4 * i) + load_f(weights + 4 * i) * splat_f(factor)
        store_f(density + 4 * i, x)


@njit(error_model="numpy")
def order_by(density, keys, n_cluster):
    """Write int32 keys that ascend as densities fall, in 512 steps per octave.

    The last key stands for 2^127 below the first.
    """
    top = f32_bits(np.float32(highest(density, n_cluster))) >> OCTAVE
    for i in range(n_cluster):
        bits = f32_bits(load_f32(density + 4 * i)) >> OCTAVE
        store_i32(keys + 4 * i, min(65535, top - bits))


@njit(error_model="numpy")
def nth_smallest(counts, n, k):
    """The smallest count that k of n counts do not exceed."""
    for i in range(n):
        this, below = load_i32(counts + 4 * i), 0
        for j in range(n):
            other = load_i32(counts + 4 * j)
            below += other < this or (other == this and j <= i)
        if below == k:
            return this
    return 0


@njit(error_model="numpy")
def make_order(a, scores, sizes, density, facts, group, n_cluster):
    """The clusters' density: the sum over heads of a member's estimated share of all weight."""
    for i in range(0, n_cluster, LANES):
        store_f(density + 4 * i, zero_f())
    for g in range(group):
        own, top = scores + 4 * a.n_slot * g, load_f32(facts + 4 * g)
        inside = estimate_all(own, sizes, n_cluster, a.scale, top)
        factor = np.float32(1 / (inside + load_f32(facts + 4 * (group + g))))
        add_share(density, own, n_cluster, factor)


@njit(error_model="numpy")
def least(scores, sizes, logits, clusters, first, need, factor):
    """The number of ordered positions with the weight `need`, estimated from cluster `first` on."""
    rank, ends, n_cluster = clusters
    reached, n_first = 0.0, load_i32(ends + 4 * (first - 1))
    for k in range(n_first):
        if reached >= need:
            return k
        reached += load_f32(logits + 4 * k)
    for i in range(first, n_cluster):
        if reached >= need:
            return load_i32(ends + 4 * (i - 1))
        weight = load_f32(scores + 4 * load_i32(rank + 4 * i))
        reached += factor * weight * load_f32(sizes + 4 * i)
    return load_i32(ends + 4 * (n_cluster - 1))


@njit(error_model="numpy")
def sampled(logits, densities, n_sample, tail):
    """The estimated weight of the clusters that were sampled by density.

    Weights are overwritten.
    """
    for i in range(0, n_sample, LANES):
        density = vmax(load_f(densities + 4 * i), splat_f(TINY))
        store_f(logits + 4 * i, load_f(logits + 4 * i) / density)
    return weight_sum(logits, n_sample) / n_sample * tail


@njit(error_model="numpy")
def room_of(a, group, h):
    """A KV head's scratch: arrays over ordered clusters, and other lists.

    See ops.tactic_joint_work. The former are the clusters' ends, densities, sizes and weights; the
    latter counts, samples' densities, facts (for each head the top logit and the weight of
    unclustered positions), rows and a head's logits.
    """
    part, n_list = 4 * (a.n_slot + 16), list_size(a.capacity)
    size = part + 512 + TACTIC_SAMPLES + 4 * group + (group + 1) * n_list
    room = a.work + 4 * size * h
    counts = room + 4 * part
    at_samples = counts + 4 * 512
    facts = at_samples + 4 * TACTIC_SAMPLES
    rows = facts + 16 * group
    lists = counts, at_samples, facts, rows, rows + 4 * n_list
    return (room, room + part, room + 2 * part, room + 3 * part), lists


@njit(error_model="numpy")
def first_of(a, ends, n_cluster):
    """The first cluster that is estimated; earlier ones are weighted exactly."""
    n_least = max(20, int(a.first_share * (load_i64(a.extent + 8) - a.n_sink)))
    return first_at_least(ends, 0, n_cluster - 1, n_least) + 1


@njit(error_model="numpy")
def tail_of(densities, sizes, weights, first, n_cluster):
    """The sum of the weights of clusters from `first` on; the weights of all."""
    tail = 0.0
    for i in range(n_cluster):
        x = load_f32(densities + 4 * i) * load_f32(sizes + 4 * i)
        store_f32(weights + 4 * i, x)
        tail += x if i >= first else 0.0
    return tail


def tactic_joint_rank(head_dim: int, group: int) -> Any:
    """Kernel of TACTIC_JOINT_RANK: threads stride over KV heads."""
    weigh, row = weighing(head_dim, group), 4 * head_dim

    @njit(error_model="numpy")
    def weigh_outside(a, h, lists, span):
        """For each head, the highest logit of unclustered positions, and their weight."""
        _, _, facts, rows, logits = lists
        n_sink, end, n_kv = span
        at, stride = list_span(list_span(rows, 0, n_sink), end, n_kv), 4 * list_size(a.capacity)
        n = (at - rows) // 4
        note_rows(rows, (a.k_pages, a.k_table, a.n_head_kv, h, 2 * head_dim), rows, n)
        weigh(a.q + row * group * h, a.k_pages, rows, at, logits, stride, a.scale)
        for g in range(group):
            top = highest(logits + stride * g, n)
            exponentiate(logits + stride * g, n, top)
            store_f32(facts + 4 * g, top)
            store_f32(facts + 4 * (group + g), weight_sum(logits + stride * g, n))

    def kernel(tid, n_thread, a):
        n_kv = load_i64(a.step + STEP.pos) + 1
        end, n_cluster = load_i64(a.extent + 8), load_i64(a.extent + 16)
        for h in range(tid, a.n_head_kv, n_thread):
            store_i32(a.counts + 4 * h, 0)
            if n_cluster == 0:
                continue
            of_clusters, lists = room_of(a, group, h)
            ends, densities, by_rank, weights = of_clusters
            counts, at_samples, facts, _, _ = lists
            ranked, own = a.rank + 4 * a.n_slot * h, a.scores + 4 * a.n_slot * group * h
            head_starts = a.starts + 4 * (a.n_slot + 1) * h
            own_sizes, own_density = a.sizes + 4 * a.n_slot * h, a.density + 4 * a.n_slot * h
            for i in range(a.n_slot):
                n = load_i32(head_starts + 4 * i + 4) - load_i32(head_starts + 4 * i)
                store_f32(own_sizes + 4 * i, np.float32(n if i < n_cluster else 0))
            span = (a.n_sink, end, n_kv) if a.counted != 0 else (0, end, end)
            weigh_outside(a, h, lists, span)
            for g in range(group):
                top = highest(own + 4 * a.n_slot * g, n_cluster) * a.scale
                outside = load_f32(facts + 4 * g)
                if top > outside:
                    lower = np.exp(outside - top) * load_f32(facts + 4 * (group + g))
                    store_f32(facts + 4 * (group + g), lower)
                    store_f32(facts + 4 * g, top)
            make_order(a, own, own_sizes, own_density, facts, group, n_cluster)
            order_by(own_density, densities, n_cluster)
            sort_by_keys(densities, by_rank, counts, ranked, n_cluster)
            if a.share >= 1:
                continue
            clusters = a.order + 4 * a.capacity * h, head_starts, ranked, ends, n_cluster
            follow(own_density, clusters, densities, by_rank, np.float32(1))
            first = first_of(a, ends, n_cluster)
            listed = a.sets + 4 * a.set_capacity * h
            to = list_ranked(listed, clusters, 0, load_i32(ends + 4 * (first - 1)))
            tail = tail_of(densities, by_rank, weights, first, n_cluster)
            if tail > 0.0:
                of_samples = weights, densities, at_samples
                to = draw(to, clusters, of_samples, first, tail, a.n_sample)
            store_i32(a.counts + 4 * h, (to - listed) // 4)

    return kernel


def tactic_joint(head_dim: int, group: int) -> Any:
    """Kernel of TACTIC_JOINT: threads stride over KV heads."""
    weigh, row = weighing(head_dim, group), 4 * head_dim

    @njit(error_model="numpy")
    def choose(a, h, of_clusters, lists, n_all):
        """The number of positions with which n_reach heads of a KV head reach their share."""
        (ends, densities, sizes, weights), (_, at_samples, facts, _, logits) = of_clusters, lists
        rank, own_sizes = a.rank + 4 * a.n_slot * h, a.sizes + 4 * a.n_slot * h
        scores, stride = a.scores + 4 * a.n_slot * group * h, 4 * list_size(a.capacity)
        n_cluster = load_i64(a.extent + 16)
        first = first_of(a, ends, n_cluster)
        n_first = load_i32(ends + 4 * (first - 1))
        n_drawn = n_all - n_first
        tail = tail_of(densities, sizes, weights, first, n_cluster)
        for i in range(first):  # the remainder is the sizes of estimated clusters
            store_f32(own_sizes + 4 * load_i32(rank + 4 * i), np.float32(0))
        counts = facts + 8 * group
        for g in range(group):
            own, at_scores = logits + stride * g, scores + 4 * a.n_slot * g
            exponentiate(own, n_all, load_f32(facts + 4 * g))
            outside, rest, factor = load_f32(facts + 4 * (group + g)), 0.0, 0.0
            if n_drawn > 0:
                rest = sampled(own + 4 * n_first, at_samples, n_drawn, tail) * (1.0 + a.margin)
                guess = product_sum(at_scores, own_sizes, n_cluster)
                factor = rest / guess if guess > 0.0 else 0.0
            need = a.share * (outside + weight_sum(own, n_first) + rest) - outside
            clusters = rank, ends, n_cluster
            n = least(at_scores, sizes, own, clusters, first, need, factor)
            store_i32(counts + 4 * g, n)
        return nth_smallest(counts, group, a.n_reach)

    def kernel(tid, n_thread, a):
        end, n_cluster = load_i64(a.extent + 8), load_i64(a.extent + 16)
        for h in range(tid, a.n_row, n_thread):
            store_i32(a.keep + 4 * h, end - a.n_sink if n_cluster > 0 else 0)
            if n_cluster == 0 or a.share >= 1:
                continue
            of_clusters, lists = room_of(a, group, h)
            _, _, _, rows, logits = lists
            begin, stride = load_i32(a.indptr + 4 * h), 4 * list_size(a.capacity)
            n_all = load_i32(a.indptr + 4 * h + 4) - begin
            pages = a.k_pages, a.k_table, a.n_head_kv, h, 2 * head_dim
            note_rows(rows, pages, a.places + 4 * begin, n_all)
            at = rows + 4 * n_all
            weigh(a.q + row * group * h, a.k_pages, rows, at, logits, stride, a.scale)
            store_i32(a.keep + 4 * h, choose(a, h, of_clusters, lists, n_all))

    return kernel
