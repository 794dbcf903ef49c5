"""Vertical-slash's ops: the columns and diagonals that a chunk's last queries attend to."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import LIST_PAD, STEP, TILE, slash_work
from tamis.jit_kernels.cpu.attention.attend_batch import MASKED
from tamis.jit_kernels.cpu.attention.gathered_scores import TILE_ROW, key_row, pad_list, products_of
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, load_i64, store_f32, store_i32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    hmax,
    hsum,
    load_f,
    splat_f,
    store_f,
    vexp,
    vmax,
    zero_f,
)
from tamis.jit_kernels.cpu.select.common import keep_best

FORCED = 3e38  # the weight of lines that are always selected
row_work = njit(slash_work)


@njit(error_model="numpy")
def add_weights(row, n, vertical, slash):
    """Add softmax(row) of n scores to both; row is overwritten up to a multiple of TILE."""
    top, total = splat_f(MASKED), zero_f()
    for j in range(0, n, LANES):
        top = vmax(load_f(row + 4 * j), top)
    best = splat_f(hmax(top))
    for j in range(0, n, LANES):
        weight = vexp(load_f(row + 4 * j) - best)
        store_f(row + 4 * j, weight)
        total += weight
    share = splat_f(1.0) / splat_f(hsum(total))
    whole = n // LANES * LANES
    for j in range(0, whole, LANES):
        weight = load_f(row + 4 * j) * share
        store_f(vertical + 4 * j, load_f(vertical + 4 * j) + weight)
        store_f(slash + 4 * j, load_f(slash + 4 * j) + weight)
    one = hmax(share)
    for j in range(whole, n):
        weight = load_f32(row + 4 * j) * one
        store_f32(vertical + 4 * j, load_f32(vertical + 4 * j) + weight)
        store_f32(slash + 4 * j, load_f32(slash + 4 * j) + weight)


@njit(error_model="numpy")
def choose(weights, numbers, n, low, high, k, chosen):
    """Write the number of selected lines, and these: low .. high - 1 and the best others."""
    for j in range(low, high):
        store_f32(weights + 4 * j, FORCED)
    for j in range(n):
        store_i32(numbers + 4 * j, j)
    store_i32(chosen, min(n, k))
    if n > k:
        keep_best(weights, numbers, n, k, chosen + 4)
    else:
        for j in range(n):
            store_i32(chosen + 4 * (1 + j), j)


def slash_lines(head_dim: int, group: int) -> Any:
    """Kernel of SLASH_LINES: threads stride over rows."""
    products = products_of(head_dim, group)

    @njit(error_model="numpy")
    def score(a, scores, tile, heads, rows, n):
        """The group's scores of n keys, to rows of `capacity`; MASKED up to a multiple of TILE."""
        for j in range(0, n, TILE):
            count = min(TILE, n - j)
            products(tile, heads, rows + 4 * j, a.k_pages, count)
            for g in range(group):
                row, to = tile + TILE_ROW * g, scores + 4 * (a.capacity * g + j)
                for i in range(0, TILE, LANES):
                    store_f(to + 4 * i, load_f(row + 4 * i) * splat_f(a.scale))
                for i in range(count, TILE):
                    store_f32(to + 4 * i, MASKED)

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n = pos + n_tok
        for h in range(tid, a.n_row, n_thread):
            rows = a.work + 4 * row_work(group, a.capacity, a.n_last) * h
            scores = rows + 4 * (a.capacity + LIST_PAD)
            tile = scores + 4 * group * a.capacity
            ver, sla = a.vertical + 4 * a.capacity * h, a.slash + 4 * a.capacity * h
            for j in range(n):
                store_i32(rows + 4 * j, key_row(a.k_table, a.n_row, h, j))
                store_f32(ver + 4 * j, 0.0)
                store_f32(sla + 4 * j, 0.0)
            pad_list(rows, n)
            for t in range(max(0, n_tok - a.n_last), n_tok):
                seen = pos + t + 1
                heads = a.q + 4 * head_dim * group * (t * a.n_row + h)
                score(a, scores, tile, heads, rows, seen)
                for g in range(group):
                    add_weights(scores + 4 * a.capacity * g, seen, ver, sla + 4 * (n - seen))
            # The keys' rows are not needed any more: the list is reused for line numbers.
            columns, low = a.columns + 4 * (1 + a.n_vertical) * h, max(0, n - a.n_local)
            choose(ver, rows, n, 0, min(n, a.n_sink), a.n_vertical, columns)
            choose(sla, rows, n, low, n, a.n_slash, a.diagonals + 4 * (1 + a.n_slash) * h)

    return kernel


@njit(error_model="numpy")
def write_lines(indices, columns, diagonals, oldest, newest, shift):
    """Write a row's positions, ascending: columns up to newest, and diagonals; returns how many.

    Diagonal i is the positions oldest - shift + i .. newest - shift + i.
    """
    count, c, following = 0, 0, 0
    n_column = load_i32(columns)
    for i in range(load_i32(diagonals) + 1):
        # After the last diagonal, the remaining columns.
        last = i == load_i32(diagonals)
        at = 0 if last else load_i32(diagonals + 4 * (1 + i))
        low = newest + 1 if last else max(following, oldest - shift + at)
        high = newest if last else newest - shift + at
        while c < n_column and load_i32(columns + 4 * (1 + c)) < low:
            column = load_i32(columns + 4 * (1 + c))
            if column >= following:
                store_i32(indices + 4 * count, column)
                count += 1
            c += 1
        for j in range(low, high + 1):
            store_i32(indices + 4 * count, j)
            count += 1
        following = max(following, high + 1)
    return count


def slash_select() -> Any:
    """Kernel of SLASH_SELECT: one thread writes, since a row starts where the last one ends."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        count, row = 0, 0
        store_i32(a.indptr, 0)
        for first in range(0, n_tok, a.q_block):
            oldest, newest = pos + first, pos + min(n_tok, first + a.q_block) - 1
            for h in range(a.n_row):
                count += write_lines(
                    a.indices + 4 * count,
                    a.columns + 4 * (1 + a.n_vertical) * h,
                    a.diagonals + 4 * (1 + a.n_slash) * h,
                    oldest,
                    newest,
                    pos + n_tok - 1,
                )
                row += 1
                store_i32(a.indptr + 4 * row, count)

    return kernel
