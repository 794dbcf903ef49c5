"""AUDIT_HEADS: dense attention of the same queries, and the distance of a method's output from it.

A check, not a hot path: three passes over the keys' logits in plain loops, one over the values.
MASS_BRACKET: bounds of the omitted mass, by coded keys.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import AUDIT, KEYS, STEP
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cpu.attention.key_codes import OFFSET
from tamis.jit_kernels.cpu.kv.kv_rows import row_at, rows_of_type
from tamis.jit_kernels.cpu.lang.blocks16 import dot_float
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    store_f32,
    store_f64,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    fma,
    load_f,
    splat_f,
    store_f,
    vexp,
)
from tamis.jit_kernels.cpu.select.common import ordered, threshold

ZERO, LOWEST = np.float32(0), np.float32(-3e38)
HALF = 128  # of the numbers of a byte


@njit(error_model="numpy")
def weigh(logits, weights, n, top):
    """Write exp(logit - top) of n positions, up to the end of the last vector."""
    for i in range(n, (n + LANES - 1) // LANES * LANES):
        store_f32(logits + 4 * i, LOWEST)
    for i in range(0, n, LANES):
        store_f(weights + 4 * i, vexp(load_f(logits + 4 * i) - splat_f(top)))


@njit(error_model="numpy")
def mark(marks, row, low, n):
    """Write the weight factors of positions low .. low + n - 1 in a Selection; 0: not selected."""
    begin, end, indices, log_weight, block = row
    for i in range(n):
        store_f32(marks + 4 * i, ZERO)
    for s in range(begin, end):
        factor = np.float32(1)
        if log_weight != 0:
            factor = np.float32(math.exp(load_f32(log_weight + 4 * s)))
        first = load_i32(indices + 4 * s) * block - low
        for i in range(max(0, first), min(n, first + block)):
            store_f32(marks + 4 * i, factor)


@njit(error_model="numpy")
def spread(logits, weights, marks, n, top):
    """The sum and entropy of all weights, and the sum, count and entropy of the selected ones."""
    total, moment, kept, n_kept, marked, kept_moment = 0.0, 0.0, 0.0, 0, 0.0, 0.0
    for i in range(n):
        w, x = np.float64(load_f32(weights + 4 * i)), load_f32(logits + 4 * i) - top
        factor = np.float64(load_f32(marks + 4 * i))
        total += w
        moment += w * x
        if factor > 0:
            n_kept += 1
            kept += w
            marked += w * factor
            kept_moment += w * factor * (x + math.log(factor))
    entropy = math.log(total) - moment / total
    kept_entropy = math.log(marked) - kept_moment / marked if marked > 0 else 0.0
    return total, entropy, kept, n_kept, kept_entropy


@njit(error_model="numpy")
def best(logits, weights, marks, n, k):
    """The weight of the k largest logits, and how many of these positions are selected."""
    bar = threshold(logits, 0, n, k)
    total, above, hits, tie_weight, kept_ties = 0.0, 0, 0, 0.0, 0
    for i in range(n):
        order, is_kept = ordered(load_f32(logits + 4 * i)), load_f32(marks + 4 * i) > ZERO
        if order > bar:
            total += load_f32(weights + 4 * i)
            above += 1
            hits += is_kept
        elif order == bar:
            tie_weight = np.float64(load_f32(weights + 4 * i))
            kept_ties += is_kept
    # The threshold may be below the k-th best: then nothing equals it, and `above` is k.
    return total + (k - above) * tie_weight, hits + min(k - above, kept_ties)


def _lengths(head_dim: int, type: str) -> Any:
    """The function longest(pages, table, heads, low, n, row): the largest L2 norm of a row.

    heads: n_head_kv and which one of them; row: scratch, f32 [head_dim].
    """
    read = rows_of_type(type, head_dim).read

    @njit(error_model="numpy")
    def longest(pages, table, heads, low, n, row):
        most, (n_head_kv, h) = ZERO, heads
        for j in range(low, low + n):
            read(pages, row_at(table, n_head_kv, h, j), row)
            most = max(most, dot_float(row, row, head_dim))
        return math.sqrt(np.float64(most))

    return longest


def _dense(head_dim: int, type: str) -> Any:
    """The function attend(weights, pages, table, heads, low, n, own).

    own: sums f64 [head_dim] = weights @ values, part f32 [head_dim], which holds those of a page at
    most, and row f32 [head_dim].
    """
    read = rows_of_type(type, head_dim).read

    @njit(error_model="numpy")
    def attend(weights, pages, table, heads, low, n, own):
        (n_head_kv, h), (sums, part, row) = heads, own
        for d in range(head_dim):
            store_f64(sums + 8 * d, 0.0)
        for first in range(0, n, PAGE):
            for d in range(head_dim):
                store_f32(part + 4 * d, ZERO)
            for i in range(first, min(n, first + PAGE)):
                read(pages, row_at(table, n_head_kv, h, low + i), row)
                weight = splat_f(load_f32(weights + 4 * i))
                for d in range(0, 4 * head_dim, 4 * LANES):
                    store_f(part + d, fma(weight, load_f(row + d), load_f(part + d)))
            for d in range(head_dim):
                at = sums + 8 * d
                store_f64(at, load_f64(at) + load_f32(part + 4 * d))

    return attend


def audit_heads(head_dim: int, type_k: str, type_v: str) -> Any:
    """Kernel of AUDIT_HEADS: threads stride over query heads."""
    longest_k, longest_v = _lengths(head_dim, type_k), _lengths(head_dim, type_v)
    attend, read = _dense(head_dim, type_v), rows_of_type(type_k, head_dim).read

    @njit(error_model="numpy")
    def score(a, query, heads, low, n, logits, row):
        top, (n_head_kv, h) = LOWEST, heads
        for i in range(n):
            read(a.k_pages, row_at(a.k_table, n_head_kv, h, low + i), row)
            x = dot_float(query, row, head_dim) * a.scale
            store_f32(logits + 4 * i, x)
            top = max(top, x)
        return top

    @njit(error_model="numpy")
    def compare(given, sums, total, own):
        error, norm = 0.0, 0.0
        for d in range(head_dim):
            x = load_f64(sums + 8 * d) / total
            error += (load_f32(given + 4 * d) - x) ** 2
            norm += x * x
        store_f64(own + 8 * AUDIT.error, math.sqrt(error))
        store_f64(own + 8 * AUDIT.norm, math.sqrt(norm))

    def kernel(tid, n_thread, a):
        pos, n_head_kv = load_i64(a.step + STEP.pos), a.n_head // a.heads_per_kv
        low = max(0, pos - a.window + 1) if a.window != 0 else 0
        n = pos + 1 - low
        sums = a.work + 8 * (head_dim + (2 * head_dim + 3 * a.capacity + 1) // 2) * tid
        part, line = sums + 8 * head_dim, sums + 12 * head_dim
        logits = line + 4 * head_dim
        weights, marks = logits + 4 * a.capacity, logits + 8 * a.capacity
        for head in range(tid, a.n_head, n_thread):
            h, r = head // a.heads_per_kv, head // (a.n_head // a.n_row)
            own, at, heads = a.report + 8 * len(AUDIT) * head, 4 * head_dim * head, (n_head_kv, h)
            top = score(a, a.q + at, heads, low, n, logits, line)
            begin, end = load_i32(a.indptr + 4 * r), load_i32(a.indptr + 4 * r + 4)
            weigh(logits, weights, n, top)
            mark(marks, (begin, end, a.indices, a.log_weight, a.block), low, n)
            total, entropy, kept, n_kept, kept_entropy = spread(logits, weights, marks, n, top)
            best_weight, hits = best(logits, weights, marks, n, n_kept)
            attend(weights, a.v_pages, a.v_table, heads, low, n, (sums, part, line))
            compare(a.given + at, sums, total, own)
            store_f64(own + 8 * AUDIT.n_seen, np.float64(n))
            store_f64(own + 8 * AUDIT.n_kept, np.float64(n_kept))
            store_f64(own + 8 * AUDIT.mass, kept / total)
            store_f64(own + 8 * AUDIT.best_mass, best_weight / total)
            store_f64(own + 8 * AUDIT.recall, hits / n_kept if n_kept > 0 else 0.0)
            store_f64(own + 8 * AUDIT.entropy, entropy)
            store_f64(own + 8 * AUDIT.kept_entropy, kept_entropy)
            first = head % a.heads_per_kv == 0
            max_k = longest_k(a.k_pages, a.k_table, heads, low, n, line) if first else 0.0
            max_v = longest_v(a.v_pages, a.v_table, heads, low, n, line) if first else 0.0
            store_f64(own + 8 * AUDIT.max_k, max_k)
            store_f64(own + 8 * AUDIT.max_v, max_v)

    return kernel


def mass_bracket(head_dim: int) -> Any:
    """Kernel of MASS_BRACKET: threads stride over query heads."""

    @njit(error_model="numpy")
    def product(query, codes):
        """The product with a key's codes, minus the offset of these."""
        total = ZERO
        for d in range(0, head_dim, 4):
            word = load_i32(codes + KEYS * d)
            for i in range(4):
                code = ((word >> 8 * i) + HALF - OFFSET & 255) - HALF
                total += load_f32(query + 4 * (d + i)) * np.float32(code)
        return total

    @njit(error_model="numpy")
    def score(a, query, h, n, logits):
        """Write the logits of n positions; return the largest, and half of |q|_1 * scale."""
        middle = dot_float(query, a.centre + 4 * head_dim * h, head_dim)
        top, size = LOWEST, 0.0
        for d in range(head_dim):
            size += abs(np.float64(load_f32(query + 4 * d)))
        for j in range(n):
            block = a.codes + head_dim * (a.capacity * h + j // KEYS * KEYS)
            step = load_f32(a.steps + 4 * (a.capacity * h + j))
            x = (middle + step * product(query, block + 4 * (j % KEYS))) * a.scale
            store_f32(logits + 4 * j, x)
            top = max(top, x)
        return top, size * a.scale / 2

    def kernel(tid, n_thread, a):
        n = load_i64(a.step + STEP.pos) + 1
        for head in range(tid, a.n_head, n_thread):
            h, r = head // a.heads_per_kv, head // (a.n_head // a.n_row)
            logits = a.work + 8 * a.capacity * head
            marks, steps = logits + 4 * a.capacity, a.steps + 4 * a.capacity * h
            top, size = score(a, a.q + 4 * head_dim * head, h, n, logits)
            begin, end = load_i32(a.indptr + 4 * r), load_i32(a.indptr + 4 * r + 4)
            mark(marks, (begin, end, a.indices, 0, a.block), 0, n)
            least_kept, most_kept, least_left, most_left = 0.0, 0.0, 0.0, 0.0
            for j in range(n):
                x = np.float64(load_f32(logits + 4 * j) - top)
                error = size * load_f32(steps + 4 * j)
                low, high = math.exp(x - error), math.exp(min(x + error, 700.0))
                if load_f32(marks + 4 * j) > ZERO:
                    least_kept, most_kept = least_kept + low, most_kept + high
                else:
                    least_left, most_left = least_left + low, most_left + high
            own = a.found + 16 * head
            store_f64(own, least_left / (least_left + most_kept))
            store_f64(own + 8, most_left / (most_left + least_kept))

    return kernel
