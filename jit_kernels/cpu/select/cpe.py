"""Ops of the method `cpe`: the gate, retrieval and sharing of CIS, the window of PSAW."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import CIS_META, STEP
from tamis.jit_kernels.cpu.attention.attend import first_at_least
from tamis.jit_kernels.cpu.lang.blocks16 import dot_float
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.select.common import (
    copy_row,
    keep_top,
    middle,
    ordered,
    survivors,
    threshold,
    window_start,
    write_ends,
)

RETRIEVE, EVERYTHING = -1, -2  # other decisions: the reference whose set is shared
META = 8 * len(CIS_META)


def select_psaw() -> Any:
    """Kernel of SELECT_PSAW. A few thousand integers at most: one thread writes them."""

    def kernel(tid, n_thread, step, indptr, indices, n_row, q_block, block, n_sink, n_local, drop):
        if tid != 0:
            return
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        count = 0
        store_i32(indptr, 0)
        for qb in range((n_tok + q_block - 1) // q_block):
            newest = pos + min(n_tok, (qb + 1) * q_block) - 1
            # P grows with the position: the oldest query of the block sees furthest.
            low = window_start(pos + qb * q_block, n_local, drop) // block
            sinks = min(low, (n_sink + block - 1) // block)
            for r in range(n_row):
                count = write_ends(indices, count, sinks, low, newest // block + 1)
                store_i32(indptr + 4 * (qb * n_row + r + 1), count)

    return kernel


def cis_gate(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of CIS_GATE: threads take KV heads in turn."""
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
        """Begin a block where the last one ends; how many references this one has."""
        ended = pos - load_i64(at + CIS_META.begin) >= n_block
        if load_i64(at + CIS_META.next) != pos or ended:
            store_i64(at + CIS_META.begin, pos)
            store_i64(at + CIS_META.n_ref, 0)
        return load_i64(at + CIS_META.n_ref)

    @njit
    def retrieve(at, queries, own, asking, n_asking):
        """List the row's queries for SCORE_KEYS; they are a reference from now on."""
        n, n_ref = load_i32(n_asking), load_i64(at + CIS_META.n_ref)
        copy_row(queries, own + size * group * n_ref, head_dim * group)
        copy_row(queries, asking + size * n, head_dim * group)
        store_i32(n_asking, n + group)
        store_i64(at + CIS_META.n_ref, n_ref + 1)
        store_i64(at + CIS_META.n_retrieval, load_i64(at + CIS_META.n_retrieval) + 1)

    def kernel(
        tid, n_thread, step, q, refs, meta, chosen, asking, n_asking, n_head_kv, n_block, n_sink,
        n_local, n_top, drop, tau_f, join_f,
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        low, high = middle(pos, n_sink, n_local, drop)
        for h in range(tid, n_head_kv, n_thread):
            rows, reading = range(rows_per_kv * h, rows_per_kv * (h + 1)), False
            store_i32(n_asking + 4 * h, 0)
            for r in rows:
                at, decision = meta + META * r, EVERYTHING
                store_i64(at + CIS_META.n_step, load_i64(at + CIS_META.n_step) + 1)
                if high - low > n_top:
                    n_ref, own = references(at, pos, n_block), refs + size * group * n_block * r
                    decision = latest(q + size * group * r, own, n_ref, tau_f)
                store_i64(at + CIS_META.next, -1 if decision == EVERYTHING else pos + 1)
                store_i32(chosen + 4 * r, decision)
                reading |= decision == RETRIEVE
            if not reading:
                continue
            for r in rows:
                at, queries = meta + META * r, q + size * group * r
                own, n_ref = refs + size * group * n_block * r, load_i64(at + CIS_META.n_ref)
                # The keys are read anyway: rows whose best reference is not so near ask as well.
                if latest(queries, own, n_ref, max(tau_f, join_f)) == RETRIEVE:
                    store_i32(chosen + 4 * r, RETRIEVE)
                    retrieve(at, queries, own, asking + size * heads * h, n_asking + 4 * h)

    return kernel


BEST, POSITION = 1 << 30, (1 << 29) - 1


@njit(error_model="numpy")
def _mark_best(row, order, count, n_best):
    """Set BEST above the position of the n_best best scores; ties go to the lower position."""
    if n_best <= 0:
        return
    bar = threshold(row, 0, count, n_best)
    ties = n_best
    for i in range(count):
        ties -= ordered(load_f32(row + 4 * i)) > bar
    for i in range(count):
        score = ordered(load_f32(row + 4 * i))
        tie = score == bar and ties > 0
        ties -= tie
        store_i32(order + 4 * i, load_i32(order + 4 * i) | BEST * (score > bar or tie))


@njit(error_model="numpy")
def _dilated(order, count, radius, low, high, out):
    """Eq. 13: the positions and the neighbours of the best, clipped; how many there are."""
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
    """Kernel of CIS_SETS: threads take rows in turn."""

    def kernel(
        tid, n_thread, step, chosen, meta, scores, maxima, order, ref_sets, ref_counts, sets,
        counts, n_row, rows_per_kv, group, n_block, capacity, set_capacity, n_sink, n_local, n_top,
        n_best, radius, drop,
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        low, high = middle(pos, n_sink, n_local, drop)
        last = min(capacity - 1, pos + radius)  # of neighbours: there once the set is shared
        for r in range(tid, n_row, n_thread):
            decision = load_i32(chosen + 4 * r)
            out = sets + 4 * set_capacity * r
            n = write_ends(out, 0, min(n_sink, pos + 1), 0, 0)
            if decision == EVERYTHING:
                n = write_ends(out, n, 0, low, high)
            elif decision == RETRIEVE:
                scored = r // rows_per_kv * rows_per_kv  # rows that retrieve are scored in order
                for other in range(scored, r):
                    scored += load_i32(chosen + 4 * other) == RETRIEVE
                found = order + 4 * capacity * r
                row = scores + 4 * capacity * group * scored
                tops = maxima + capacity // 4 * group * scored
                count = survivors(row, tops, low, high, n_top, found)
                keep_top(row, found, count, n_top)
                copy_row(found, out + 4 * n, n_top)
                n += n_top
                _mark_best(row, found, n_top, n_best)
                slot = n_block * r + load_i64(meta + META * r + CIS_META.n_ref) - 1
                to = ref_sets + 4 * set_capacity * slot
                size = _dilated(found, n_top, radius, low, last, to)
                store_i32(ref_counts + 4 * slot, size)
            else:
                slot = n_block * r + decision
                shared = ref_sets + 4 * set_capacity * slot
                size = load_i32(ref_counts + 4 * slot)
                begin = first_at_least(shared, 0, size, low)
                end = first_at_least(shared, begin, size, high)
                copy_row(shared + 4 * begin, out + 4 * n, end - begin)
                n += end - begin
            store_i32(counts + 4 * r, write_ends(out, n, 0, high, pos + 1))

    return kernel
