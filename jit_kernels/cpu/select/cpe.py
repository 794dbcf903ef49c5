"""Ops of the method `cpe`: the gate, retrieval and sharing of CIS, the window of PSAW."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import CIS_META, STEP
from tamis.jit_kernels.cpu.attention.attend import first_at_least
from tamis.jit_kernels.cpu.lang.blocks16 import dot_float
from tamis.jit_kernels.cpu.lang.intrinsic import load_i32, load_i64, store_i32, store_i64
from tamis.jit_kernels.cpu.lang.simd import load_f32x16, lowest_bit
from tamis.jit_kernels.cpu.select.common import (
    bar_of,
    best_lanes,
    copy_row,
    keep_top,
    middle,
    survivors,
    window_start,
    write_ends,
)

RETRIEVE, EVERYTHING = -1, -2  # other decisions: the reference whose set is shared
META = 8 * len(CIS_META)


def select_psaw() -> Any:
    """Kernel of SELECT_PSAW. A few thousand integers at most: one thread writes them."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        count = 0
        store_i32(a.indptr, 0)
        for qb in range((n_tok + a.q_block - 1) // a.q_block):
            newest = pos + min(n_tok, (qb + 1) * a.q_block) - 1
            # P grows with the position: the oldest query of the block sees furthest.
            low = window_start(pos + qb * a.q_block, a.n_local, a.drop) // a.block
            sinks = min(low, (a.n_sink + a.block - 1) // a.block)
            for r in range(a.n_row):
                count = write_ends(a.indices, count, sinks, low, newest // a.block + 1)
                store_i32(a.indptr + 4 * (qb * a.n_row + r + 1), count)

    return kernel


def cis_gate(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of CIS_GATE: threads stride over KV heads."""
    size, rows_per_kv = 4 * head_dim, heads // group

    @njit
    def alike(heads, reference, cosine):
        """Whether every head of the row is closer to its reference than the cosine (Eq. 12)."""
        for g in range(group):
            x, y = heads + size * g, reference + size * g
            norms = (dot_float(x, x, head_dim) * dot_float(y, y, head_dim)) ** 0.5
            if not dot_float(x, y, head_dim) > cosine * norms:
                return False
        return True

    @njit
    def latest(queries, own, n_ref, cosine):
        """The most recent reference that is closer than the cosine, or RETRIEVE."""
        for j in range(n_ref - 1, -1, -1):
            if alike(queries, own + size * group * j, cosine):
                return j
        return RETRIEVE

    @njit
    def references(at, pos, n_block):
        """Start a new block of steps where the last one ends; return its number of references."""
        ended = pos - load_i64(at + CIS_META.begin) >= n_block
        if load_i64(at + CIS_META.next) != pos or ended:
            store_i64(at + CIS_META.begin, pos)
            store_i64(at + CIS_META.n_ref, 0)
        return load_i64(at + CIS_META.n_ref)

    @njit
    def retrieve(at, queries, own, asking, n_asking):
        """List the row's queries for SCORE_KEYS and store them as a reference."""
        n, n_ref = load_i32(n_asking), load_i64(at + CIS_META.n_ref)
        copy_row(queries, own + size * group * n_ref, head_dim * group)
        copy_row(queries, asking + size * n, head_dim * group)
        store_i32(n_asking, n + group)
        store_i64(at + CIS_META.n_ref, n_ref + 1)
        store_i64(at + CIS_META.n_retrieval, load_i64(at + CIS_META.n_retrieval) + 1)

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        low, high = middle(pos, a.n_sink, a.n_local, a.drop)
        for h in range(tid, a.n_head_kv, n_thread):
            rows, reading = range(rows_per_kv * h, rows_per_kv * (h + 1)), False
            store_i32(a.n_asking + 4 * h, 0)
            for r in rows:
                at, decision = a.meta + META * r, EVERYTHING
                store_i64(at + CIS_META.n_step, load_i64(at + CIS_META.n_step) + 1)
                if high - low > a.n_top:
                    n_ref = references(at, pos, a.n_block)
                    own = a.refs + size * group * a.n_block * r
                    decision = latest(a.q + size * group * r, own, n_ref, a.tau)
                store_i64(at + CIS_META.next, -1 if decision == EVERYTHING else pos + 1)
                store_i32(a.chosen + 4 * r, decision)
                reading |= decision == RETRIEVE
            if not reading:
                continue
            for r in rows:
                at, queries = a.meta + META * r, a.q + size * group * r
                own, n_ref = a.refs + size * group * a.n_block * r, load_i64(at + CIS_META.n_ref)
                # The keys are read anyway: rows whose best reference is too far retrieve as well.
                if latest(queries, own, n_ref, max(a.tau, a.join)) == RETRIEVE:
                    store_i32(a.chosen + 4 * r, RETRIEVE)
                    retrieve(at, queries, own, a.asking + size * heads * h, a.n_asking + 4 * h)

    return kernel


BEST, POSITION = 1 << 30, (1 << 29) - 1


@njit(error_model="numpy")
def _mark_best(row, order, count, n_best):
    """Flag the n_best best entries: bit BEST is set in their `order`; ties: lower position."""
    if n_best <= 0:
        return
    bar, ties = bar_of(row, count, n_best)
    for i in range(0, count, 16):
        score = load_f32x16(row + 4 * i)
        bits, ties = best_lanes(score, (1 << min(16, count - i)) - 1, bar, ties)
        while bits != 0:
            at = order + 4 * (i + lowest_bit(bits))
            store_i32(at, load_i32(at) | BEST)
            bits &= bits - 1


@njit(error_model="numpy")
def _dilated(order, count, radius, low, high, out):
    """Eq. 13: the positions and the neighbours of the best, clipped; returns how many there are."""
    n, last = 0, low - 1
    for i in range(count):
        word = load_i32(order + 4 * i)
        at = word & POSITION
        start, stop = at, at + radius if word & BEST else at
        # A best position just after this one reaches back before it.
        for j in range(i, min(count, i + radius + 1)):
            other = load_i32(order + 4 * j)
            if other & BEST and (other & POSITION) - radius < start:
                start = (other & POSITION) - radius
        for p in range(max(start, last + 1), min(stop, high) + 1):
            store_i32(out + 4 * n, p)
            n += 1
            last = p
    return n


def cis_sets() -> Any:
    """Kernel of CIS_SETS: threads stride over rows."""

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        low, high = middle(pos, a.n_sink, a.n_local, a.drop)
        # neighbours that exist by the time the set is shared
        last = min(a.capacity - 1, pos + a.radius)
        for r in range(tid, a.n_row, n_thread):
            decision = load_i32(a.chosen + 4 * r)
            out = a.sets + 4 * a.set_capacity * r
            n = write_ends(out, 0, min(a.n_sink, pos + 1), 0, 0)
            if decision == EVERYTHING:
                n = write_ends(out, n, 0, low, high)
            elif decision == RETRIEVE:
                scored = r // a.rows_per_kv * a.rows_per_kv  # retrieving rows are scored in order
                for other in range(scored, r):
                    scored += load_i32(a.chosen + 4 * other) == RETRIEVE
                found = a.order + 4 * a.capacity * r
                row = a.scores + 4 * a.capacity * a.group * scored
                tops = a.maxima + a.capacity // 4 * a.group * scored
                count = survivors(row, tops, low, high, a.n_top, found)
                keep_top(row, found, count, a.n_top)
                copy_row(found, out + 4 * n, a.n_top)
                n += a.n_top
                _mark_best(row, found, a.n_top, a.n_best)
                slot = a.n_block * r + load_i64(a.meta + META * r + CIS_META.n_ref) - 1
                to = a.ref_sets + 4 * a.set_capacity * slot
                size = _dilated(found, a.n_top, a.radius, low, last, to)
                store_i32(a.ref_counts + 4 * slot, size)
            else:
                slot = a.n_block * r + decision
                shared = a.ref_sets + 4 * a.set_capacity * slot
                size = load_i32(a.ref_counts + 4 * slot)
                begin = first_at_least(shared, 0, size, low)
                end = first_at_least(shared, begin, size, high)
                copy_row(shared + 4 * begin, out + 4 * n, end - begin)
                n += end - begin
            store_i32(a.counts + 4 * r, write_ends(out, n, 0, high, pos + 1))

    return kernel
