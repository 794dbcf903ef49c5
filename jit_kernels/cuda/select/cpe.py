"""Ops of the method `cpe`: the gate, retrieval and sharing of CIS, the window of PSAW."""

import math
from typing import Any

from numba import cuda, float32, int32, uint8, uint32

from tamis.jit_kernels.contract.ops import CIS_META, STEP
from tamis.jit_kernels.cuda.attention.attend_epilogue import first_at_least
from tamis.jit_kernels.cuda.lang.grid import (
    MOST_WARPS,
    WARP,
    WARPS,
    Launch,
    lane,
    sync_block,
    thread,
    threads,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    int64,
    load_f32,
    load_i32,
    load_i64,
    ordered,
    quotient,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cuda.lang.ptx import shared_address
from tamis.jit_kernels.cuda.lang.radix_topk import (
    HELD,
    add_first_bits,
    clear_bits,
    set_bit,
    thresholding,
    write_best_by_maxima,
    write_best_found,
    write_bits,
    write_range,
)
from tamis.jit_kernels.cuda.select.common import found_of, middle, window_start

RETRIEVE, EVERYTHING = -1, -2  # other decisions: the reference whose set is shared
META = 8 * len(CIS_META)


def select_psaw() -> list[Launch]:
    """Kernel of SELECT_PSAW: each block writes whole rows, after the sum of those before."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        most = quotient(a.n_sink + a.block - 1, a.block)
        count, row = 0, int64(tid)  # entries of a row of the query blocks so far; the block's next
        for qb in range(quotient(n_tok + a.q_block - 1, a.q_block)):
            newest = pos + min(n_tok, (qb + 1) * a.q_block) - 1
            # P grows with the position: the oldest query of the block sees furthest.
            low = quotient(window_start(pos + qb * a.q_block, a.n_local, a.drop), a.block)
            sinks, end = min(low, most), quotient(newest, a.block) + 1
            size = sinks + end - low
            while row < (qb + 1) * a.n_row:
                begin = count * a.n_row + (row - qb * a.n_row) * size
                write_range(a.indices + 4 * begin, 0, sinks)
                write_range(a.indices + 4 * (begin + sinks), low, end)
                if thread() == 0:
                    store_i32(a.indptr + 4 * (row + 1), begin + size)
                    if row == 0:
                        store_i32(a.indptr, 0)
                row += n_thread
            count += size

    return [Launch(kernel)]


def _resembling(head_dim: int, group: int) -> Any:
    """The function of a warp that finds the most recent reference like a row's queries."""
    size = 4 * head_dim

    @device
    def alike(heads, reference, cosine):
        """Whether every head of the row is closer to its reference than the cosine (Eq. 12)."""
        close = True
        for g in range(group):
            xx, yy, xy = float32(0), float32(0), float32(0)
            for d in range(lane(), head_dim, WARP):
                x = load_f32(heads + size * g + 4 * d)
                y = load_f32(reference + size * g + 4 * d)
                xx, yy, xy = xx + x * x, yy + y * y, xy + x * y
            norms = math.sqrt(warp_sum(xx) * warp_sum(yy))
            if not warp_sum(xy) > cosine * norms:
                close = False
        return close

    @device
    def latest(queries, own, n_ref, cosine):
        """The most recent reference that is closer than the cosine, or RETRIEVE."""
        j = n_ref - 1
        while j >= 0 and not alike(queries, own + size * group * j, cosine):
            j -= 1
        return j if j >= 0 else RETRIEVE

    return latest


@device
def references(at, pos, n_block):
    """Begin a block where the last one ends, and return how many references it has.

    This is a warp's work.
    """
    following, begin = load_i64(at + CIS_META.next), load_i64(at + CIS_META.begin)
    n_ref = load_i64(at + CIS_META.n_ref)
    cuda.syncwarp()
    if following != pos or pos - begin >= n_block:
        n_ref = 0
        if lane() == 0:
            store_i64(at + CIS_META.begin, pos)
            store_i64(at + CIS_META.n_ref, 0)
    return n_ref


def cis_gate(head_dim: int, heads: int, group: int) -> list[Launch]:
    """Kernel of CIS_GATE: blocks stride over KV heads, their warps rows."""
    size, rows_per_kv = 4 * head_dim, heads // group
    latest = _resembling(head_dim, group)

    @device
    def row_of(q, refs, meta, n_block, r):
        """A row's memory, its queries and its references."""
        return meta + META * r, q + size * group * r, refs + size * group * n_block * r

    @device
    def decide(at, queries, own, limits, n_middle, tau):
        """Count the step, and return the decision that the row would take alone."""
        pos, n_block, n_top = limits
        decision = EVERYTHING
        if n_middle > n_top:
            decision = latest(queries, own, references(at, pos, n_block), tau)
        if lane() == 0:
            store_i64(at + CIS_META.n_step, load_i64(at + CIS_META.n_step) + 1)
            store_i64(at + CIS_META.next, -1 if decision == EVERYTHING else pos + 1)
        return decision

    @device
    def retrieve(at, queries, own, asking):
        """Hand the row's queries to SCORE_KEYS, and note them as a reference for later steps."""
        n_ref = load_i64(at + CIS_META.n_ref)
        for d in range(lane(), head_dim * group, WARP):
            x = load_f32(queries + 4 * d)
            store_f32(own + size * group * n_ref + 4 * d, x)
            store_f32(asking + 4 * d, x)
        cuda.syncwarp()
        if lane() == 0:
            store_i64(at + CIS_META.n_ref, n_ref + 1)
            n = load_i64(at + CIS_META.n_retrieval)
            store_i64(at + CIS_META.n_retrieval, n + 1)

    def kernel(tid, n_thread, a):
        decisions, pos = cuda.shared.array(rows_per_kv, int32), load_i64(a.step + STEP.pos)
        low, high = middle(pos, a.n_sink, a.n_local, a.drop)
        limits = pos, a.n_block, a.n_top
        for h in range(tid, a.n_head_kv, n_thread):
            for i in range(warp(), rows_per_kv, WARPS):
                r = rows_per_kv * h + i
                at, queries, own = row_of(a.q, a.refs, a.meta, a.n_block, r)
                decision = decide(at, queries, own, limits, high - low, a.tau)
                if lane() == 0:
                    decisions[i] = decision
            sync_block()
            reading = False
            for i in range(rows_per_kv):
                reading = reading or decisions[i] == RETRIEVE
            sync_block()
            for i in range(warp(), rows_per_kv if reading else 0, WARPS):
                r = rows_per_kv * h + i
                at, queries, own = row_of(a.q, a.refs, a.meta, a.n_block, r)
                # The keys are read anyway: rows whose best reference is not so near ask as well.
                n_ref, cosine = load_i64(at + CIS_META.n_ref), max(a.tau, a.join)
                if latest(queries, own, n_ref, cosine) == RETRIEVE and lane() == 0:
                    decisions[i] = RETRIEVE
            sync_block()
            for i in range(warp(), rows_per_kv, WARPS):
                r, before = rows_per_kv * h + i, 0
                for other in range(i):
                    before += 1 if decisions[other] == RETRIEVE else 0
                if decisions[i] == RETRIEVE:
                    at, queries, own = row_of(a.q, a.refs, a.meta, a.n_block, r)
                    retrieve(at, queries, own, a.asking + size * (heads * h + group * before))
                if lane() == 0:
                    store_i32(a.chosen + 4 * r, decisions[i])
                    if i == rows_per_kv - 1:
                        n = before + 1 if decisions[i] == RETRIEVE else before
                        store_i32(a.n_asking + 4 * h, group * n)
            sync_block()  # before the next head's decisions overwrite what is read here

    return [Launch(kernel)]


# ---- sets ----------------------------------------------------------------------------------------
@device
def of_list(source, i):
    """The ordered score of entry i of a list of positions."""
    scores, order = source
    return ordered(load_f32(scores + 4 * load_i32(order + 4 * i)))


@device
def some_of_list(source, i, apart, end):
    """As best.some_of, of the scores of listed positions."""
    b, c, d = i + apart, i + 2 * apart, i + 3 * apart
    return (
        of_list(source, i) if i < end else uint32(0), of_list(source, b) if b < end else uint32(0),
        of_list(source, c) if c < end else uint32(0), of_list(source, d) if d < end else uint32(0),
    )  # fmt: skip


threshold_of_list = thresholding(some_of_list)


@device
def dilate(source, n, best, span, scratch, out):
    """Write n listed positions and the neighbours of the best (Eq. 13), and return how many.

    Positions are clipped. scratch: room for a bit a position, and twice a bit an entry of the list.
    """
    parts, (n_best, radius), (low, last) = cuda.shared.array(MOST_WARPS, int32), best, span
    words, ones, tied = scratch
    clear_bits(words, low // 64, last // 64 + 1)
    clear_bits(ones, 0, (n + 63) // 64)
    clear_bits(tied, 0, (n + 63) // 64)
    sync_block()
    if n_best > 0:
        bar, n_tie = threshold_of_list(source, 0, n, n_best, parts)
        for i in range(thread(), n, threads()):
            x = of_list(source, i)
            if x > bar:
                set_bit(ones, i)
            elif x == bar:
                set_bit(tied, i)
        sync_block()
        add_first_bits(ones, tied, n_tie, 0, (n + 63) // 64, parts)
        sync_block()
    for i in range(thread(), n, threads()):
        p, is_best = load_i32(source[1] + 4 * i), load_i64(ones + 8 * (i >> 6)) >> (i & 63) & 1
        reach = radius if is_best != 0 else 0
        for j in range(max(p - reach, low), min(p + reach, last) + 1):
            set_bit(words, j)
    sync_block()
    return write_bits(words, low // 64, last // 64 + 1, out, parts)


@device
def copy_within(entries, n, low, high, out):
    """Write those of n ascending entries that are in low .. high - 1, and return how many."""
    begin = first_at_least(entries, 0, n, low)
    end = first_at_least(entries, begin, n, high)
    for i in range(begin + thread(), end, threads()):
        store_i32(out + 4 * (i - begin), load_i32(entries + 4 * i))
    return end - begin


@device
def scored_as(a, r):
    """The number of a row that retrieves among those that are scored: they come in order."""
    scored = r // a.rows_per_kv * a.rows_per_kv
    for other in range(scored, r):
        scored += 1 if load_i32(a.chosen + 4 * other) == RETRIEVE else 0
    return scored


@device
def scores_of(a, r):
    """Scores, maxima and room of a row that retrieves."""
    first = a.capacity * a.group * scored_as(a, r)
    return a.scores + 4 * first, a.maxima + first // 4, a.capacity


def cis_sets() -> list[Launch]:
    """Kernels of CIS_SETS: they write the sets, and keep those of the rows that retrieve.

    Blocks stride over rows. The best positions lie between the sinks and the window.
    """

    def choose(tid, n_thread, a):
        pos, shared = load_i64(a.step + STEP.pos), shared_address(cuda.shared.array(0, uint8))
        low, high = middle(pos, a.n_sink, a.n_local, a.drop)
        for r in range(tid, a.n_row, n_thread):
            decision, n = load_i32(a.chosen + 4 * r), min(a.n_sink, pos + 1)
            out, room = a.sets + 4 * a.set_capacity * r, a.order + 4 * a.capacity * r
            write_range(out, 0, n)
            to = out + 4 * n
            if decision == EVERYTHING:
                write_range(to, low, high)
                n += max(0, high - low)
            elif decision == RETRIEVE:
                if a.found == 0:
                    write_best_by_maxima(shared, scores_of(a, r), low, high, a.n_top, room, to)
                else:
                    found = found_of(a, scored_as(a, r))
                    write_best_found(shared, found, low, high, a.n_top, room, to)
                n += a.n_top
            else:
                slot = a.n_block * r + decision
                size = load_i32(a.ref_counts + 4 * slot)
                n += copy_within(a.ref_sets + 4 * a.set_capacity * slot, size, low, high, to)
            write_range(out + 4 * n, high, pos + 1)
            if thread() == 0:
                store_i32(a.counts + 4 * r, n + max(0, pos + 1 - high))
            sync_block()  # before the next row's keys overwrite what is read here

    def keep(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        low, _ = middle(pos, a.n_sink, a.n_local, a.drop)
        last = min(a.capacity - 1, pos + a.radius)  # of neighbours: there once the set is shared
        for r in range(tid, a.n_row, n_thread):
            if load_i32(a.chosen + 4 * r) != RETRIEVE:
                continue
            room = a.order + 4 * a.capacity * r
            scratch = room, room + a.capacity // 8, room + a.capacity // 4
            source = scores_of(a, r)[0], a.sets + 4 * (a.set_capacity * r + min(a.n_sink, pos + 1))
            slot = a.n_block * r + load_i64(a.meta + META * r + CIS_META.n_ref) - 1
            kept, span = a.ref_sets + 4 * a.set_capacity * slot, (low, last)
            size = dilate(source, a.n_top, (a.n_best, a.radius), span, scratch, kept)
            if thread() == 0:
                store_i32(a.ref_counts + 4 * slot, size)
            sync_block()  # before the next row's sums overwrite what is read here

    return [
        Launch(choose, shared=4 * HELD, threads=512, any_size=True),
        Launch(keep, threads=512, any_size=True),
    ]
