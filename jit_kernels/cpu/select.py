"""Ops that make Selections: windows, scores of keys, the best k."""

from typing import Any

from numba import int64, njit

from tamis.jit_kernels.cpu.intrinsic import (
    bits_f32,
    f32_bits,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cpu.simd import LANES, as_i32, hsum, load_f, reaches, splat_f, zero_f
from tamis.jit_kernels.cpu.tile import dot_half
from tamis.jit_kernels.ops import STEP
from tamis.jit_kernels.types import PAGE


def select_window() -> Any:
    """Kernel of SELECT_WINDOW. A few thousand integers at most: one thread writes them."""

    def kernel(tid, n_thread, step, indptr, indices, n_row, q_block, block, n_sink, n_recent):
        if tid != 0:
            return
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        count = 0
        store_i32(indptr, 0)
        for qb in range((n_tok + q_block - 1) // q_block):
            oldest = pos + qb * q_block
            newest = pos + min(n_tok, (qb + 1) * q_block) - 1
            low = max(0, oldest - n_recent + 1) // block if n_recent != 0 else 0
            sinks = min(low, (n_sink + block - 1) // block)
            for r in range(n_row):
                for i in range(sinks):
                    store_i32(indices + 4 * count, i)
                    count += 1
                for i in range(low, newest // block + 1):
                    store_i32(indices + 4 * count, i)
                    count += 1
                store_i32(indptr + 4 * (qb * n_row + r + 1), count)

    return kernel


def score_keys(head_dim: int, group: int) -> Any:
    """Kernel of SCORE_KEYS: threads share the positions of each row."""

    def kernel(
        tid, n_thread, step, q, k_pages, k_table, scores, n_row, heads_per_kv, n_head_kv, capacity,
        scale_f,
    ):  # fmt: skip
        n_kv = load_i64(step + STEP.pos) + 1
        for r in range(n_row):
            h, heads = r * group // heads_per_kv, q + 4 * head_dim * group * r
            for j in range(n_kv * tid // n_thread, n_kv * (tid + 1) // n_thread):
                row = (load_i32(k_table + 4 * (j // PAGE)) * n_head_kv + h) * PAGE + j % PAGE
                key = k_pages + 2 * head_dim * row
                best = dot_half(heads, key, head_dim)
                for g in range(1, group):
                    best = max(best, dot_half(heads + 4 * head_dim * g, key, head_dim))
                store_f32(scores + 4 * (capacity * r + j), best * scale_f)

    return kernel


@njit
def ordered(score):
    """An integer that orders as the float does; both zeros give the same."""
    bits = f32_bits(score)
    return (1 << 32) - bits if bits >> 31 else bits | 0x80000000


LOWEST = 0x00800000  # ordered(-inf)


@njit
def _count_reaching(scores, n, bar):
    """How many of n scores are at least `bar`: most of a selection's time."""
    bars, counts = splat_f(bar), as_i32(zero_f())
    for j in range(n // LANES):
        counts += reaches(load_f(scores + 4 * LANES * j), bars)
    count = int64(hsum(counts))
    for j in range(n // LANES * LANES, n):
        count += load_f32(scores + 4 * j) >= bar
    return count


@njit
def threshold(scores, low, high, k):
    """An ordered score that k of positions low .. high - 1 reach, by bisection on its bits.

    The largest one, the k-th best score; or a smaller one that the same k reach.
    """
    found = 0
    for bit in range(31, -1, -1):
        candidate = found | 1 << bit
        if candidate <= LOWEST:  # everything reaches it
            found = candidate
            continue
        bits = candidate & 0x7FFFFFFF if candidate >> 31 else (1 << 32) - candidate
        count = _count_reaching(scores + 4 * low, high - low, bits_f32(bits))
        if count >= k:
            found = candidate
            if count == k:
                break
    return found


def select_top_k() -> Any:
    """Kernel of SELECT_TOP_K: threads take rows in turn; all rows have the same size."""

    def kernel(
        tid, n_thread, step, scores, indptr, indices, n_row, capacity, n_sink, n_recent, n_top
    ):
        n_kv = load_i64(step + STEP.pos) + 1
        size = min(n_kv, n_sink + n_recent + n_top)
        everything = size == n_kv
        for r in range(tid, n_row, n_thread):
            store_i32(indptr, 0)
            store_i32(indptr + 4 * (r + 1), (r + 1) * size)
            row, low, high = scores + 4 * capacity * r, n_sink, n_kv - n_recent
            bar, ties = 0, 0
            if not everything and n_top > 0:
                bar = threshold(row, low, high, n_top)
                ties = n_top
                for j in range(low, high):
                    ties -= ordered(load_f32(row + 4 * j)) > bar
            at = indices + 4 * size * r
            for j in range(n_kv):
                keep = everything or j < low or j >= high
                if not keep and n_top > 0:
                    order = ordered(load_f32(row + 4 * j))
                    keep = order > bar or (order == bar and ties > 0)
                    if order == bar:
                        ties -= 1
                if keep:
                    store_i32(at, j)
                    at += 4

    return kernel


def select_pack() -> Any:
    """Kernel of SELECT_PACK: threads take rows in turn; each adds up the sizes before its own."""

    def kernel(tid, n_thread, sets, counts, indptr, indices, n_row, capacity):
        begin = 0
        for r in range(n_row):
            count = load_i32(counts + 4 * r)
            if r % n_thread == tid:
                store_i32(indptr, 0)
                store_i32(indptr + 4 * (r + 1), begin + count)
                row = sets + 4 * capacity * r
                for i in range(count):
                    store_i32(indices + 4 * (begin + i), load_i32(row + 4 * i))
            begin += count

    return kernel
