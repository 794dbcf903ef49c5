"""AUDIT_HEADS: compute dense attention beside a method's, and measure how far they are apart.

This is a check, not a hot path: a block takes a query head and passes over its K and V row by row.
"""

import math
from typing import Any

from numba import cuda, float32, float64, int32

from tamis.jit_kernels.contract.ops import AUDIT, STEP
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, reading, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARPS,
    Launch,
    largest,
    sum_of,
    sums_before,
    sync_block,
    thread,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_f32x8,
    load_i32,
    load_i64,
    ordered,
    store_f32,
    store_f64,
)
from tamis.jit_kernels.cuda.lang.ptx import exp2
from tamis.jit_kernels.cuda.lang.radix_topk import threshold
from tamis.jit_kernels.cuda.linear.activation import LOG2_E
from tamis.jit_kernels.cuda.select.common import LOWEST


@device
def mark(marks, row, low, n):
    """Write the factors by which a row of the Selection multiplies the weights of n positions.

    The positions are low .. low + n - 1.
    """
    begin, end, indices, log_weight, block = row
    for i in range(thread(), n, THREADS):
        store_f32(marks + 4 * i, float32(0))
    sync_block()
    for s in range(begin + thread(), end, THREADS):
        factor = float32(1)
        if log_weight != 0:
            factor = exp2(load_f32(log_weight + 4 * s) * float32(LOG2_E))
        first = load_i32(indices + 4 * s) * block - low
        for i in range(max(0, first), min(n, first + block)):
            store_f32(marks + 4 * i, factor)
    sync_block()


@device
def spread(rows, n, top, sums):
    """The sum and entropy of all weights, and the sum, number and entropy of the kept ones.

    Weights are kept as their marks say.
    """
    logits, weights, marks = rows
    moment, kept, n_kept, marked, kept_moment = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(thread(), n, THREADS):
        w, x = float64(load_f32(weights + 4 * i)), float64(load_f32(logits + 4 * i)) - top
        factor = float64(load_f32(marks + 4 * i))
        moment += w * x
        if factor > 0.0:
            n_kept += 1.0
            kept += w
            marked += w * factor
            kept_moment += w * factor * (x + math.log(factor))
    total = sum_of(weights, 0, n, sums)
    moment, kept = sums_before(moment, sums)[1], sums_before(kept, sums)[1]
    n_kept, marked = sums_before(n_kept, sums)[1], sums_before(marked, sums)[1]
    kept_moment = sums_before(kept_moment, sums)[1]
    entropy = math.log(total) - moment / total
    kept_entropy = math.log(marked) - kept_moment / marked if marked > 0.0 else 0.0
    return total, entropy, kept, n_kept, kept_entropy


@device
def best(rows, n, k, sums):
    """The sum of the weights of the k largest logits, and how many of these are kept."""
    logits, weights, marks = rows
    parts = cuda.shared.array(WARPS, int32)
    bar = threshold(logits, 0, n, k, parts)[0]
    weight, above, hits, tie, kept_ties = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(thread(), n, THREADS):
        order, is_kept = ordered(load_f32(logits + 4 * i)), load_f32(marks + 4 * i) > float32(0)
        if order > bar:
            weight += float64(load_f32(weights + 4 * i))
            above += 1.0
            hits += 1.0 if is_kept else 0.0
        elif order == bar:
            tie = float64(load_f32(weights + 4 * i))
            kept_ties += 1.0 if is_kept else 0.0
    weight, above = sums_before(weight, sums)[1], sums_before(above, sums)[1]
    hits, kept_ties = sums_before(hits, sums)[1], sums_before(kept_ties, sums)[1]
    tie = largest(tie, sums)
    return weight + (k - above) * tie, hits + min(k - above, kept_ties)


def _rows(head_dim: int, type: str) -> tuple[Any, Any]:
    """The functions (rows, j): address of position j's row; and that reads eight of its elements.

    rows: pages, table, n_head_kv, h.
    """
    size = row_bytes(type, head_dim)

    @device
    def row_at(rows, j):
        pages, table, n_head_kv, h = rows
        return pages + size * key_row(table, n_head_kv, h, j)

    return row_at, reading(type, head_dim)


def _passes_over_rows(head_dim: int, type: str) -> tuple[Any, Any]:
    """The functions score, of a query and all keys, and longest, of all rows: a thread a row."""
    row_at, read = _rows(head_dim, type)

    @device
    def score(query, keys, low, n, logits, scale, sums):
        """Logits of positions low .. low + n - 1, and the largest of them."""
        top = float32(LOWEST)
        for i in range(thread(), n, THREADS):
            x, row = float32(0), row_at(keys, low + i)
            for d in range(0, head_dim, 8):
                q, k = load_f32x8(query + 4 * d), read(row, d)
                for e in range(8):
                    x += q[e] * k[e]
            x *= scale
            store_f32(logits + 4 * i, x)
            top = max(top, x)
        return largest(float64(top), sums)

    @device
    def longest(rows, low, n, sums):
        """The largest length of a row."""
        most = float32(0)
        for i in range(thread(), n, THREADS):
            square, row = float32(0), row_at(rows, low + i)
            for d in range(0, head_dim, 8):
                k = read(row, d)
                for e in range(8):
                    square += k[e] * k[e]
            most = max(most, square)
        return math.sqrt(largest(float64(most), sums))

    return score, longest


def _comparing(head_dim: int, type: str) -> Any:
    """The function that compares an output with dense attention's, of values of the type."""
    row_at, read = _rows(head_dim, type)
    n_part = head_dim // 8  # threads that a row of values is shared by
    n_slice = THREADS // n_part  # rows of values at a time

    @device
    def eighth(weights, values, low, n, d, s):
        """Weighted sums of elements d .. d + 7 of every n_slice-th value, from the s-th on."""
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = 0.0
        for i in range(s, n, n_slice):
            v, w = read(row_at(values, low + i), d), float64(load_f32(weights + 4 * i))
            a0, a1, a2, a3 = a0 + w * v[0], a1 + w * v[1], a2 + w * v[2], a3 + w * v[3]
            a4, a5, a6, a7 = a4 + w * v[4], a5 + w * v[5], a6 + w * v[6], a7 + w * v[7]
        return a0, a1, a2, a3, a4, a5, a6, a7

    @device
    def compare(given, weights, values, span, total, own, sums):
        """Write how far `given` is from the weighted mean of the values, and that mean's length."""
        (low, n), part, s = span, thread() % n_part, thread() // n_part
        mine, error, norm = (0.0,) * 8, 0.0, 0.0
        if s < n_slice:
            mine = eighth(weights, values, low, n, 8 * part, s)
        for e in range(8):
            sums[thread()] = mine[e]
            sync_block()
            if s == 0:
                mean = 0.0
                for i in range(n_slice):
                    mean += sums[part + n_part * i]
                mean /= total
                error += (float64(load_f32(given + 4 * (8 * part + e))) - mean) ** 2
                norm += mean * mean
            sync_block()
        error, norm = sums_before(error, sums)[1], sums_before(norm, sums)[1]
        if thread() == 0:
            store_f64(own + 8 * AUDIT.error, math.sqrt(error))
            store_f64(own + 8 * AUDIT.norm, math.sqrt(norm))

    return compare


def audit_heads(head_dim: int, type_k: str, type_v: str) -> list[Launch]:
    """Kernel of AUDIT_HEADS: blocks stride over query heads."""
    score, longest_k = _passes_over_rows(head_dim, type_k)
    longest_v, compare = _passes_over_rows(head_dim, type_v)[1], _comparing(head_dim, type_v)

    def kernel(tid, n_thread, a):
        pos, n_head_kv = load_i64(a.step + STEP.pos), a.n_head // a.heads_per_kv
        sums = cuda.shared.array(THREADS, float64)
        low = max(0, pos - a.window + 1) if a.window != 0 else 0
        n = pos + 1 - low
        logits = a.work + 8 * (head_dim + (2 * head_dim + 3 * a.capacity + 1) // 2) * tid
        rows = logits, logits + 4 * a.capacity, logits + 8 * a.capacity
        for head in range(tid, a.n_head, n_thread):
            h, r = head // a.heads_per_kv, head // (a.n_head // a.n_row)
            own, at = a.report + 8 * len(AUDIT) * head, 4 * head_dim * head
            keys = (a.k_pages, a.k_table, n_head_kv, h)
            values = (a.v_pages, a.v_table, n_head_kv, h)
            top = score(a.q + at, keys, low, n, logits, a.scale, sums)
            for i in range(thread(), n, THREADS):
                weight = exp2((load_f32(logits + 4 * i) - float32(top)) * float32(LOG2_E))
                store_f32(rows[1] + 4 * i, weight)
            begin, end = load_i32(a.indptr + 4 * r), load_i32(a.indptr + 4 * r + 4)
            mark(rows[2], (begin, end, a.indices, a.log_weight, a.block), low, n)
            total, entropy, kept, n_kept, kept_entropy = spread(rows, n, top, sums)
            best_weight, hits = 0.0, 0.0
            if n_kept > 0.0:
                best_weight, hits = best(rows, n, int32(n_kept), sums)
            compare(a.given + at, rows[1], values, (low, n), total, own, sums)
            first = head % a.heads_per_kv == 0
            max_k = longest_k(keys, low, n, sums) if first else 0.0
            max_v = longest_v(values, low, n, sums) if first else 0.0
            if thread() == 0:
                store_f64(own + 8 * AUDIT.n_seen, float64(n))
                store_f64(own + 8 * AUDIT.n_kept, n_kept)
                store_f64(own + 8 * AUDIT.mass, kept / total)
                store_f64(own + 8 * AUDIT.best_mass, best_weight / total)
                store_f64(own + 8 * AUDIT.recall, hits / n_kept if n_kept > 0.0 else 0.0)
                store_f64(own + 8 * AUDIT.entropy, entropy)
                store_f64(own + 8 * AUDIT.kept_entropy, kept_entropy)
                store_f64(own + 8 * AUDIT.max_k, max_k)
                store_f64(own + 8 * AUDIT.max_v, max_v)
            sync_block()  # before the next head's logits overwrite what is read here

    return [Launch(kernel)]
