"""Ops of the method `cpe`: the gate, retrieval and sharing of CIS, the window of PSAW."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.select import LEAST, ordered, threshold, write_ends
from tamis.jit_kernels.cpu.tile import dot_float, dot_half
from tamis.jit_kernels.ops import CIS_META, STEP
from tamis.jit_kernels.types import PAGE

RETRIEVE, EVERYTHING = -1, -2  # other decisions: the reference whose set is shared
RUN = 16  # neighbouring positions that one maximum stands for
LOWEST = np.float32(-3.4e38)
META = 8 * len(CIS_META)


@njit
def _window_start(pos, n_local, drop):
    """First position beside the sinks that a query at `pos` sees: Eq. 15, and the local ones."""
    return max(0, min(drop * pos >> 32, pos + 1 - n_local))


@njit
def _middle(pos, n_sink, n_local, drop):
    """The range of positions between sinks and local window that retrieval chooses from."""
    low = max(n_sink, _window_start(pos, n_local, drop))
    return low, max(n_sink, pos + 1 - n_local)


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
            low = _window_start(pos + qb * q_block, n_local, drop) // block
            sinks = min(low, (n_sink + block - 1) // block)
            for r in range(n_row):
                count = write_ends(indices, count, sinks, low, newest // block + 1)
                store_i32(indptr + 4 * (qb * n_row + r + 1), count)

    return kernel


def cis_gate(head_dim: int, group: int) -> Any:
    """Kernel of CIS_GATE: threads take rows in turn."""
    size = 4 * head_dim

    @njit
    def alike(heads, reference, tau):
        """Whether every head of the row is closer to its reference than the cosine tau (Eq. 12)."""
        for g in range(group):
            x, y = heads + size * g, reference + size * g
            norms = (dot_float(x, x, head_dim) * dot_float(y, y, head_dim)) ** 0.5
            if not dot_float(x, y, head_dim) > tau * norms:
                return False
        return True

    def kernel(
        tid, n_thread, step, q, refs, meta, chosen, n_row, n_block, n_sink, n_local,
        n_top, drop, tau_f,
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        low, high = _middle(pos, n_sink, n_local, drop)
        for r in range(tid, n_row, n_thread):
            at, heads = meta + META * r, q + size * group * r
            store_i64(at + CIS_META.n_step, load_i64(at + CIS_META.n_step) + 1)
            if high - low <= n_top:
                store_i32(chosen + 4 * r, EVERYTHING)
                store_i64(at + CIS_META.next, -1)
                continue
            begin, n_ref = load_i64(at + CIS_META.begin), load_i64(at + CIS_META.n_ref)
            if load_i64(at + CIS_META.next) != pos or pos - begin >= n_block:
                begin, n_ref = pos, 0
            decision, j = RETRIEVE, n_ref - 1
            own = refs + size * group * n_block * r
            while j >= 0 and decision == RETRIEVE:
                if alike(heads, own + size * group * j, tau_f):
                    decision = j
                j -= 1
            if decision == RETRIEVE:
                to = own + size * group * n_ref
                for i in range(head_dim * group):
                    store_f32(to + 4 * i, load_f32(heads + 4 * i))
                n_ref += 1
                n_before = load_i64(at + CIS_META.n_retrieval)
                store_i64(at + CIS_META.n_retrieval, n_before + 1)
            store_i32(chosen + 4 * r, decision)
            store_i64(at + CIS_META.next, pos + 1)
            store_i64(at + CIS_META.begin, begin)
            store_i64(at + CIS_META.n_ref, n_ref)

    return kernel


def cis_score(head_dim: int, group: int) -> Any:
    """Kernel of CIS_SCORE: threads share the positions of each row that retrieves."""

    def kernel(
        tid, n_thread, step, q, k_pages, k_table, chosen, scores, maxima, n_row, heads_per_kv,
        n_head_kv, capacity, n_sink, n_local, drop, scale_f,
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        low, high = _middle(pos, n_sink, n_local, drop)
        first, n_run = low // RUN, (high + RUN - 1) // RUN - low // RUN
        for r in range(n_row):
            if load_i32(chosen + 4 * r) != RETRIEVE:
                continue
            h, heads = r * group // heads_per_kv, q + 4 * head_dim * group * r
            begin, end = first + n_run * tid // n_thread, first + n_run * (tid + 1) // n_thread
            for run in range(begin, end):
                slot = load_i32(k_table + 4 * (run * RUN // PAGE))
                page = k_pages + 2 * head_dim * (slot * n_head_kv + h) * PAGE
                most = LOWEST
                for j in range(max(low, run * RUN), min(high, (run + 1) * RUN)):
                    key = page + 2 * head_dim * (j % PAGE)
                    best = dot_half(heads, key, head_dim)
                    for g in range(1, group):
                        best = max(best, dot_half(heads + 4 * head_dim * g, key, head_dim))
                    best *= scale_f
                    store_f32(scores + 4 * (capacity * r + j), best)
                    most = max(most, best)
                store_f32(maxima + 4 * (capacity // RUN * r + run), most)

    return kernel


@njit
def _survivors(row, maxima, order, low, high, n_top):
    """Move the scores that may be among the best n_top to the front of `row`; count them.

    Their positions go to `order`, ascending. At least n_top scores reach the n_top-th best of the
    runs' maxima, so it is a bound.
    """
    first, last = low // RUN, (high + RUN - 1) // RUN
    bound = threshold(maxima, first, last, n_top) if last - first > n_top else LEAST
    count = 0
    for run in range(first, last):
        if ordered(load_f32(maxima + 4 * run)) < bound:
            continue
        for j in range(max(low, run * RUN), min(high, (run + 1) * RUN)):
            score = load_f32(row + 4 * j)
            if ordered(score) >= bound:
                store_f32(row + 4 * count, score)
                store_i32(order + 4 * count, j)
                count += 1
    return count


@njit
def _mark_best(row, order, count, n_best, mark):
    """Set bit `mark` above the position of the n_best best; ties go to the lower position."""
    if n_best <= 0:
        return
    bar = threshold(row, 0, count, n_best)
    ties = n_best
    for i in range(count):
        ties -= ordered(load_f32(row + 4 * i)) > bar
    for i in range(count):
        order_i = ordered(load_f32(row + 4 * i))
        if order_i > bar or (order_i == bar and ties > 0):
            store_i32(order + 4 * i, load_i32(order + 4 * i) | mark)
        if order_i == bar:
            ties -= 1


KEPT, BEST, POSITION = 1 << 29, 1 << 30, (1 << 29) - 1


@njit
def _dilated(order, count, radius, low, high, out):
    """Eq. 13: the kept positions and the neighbours of the best, clipped; how many there are."""
    n, last = 0, low - 1
    for i in range(count):
        word = load_i32(order + 4 * i)
        if word & KEPT == 0:
            continue
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

    @njit
    def retrieve(row, maxima, order, low, high, n_top, n_best):
        """How many survivors there are in `order`, with KEPT and BEST set on the chosen ones."""
        count = _survivors(row, maxima, order, low, high, n_top)
        _mark_best(row, order, count, n_top, KEPT)
        _mark_best(row, order, count, n_best, BEST)
        return count

    def kernel(
        tid, n_thread, step, chosen, meta, scores, maxima, order, ref_sets, ref_counts, sets,
        counts, n_row, n_block, capacity, set_capacity, n_sink, n_local, n_top, n_best, radius,
        drop,
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        low, high = _middle(pos, n_sink, n_local, drop)
        for r in range(tid, n_row, n_thread):
            decision = load_i32(chosen + 4 * r)
            out, n = sets + 4 * set_capacity * r, 0
            for j in range(min(n_sink, pos + 1)):
                store_i32(out + 4 * n, j)
                n += 1
            if decision == EVERYTHING:
                for j in range(low, high):
                    store_i32(out + 4 * n, j)
                    n += 1
            elif decision == RETRIEVE:
                found = order + 4 * capacity * r
                row, tops = scores + 4 * capacity * r, maxima + 4 * (capacity // RUN) * r
                count = retrieve(row, tops, found, low, high, n_top, n_best)
                for i in range(count):
                    word = load_i32(found + 4 * i)
                    if word & KEPT:
                        store_i32(out + 4 * n, word & POSITION)
                        n += 1
                slot = n_block * r + load_i64(meta + META * r + CIS_META.n_ref) - 1
                to = ref_sets + 4 * set_capacity * slot
                size = _dilated(found, count, radius, low, pos, to)
                store_i32(ref_counts + 4 * slot, size)
            else:
                slot = n_block * r + decision
                shared = ref_sets + 4 * set_capacity * slot
                for i in range(load_i32(ref_counts + 4 * slot)):
                    j = load_i32(shared + 4 * i)
                    if low <= j < high:
                        store_i32(out + 4 * n, j)
                        n += 1
            for j in range(high, pos + 1):
                store_i32(out + 4 * n, j)
                n += 1
            store_i32(counts + 4 * r, n)

    return kernel
