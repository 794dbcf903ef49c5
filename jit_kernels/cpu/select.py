"""Ops that make Selections: windows, scores of keys, the best k."""

from typing import Any

from numba import njit

from tamis.jit_kernels.cpu.intrinsic import (
    f32_bits,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cpu.simd import (
    as_i32,
    count_at_least,
    hmax,
    load_f32x16,
    shift_right_signed,
    splat_i32x16,
    vmax,
    vmin,
)
from tamis.jit_kernels.cpu.tile import dot_half
from tamis.jit_kernels.ops import STEP
from tamis.jit_kernels.types import PAGE


@njit(error_model="numpy")
def key_at(k_pages, k_table, n_head_kv, h, j, head_dim):
    """Address of KV head h's f16 key of position j."""
    row = (load_i32(k_table + 4 * (j // PAGE)) * n_head_kv + h) * PAGE + j % PAGE
    return k_pages + 2 * head_dim * row


@njit
def write_ends(indices, count, sinks, low, high):
    """Write 0 .. sinks - 1 and low .. high - 1 from entry `count` on; the count after them."""
    for i in range(sinks):
        store_i32(indices + 4 * (count + i), i)
    for i in range(low, high):
        store_i32(indices + 4 * (count + sinks + i - low), i)
    return count + sinks + max(0, high - low)


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
                count = write_ends(indices, count, sinks, low, newest // block + 1)
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
                key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
                best = dot_half(heads, key, head_dim)
                for g in range(1, group):
                    best = max(best, dot_half(heads + 4 * head_dim * g, key, head_dim))
                store_f32(scores + 4 * (capacity * r + j), best * scale_f)

    return kernel


LEAST = -0x80000000  # below what `ordered` gives for any score


@njit
def ordered(score):
    """An int32 that orders as the float does; both zeros give the same."""
    bits = f32_bits(score)
    sign = bits >> 31  # without a branch: signs come in no order that a CPU could guess
    return ((bits & 0x7FFFFFFF) ^ -sign) + sign


@njit
def _in_order(x):
    """As `ordered`, of a vector."""
    bits = as_i32(x)
    sign = shift_right_signed(bits, 31)  # -1 where negative: there size becomes -size
    return ((bits & splat_i32x16(0x7FFFFFFF)) ^ sign) - sign


@njit
def _range_of(scores, low, high):
    """The smallest and the largest ordered score of entries low .. high - 1."""
    whole = high - (high - low) % 16
    least, most = splat_i32x16(0x7FFFFFFF), splat_i32x16(LEAST)
    for j in range(low, whole, 16):
        x = _in_order(load_f32x16(scores + 4 * j))
        least, most = vmin(x, least), vmax(x, most)
    bottom, top = -hmax(splat_i32x16(-1) - least) - 1, int(hmax(most))
    for j in range(whole, high):
        x = ordered(load_f32(scores + 4 * j))
        bottom, top = min(bottom, x), max(top, x)
    return bottom, top


@njit
def threshold(scores, low, high, k):
    """An ordered score that k of entries low .. high - 1 reach, by bisection on its bits.

    The largest one, the k-th best score; or a smaller one that the same k reach.
    """
    whole = high - (high - low) % 16
    found, above = _range_of(scores, low, high)
    while found < above:  # k entries reach found, fewer reach above + 1
        candidate = (found + above + 1) >> 1
        bar = splat_i32x16(candidate)
        count = 0
        for j in range(low, whole, 16):
            count += count_at_least(_in_order(load_f32x16(scores + 4 * j)), bar)
        for j in range(whole, high):
            count += ordered(load_f32(scores + 4 * j)) >= candidate
        if count >= k:
            found = candidate
            if count == k:
                break
        else:
            above = candidate - 1
    return found


@njit(error_model="numpy")
def keep_best(scores, items, n, k, out):
    """Copy the k < n items with the best scores, in order; ties go to earlier ones."""
    bar = threshold(scores, 0, n, k)
    ties = k
    for i in range(n):
        ties -= ordered(load_f32(scores + 4 * i)) > bar
    count = 0
    for i in range(n):
        # Written always, counted where kept: no branch that a CPU would guess wrong.
        store_i32(out + 4 * count, load_i32(items + 4 * i))
        order = ordered(load_f32(scores + 4 * i))
        tie = order == bar and ties > 0
        ties -= tie
        count += order > bar or tie
        if count == k:
            break


def select_top_k() -> Any:
    """Kernel of SELECT_TOP_K: threads take rows in turn; all rows have the same size."""

    def kernel(
        tid, n_thread, step, scores, indptr, indices, n_row, capacity, block, n_sink, n_recent,
        n_top,
    ):  # fmt: skip
        n_block = load_i64(step + STEP.pos) // block + 1
        size = min(n_block, n_sink + n_recent + n_top)
        everything = size == n_block
        for r in range(tid, n_row, n_thread):
            store_i32(indptr, 0)
            store_i32(indptr + 4 * (r + 1), (r + 1) * size)
            row, low, high = scores + 4 * capacity * r, n_sink, n_block - n_recent
            bar, ties = 0, 0
            if not everything and n_top > 0:
                bar = threshold(row, low, high, n_top)
                ties = n_top
                for j in range(low, high):
                    ties -= ordered(load_f32(row + 4 * j)) > bar
            at = indices + 4 * size * r
            for j in range(n_block):
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
