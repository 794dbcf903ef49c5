"""Tactic's budget for all heads of a KV head, which share an order of clusters and a set.

A block takes a KV head: first its order and the keys to weigh, then its budget. Sums are float64,
of float32 weights.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, float64, int32, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP, TACTIC_SAMPLES
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E, first_at_least
from tamis.jit_kernels.cuda.attention.score import ROW
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    block_before,
    lane,
    sum_of,
    sums_before,
    sync_block,
    thread,
    threads,
    warp,
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
from tamis.jit_kernels.cuda.lang.ptx import ballot, count_bits, exp2, shared_address
from tamis.jit_kernels.cuda.select.tactic_budget import (
    draw,
    exponentiate,
    follow,
    largest_of,
    least_count,
    list_ranked,
    list_size,
    list_span,
    summing,
    weighing,
)

TINY = 1e-30
DIGIT, DIGITS = 8, 256  # bits that a pass sorts by: a thread has a digit
COUNTS = WARPS * DIGITS
OCTAVE = 14  # bits of a float32 that do not count in an order: 512 steps an octave are left
LAST = 65535  # of the steps: 2^127 below the first


@device
def write_sizes(starts, sizes, n_cluster):
    """The clusters' sizes as float32."""
    for i in range(thread(), n_cluster, THREADS):
        n = load_i32(starts + 4 * i + 4) - load_i32(starts + 4 * i)
        store_f32(sizes + 4 * i, float32(n))


class Room(NamedTuple):
    """A KV head's scratch: addresses of lists."""

    ends: Any  # of clusters in the order of rank
    places: Any  # positions of what is outside of the clusters
    logits: Any  # of listed keys, a head after the other
    guesses: Any  # densities of clusters in that order
    sizes: Any
    weights: Any
    at_samples: Any  # densities of the clusters that samples are of
    facts: Any  # of each head the top; of each the weight outside of the clusters; counts


class Drawn(NamedTuple):
    """The sample that the weight of the remaining clusters is estimated from."""

    first: Any  # cluster in order
    n: Any  # samples
    tail: Any  # sum of these clusters' weights


@device
def make_density(a, h, facts, group, n_cluster, sums):
    """The clusters' density: the sum over heads of a member's estimated share of all weight.

    scores become weights. facts: of each head the top, then of each the weight outside.
    """
    sizes, density = a.sizes + 4 * a.n_slot * h, a.density + 4 * a.n_slot * h
    for i in range(thread(), n_cluster, THREADS):
        store_f32(density + 4 * i, float32(0))
    for g in range(group):
        own, mine = a.scores + 4 * a.n_slot * (group * h + g), 0.0
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
def peers_of(digit, live):
    """The mask of live lanes whose digit equals this lane's (match_any)."""
    peers = ballot(uint32(1 if live else 0))
    for b in range(DIGIT):
        mine = digit >> b & 1
        ones = ballot(uint32(mine))
        peers = uint32(peers & (ones if mine != 0 else uint32(ones ^ uint32(0xFFFFFFFF))))
    return peers


@device
def sort_pass(keys, source, target, n, shift, counts, parts):
    """One stable radix-sort pass over indices by a digit of their keys.

    The work of a block of at least DIGITS threads. counts: a shared array of int32, DIGITS a warp.
    """
    n_warp, mine = threads() // WARP, int32(0)
    share = (n + threads() - 1) // threads() * WARP  # of a warp
    begin, below = share * warp(), (uint32(1) << lane()) - uint32(1)
    for i in range(thread(), DIGITS * n_warp, threads()):
        counts[i] = 0
    sync_block()
    for pass_ in range(2):
        for start in range(begin, min(begin + share, n), WARP):
            i = start + lane()
            live, item = i < n, min(i, n - 1)
            if source != 0:
                item = load_i32(source + 4 * item)
            digit = load_i32(keys + 4 * item) >> shift & (DIGITS - 1)
            peers = peers_of(digit, live)
            ahead = int32(count_bits(uint32(peers & below)))
            at = counts[DIGITS * warp() + digit]
            if pass_ == 1 and live:
                store_i32(target + 4 * (at + ahead), item)
            cuda.syncwarp()
            if live and ahead == 0:
                counts[DIGITS * warp() + digit] = at + int32(count_bits(peers))
            cuda.syncwarp()
        sync_block()
        if pass_ == 0:
            for w in range(n_warp if thread() < DIGITS else 0):
                mine += counts[DIGITS * w + thread()]
            before, _ = block_before(int32(mine), parts)
            for w in range(n_warp if thread() < DIGITS else 0):
                size = counts[DIGITS * w + thread()]
                counts[DIGITS * w + thread()] = before
                before += size
            sync_block()


@device
def order_by(density, room, rank, n, counts, parts, sums):
    """Sort clusters by descending density, ties by index, into rank."""
    keys, other = room.guesses, room.sizes  # which are not written yet
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
    """The k-th smallest of n counts."""
    found = 0
    for i in range(n):
        this, below = load_i32(counts + 4 * i), 0
        for j in range(n):
            other = load_i32(counts + 4 * j)
            below += 1 if other < this or (other == this and j <= i) else 0
        if below == k:
            found = this
    return found


@device
def row_of(a, room, g):
    """Where the logits of head g of a group are."""
    return room.logits + 4 * list_size(a.capacity) * g


def _room_of(group: int) -> Any:
    """The function that gives a KV head's scratch, as ops.tactic_joint_work has it."""

    @device
    def room_of(a, h):
        n_list, row = list_size(a.capacity), 4 * (a.n_slot + 16)
        size = 4 * row + 4 * (512 + TACTIC_SAMPLES + 4 * group + (group + 1) * n_list)
        room = a.work + size * h
        at_samples = room + 4 * row + 4 * 512
        facts = at_samples + 4 * TACTIC_SAMPLES
        places = facts + 16 * group
        of_clusters = room + row, room + 2 * row, room + 3 * row
        return Room(room, places, places + 4 * n_list, *of_clusters, at_samples, facts)

    return room_of


@device
def first_of(a, ends, n_cluster):
    """The first cluster that is estimated; those before it are weighed."""
    n_least = max(20, int(a.first_share * (load_i64(a.extent + 8) - a.n_sink)))
    return first_at_least(ends, 0, n_cluster - 1, n_least) + 1


def _choosing(group: int, weigh: Any, heads_of: Any) -> Any:
    """The function that gives the number of positions with which n_reach heads reach the share."""

    @device
    def reached_by(a, head, clusters, room, drawn, sums, found):
        """The number of positions, in order, that one head needs."""
        (rank, ends, n_cluster), first, g = clusters, drawn.first, head % group
        n_first, own = load_i32(ends + 4 * (first - 1)), row_of(a, room, g)
        rest, factor, share = 0.0, 0.0, float64(a.share)
        if drawn.n > 0:
            rest = sampled(own + 4 * n_first, room.at_samples, drawn.n, drawn.tail, sums)
            rest *= 1.0 + float64(a.margin)
        at_scores, weights = a.scores + 4 * a.n_slot * head, room.weights
        guess = guess_tail(at_scores, rank, room.sizes, weights, first, n_cluster, sums)
        if guess > 0.0:
            factor = rest / guess
        outside = float64(load_f32(room.facts + 4 * (group + g)))
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
    def choose(a, h, shared, room, sums, found):
        begin, n_cluster = load_i32(a.indptr + 4 * h), load_i64(a.extent + 16)
        n_list, stride = load_i32(a.indptr + 4 * h + 4) - begin, 4 * list_size(a.capacity)
        first = first_of(a, room.ends, n_cluster)
        n_drawn = n_list - load_i32(room.ends + 4 * (first - 1))
        tail = sum_tail((room.guesses, room.sizes), room.weights, first, n_cluster, sums)
        places = a.places + 4 * begin
        weigh(a, shared, heads_of(a, h), (h, places, n_list), room.logits, stride)
        counts, drawn = room.facts + 8 * group, Drawn(first, n_drawn, tail)
        clusters = a.rank + 4 * a.n_slot * h, room.ends, n_cluster
        for g in range(group):
            exponentiate(row_of(a, room, g), n_list, load_f32(room.facts + 4 * g))
            n = reached_by(a, group * h + g, clusters, room, drawn, sums, found)
            if thread() == 0:
                store_i32(counts + 4 * g, n)
            sync_block()  # before the next head's weights overwrite what is read here
        return nth_smallest(counts, group, a.n_reach)

    return choose


def _facts_of(group: int, weigh: Any, heads_of: Any) -> Any:
    """The function that writes each head's highest logit and the weight outside of the clusters."""

    @device
    def weigh_outside(a, h, shared, room, span, sums):
        n_sink, end, n_kv = span
        places, facts, stride = room.places, room.facts, 4 * list_size(a.capacity)
        at = list_span(list_span(places, 0, n_sink), end, n_kv)
        n = (at - places) // 4
        weigh(a, shared, heads_of(a, h), (h, places, n), room.logits, stride)
        for g in range(group):
            own = row_of(a, room, g)
            top = float32(largest_of(own, n, sums))
            exponentiate(own, n, top)
            total = float32(sum_of(own, 0, n, sums))
            if thread() == 0:
                store_f32(facts + 4 * g, top)
                store_f32(facts + 4 * (group + g), total)
        sync_block()

    @device
    def scale_scores(scores, score_row, facts, n_cluster, scale, sums):
        """Scale scores.

        If the highest exceeds the top logit outside of clusters, it becomes the top.
        """
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


def tactic_joint_rank(head_dim: int, group: int) -> list[Launch]:
    """Kernel of TACTIC_JOINT_RANK: blocks stride over KV heads."""
    weigh, room_of = weighing(head_dim, group), _room_of(group)

    @device
    def heads_of(a, h):
        return a.q + 4 * head_dim * group * h

    weigh_outside, scale_scores = _facts_of(group, weigh, heads_of)

    def kernel(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        parts, counts = cuda.shared.array(WARPS, int32), cuda.shared.array(COUNTS, int32)
        sums, n_kv = cuda.shared.array(THREADS, float64), load_i64(a.step + STEP.pos) + 1
        end, n_cluster = load_i64(a.extent + 8), load_i64(a.extent + 16)
        for h in range(tid, a.n_head_kv, n_thread):
            room, n = room_of(a, h), 0
            own, ranked = a.scores + 4 * a.n_slot * group * h, a.rank + 4 * a.n_slot * h
            starts = a.starts + 4 * (a.n_slot + 1) * h
            sizes, density = a.sizes + 4 * a.n_slot * h, a.density + 4 * a.n_slot * h
            if n_cluster > 0:
                write_sizes(starts, sizes, n_cluster)
                span = (a.n_sink, end, n_kv) if a.counted != 0 else (0, end, end)
                weigh_outside(a, h, shared, room, span, sums)
                scale_scores(own, 4 * a.n_slot, room.facts, n_cluster, a.scale, sums)
                make_density(a, h, room.facts, group, n_cluster, sums)
                order_by(density, room, ranked, n_cluster, counts, parts, sums)
            if n_cluster > 0 and a.share < 1:
                tables = room.ends, room.guesses, room.sizes
                follow(density, starts, ranked, tables, n_cluster, float32(1), parts)
                clusters = a.order + 4 * a.capacity * h, starts, ranked, room.ends, n_cluster
                first = first_of(a, room.ends, n_cluster)
                n, of = load_i32(room.ends + 4 * (first - 1)), (room.guesses, room.sizes)
                to = list_ranked(a.sets + 4 * a.set_capacity * h, clusters, 0, n)
                tail = sum_tail(of, room.weights, first, n_cluster, sums)
                if tail > 0.0:
                    draw(to, clusters, room, first, tail, a.n_sample)
                    n += a.n_sample
            if thread() == 0:
                store_i32(a.counts + 4 * h, n)
            sync_block()  # before the next head's lists overwrite what is read here

    return [Launch(kernel, shared=ROW * group)]


def tactic_joint(head_dim: int, group: int) -> list[Launch]:
    """Kernel of TACTIC_JOINT: blocks stride over KV heads."""
    weigh, room_of = weighing(head_dim, group), _room_of(group)

    @device
    def heads_of(a, h):
        return a.q + 4 * head_dim * group * h

    choose = _choosing(group, weigh, heads_of)

    def kernel(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        sums, found = cuda.shared.array(THREADS, float64), cuda.shared.array(2, int32)
        end, n_cluster = load_i64(a.extent + 8), load_i64(a.extent + 16)
        for h in range(tid, a.n_row, n_thread):
            n_kept = end - a.n_sink if n_cluster > 0 else 0
            if n_cluster > 0 and a.share < 1:
                n_kept = choose(a, h, shared, room_of(a, h), sums, found)
            if thread() == 0:
                store_i32(a.keep + 4 * h, n_kept)
            sync_block()  # before the next head's lists overwrite what is read here

    return [Launch(kernel, shared=ROW * group)]
