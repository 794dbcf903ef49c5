"""Attention of a few queries over a batch of up to PAGE keys, in a thread's scratch.

There are two ways to multiply: `few_queries` reads each key and value once from the pages (q8_0 and
q4_0: attend_q8.py); `many_queries` first unpacks the batch into packed float32 panels, which all
queries then read.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.types import KV_BLOCK, PAGE
from tamis.jit_kernels.cpu.kv.kv_rows import loading, prefetching
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, store_f32
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_products,
    addresses,
    broadcast_column,
    load_column,
    load_grid,
    load_half_each,
    load_half_row,
    load_row,
    scale_rows,
    store_grid,
    store_sums,
    transposed,
    zero_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    CPU,
    LANES,
    hmax,
    hsum,
    load_f,
    load_i,
    splat_f,
    splat_i,
    store_f,
    vexp,
    vmax,
    where_less,
    zero_f,
)

LOWEST = np.float32(-1e30)  # below every score; finite, so that differences stay finite
MASKED = np.float32(-3e38)  # so far below LOWEST that its weight is 0 for any maximum
PANEL = 2 * LANES  # keys, or elements of a value, of a panel; batches are padded
N_REGISTER = 32 if CPU.avx512 else 16
TILE_ROWS = 8 if CPU.avx512 else 4  # queries multiplied together by many_queries
VECTOR = 4 * LANES  # bytes
SCORE_ROW = 4 * PAGE  # bytes of a query's scores


class _Batch(NamedTuple):
    """Byte offsets in the list of a batch's keys; a vector may write past the last of PAGE."""

    k_row: int  # int32 [PAGE + 16] rows of the key pages
    v_row: int  # int32 [PAGE + 16]
    position: int  # int32 [PAGE + 16]
    bias: int  # f32 [PAGE + 16] added to the scores
    size: int


BATCH = _Batch(*(i * 4 * (PAGE + 16) for i in range(5)))


class Layout(NamedTuple):
    """Byte offsets in a thread's scratch, all multiples of 64."""

    q: int  # f32 [n_row, head_dim], times the scale
    sums: int  # f32 [n_row, head_dim] of weighted values
    scores: int  # f32 [n_row, PAGE], later weights
    row_max: int  # f32 [n_row] largest score so far
    batch_max: int  # f32 [n_row]
    shrink: int  # f32 [n_row] alpha: the factor of the sums after a new maximum
    row_sum: int  # f32 [n_row] sum of weights
    batches: int  # two lists, this batch's and the next one's
    keys: int  # f32 [PAGE / PANEL, head_dim, PANEL]
    values: int  # f32 [head_dim / width, PAGE, width]
    # For one token's queries with q8_0 and q4_0. Then keys has pairs of int16: words [head_dim / 2,
    # PAGE].
    scales: int  # f32 [n_block, PAGE] of the keys
    words: int  # int16 [group, head_dim] the queries
    word_scales: int  # f32 [group, n_block] of these
    weights: int  # f32 [n_block, group, PAGE] the weights, times the values' scales
    size: int


def layout_of(n_query: int, group: int, head_dim: int) -> Layout:
    """The scratch of a thread for n_query queries, `group` of a token."""
    n_row, n_block = -(-n_query // 16) * 16, -(-head_dim // KV_BLOCK)
    sizes = [n_row * head_dim] * 2 + [n_row * PAGE] + [n_row] * 4
    sizes += [2 * BATCH.size // 4] + [PAGE * head_dim] * 2
    sizes += [n_block * PAGE, -(-group * head_dim // 32) * 16]
    sizes += [-(-group * n_block // 16) * 16, n_block * group * PAGE]
    return Layout(*(4 * sum(sizes[:i]) for i in range(len(sizes) + 1)))


def widest(rows: int, fits: Any) -> int:
    """The most columns (up to 8) of a register tile of `rows` rows that fits the registers.

    Registers are also needed for a row of operands and one more vector; otherwise LLVM spills the
    tile.
    """
    counts = [n for n in range(1, 9) if fits(n) and rows * n + n < N_REGISTER]
    return max(counts, default=1)


def scoring(at: Layout, heads: tuple[int, int], kv_types: tuple[str, str]) -> Any:
    """The function score(state, batch, pages, n), for keys of float16.

    Scores of one token's `group` heads and the n keys of a batch; prefetches the batch's values.
    heads: head_dim, group; pages: addresses of K and of V.
    """
    head_dim, group = heads
    n_key = widest(group, lambda n: PANEL % n == 0)
    q_row, kv_row, score_row = 4 * head_dim, 2 * head_dim, SCORE_ROW
    ask = prefetching(kv_types[1], head_dim, n_key, head_dim)

    @njit(error_model="numpy")
    def score(state, batch, pages, n):
        k_pages, v_pages = pages
        for j in range(0, n, n_key):
            keys = addresses(batch + BATCH.k_row + 4 * j, k_pages, kv_row, n_key)
            ask(batch + BATCH.v_row + 4 * j, v_pages, 0)
            sums = zero_grid(group, n_key)
            for d in range(0, head_dim, LANES):
                queries = load_column(state + at.q + 4 * d, q_row, group)
                sums = add_products(sums, queries, load_half_each(keys, 2 * d))
            store_sums(state + at.scores + 4 * j, score_row, sums)

    return score


def weighing(at: Layout, heads: tuple[int, int], kv_types: tuple[str, str]) -> Any:
    """The function weigh(state, batch, ahead, pages, n), for values of float16.

    sums = sums * alpha + weights @ V; prefetches the keys of the batch `ahead`.
    """
    head_dim, group = heads
    n_col = widest(group, lambda n: head_dim % (n * LANES) == 0)
    q_row, kv_row, width = 4 * head_dim, 2 * head_dim, n_col * LANES
    four, score_row = 4, SCORE_ROW
    ask = prefetching(kv_types[0], head_dim, 1, width)

    @njit(error_model="numpy")
    def weigh(state, batch, ahead, pages, n):
        k_pages, v_pages = pages
        for d in range(0, head_dim, width):
            shrink = broadcast_column(state + at.shrink, four, group)
            sums = scale_rows(load_grid(state + at.sums + 4 * d, q_row, group, n_col), shrink)
            for j in range(n):
                ask(ahead + BATCH.k_row + 4 * j, k_pages, d)
                value = v_pages + kv_row * load_i32(batch + BATCH.v_row + 4 * j) + 2 * d
                weights = broadcast_column(state + at.scores + 4 * j, score_row, group)
                sums = add_products(sums, weights, load_half_row(value, n_col))
            store_grid(state + at.sums + 4 * d, q_row, sums)

    return weigh


def many_queries(at: Layout, head_dim: int, kv_types: tuple[str, str]) -> tuple[Any, Any, Any]:
    """Functions unpack(state, batch, pages, n, padded), score(state, n_q, n), weigh(state, n_q, n).

    unpack: the batch's K and V as packed panels; score and weigh as for few_queries, on n_q
    queries (a multiple of TILE_ROWS).
    """
    n_col = 2 if head_dim % PANEL == 0 else 1
    width = n_col * LANES
    q_row, key_row, score_row = 4 * head_dim, 4 * PANEL, SCORE_ROW
    rows, four = TILE_ROWS, 4
    load_keys = loading(kv_types[0], head_dim, LANES)
    load_value = loading(kv_types[1], head_dim, 1)

    @njit(error_model="numpy")
    def unpack(state, batch, pages, n, padded):
        k_pages, v_pages = pages
        for j in range(0, padded, LANES):
            keys = batch + BATCH.k_row + 4 * j
            panel = state + at.keys + q_row * (j // PANEL * PANEL) + 4 * (j % PANEL)
            for d in range(0, head_dim, LANES):
                store_grid(panel + key_row * d, key_row, transposed(load_keys(keys, k_pages, d)))
        for j in range(n):
            value = batch + BATCH.v_row + 4 * j
            for d in range(0, head_dim, LANES):
                panel = state + at.values + 4 * PAGE * (d // width * width) + 4 * (d % width)
                store_grid(panel + 4 * width * j, q_row, load_value(value, v_pages, d))

    @njit(error_model="numpy")
    def score(state, n_q, n):
        for j in range(0, n, PANEL):
            panel = state + at.keys + q_row * j
            for r in range(0, n_q, rows):
                queries = state + at.q + q_row * r
                sums = zero_grid(rows, 2)
                for d in range(head_dim):
                    column = broadcast_column(queries + 4 * d, q_row, rows)
                    sums = add_products(sums, column, load_row(panel + key_row * d, 2))
                store_grid(state + at.scores + score_row * r + 4 * j, score_row, sums)

    @njit(error_model="numpy")
    def weigh(state, n_q, n):
        for d in range(0, head_dim, width):
            panel = state + at.values + 4 * PAGE * d
            for r in range(0, n_q, rows):
                shrink = broadcast_column(state + at.shrink + 4 * r, four, rows)
                out, weights = (
                    state + at.sums + q_row * r + 4 * d,
                    state + at.scores + score_row * r,
                )
                sums = scale_rows(load_grid(out, q_row, rows, n_col), shrink)
                for j in range(n):
                    column = broadcast_column(weights + 4 * j, score_row, rows)
                    sums = add_products(sums, column, load_row(panel + 4 * width * j, n_col))
                store_grid(out, q_row, sums)

    return unpack, score, weigh


def masking(at: Layout, group: int) -> Any:
    """The function mask(state, batch, n_q, n, at_pos, window), which hides invisible keys.

    at_pos: pos, stride, ahead; query r belongs to the token at pos + r // group * stride and sees
    `ahead` later positions; window 0: no lower end.
    """

    @njit(error_model="numpy")
    def mask(state, batch, n_q, n, at_pos, window):
        pos, stride, ahead = at_pos
        hidden = splat_f(MASKED)
        for r in range(n_q):
            last = pos + r // group * stride
            low, high = splat_i(last - window + 1 if window != 0 else 0), splat_i(last + ahead)
            for j in range(0, n, LANES):
                score = state + at.scores + SCORE_ROW * r + 4 * j
                position, x = load_i(batch + BATCH.position + 4 * j), load_f(score)
                x = where_less(position, low, hidden, x)
                store_f(score, where_less(high, position, hidden, x))

    return mask


def softmax(at: Layout) -> Any:
    """The function run(state, batch, n_q, n): scores become weights relative to the new maxima.

    Milakov and Gimelshein 2018 (arXiv 1805.02867), Alg. 3.
    """

    @njit(error_model="numpy")
    def run(state, batch, n_q, n):
        for r in range(n_q):
            score, row_max = state + at.scores + SCORE_ROW * r, splat_f(MASKED)
            for j in range(0, n, LANES):
                x = load_f(score + 4 * j) + load_f(batch + BATCH.bias + 4 * j)
                store_f(score + 4 * j, x)
                row_max = vmax(x, row_max)
            store_f32(state + at.batch_max + 4 * r, hmax(row_max))
        for r in range(0, 4 * n_q, VECTOR):
            old = load_f(state + at.row_max + r)
            row_max = vmax(load_f(state + at.batch_max + r), old)
            shrink = vexp(old - row_max)
            store_f(state + at.row_max + r, row_max)
            store_f(state + at.shrink + r, shrink)
            store_f(state + at.row_sum + r, load_f(state + at.row_sum + r) * shrink)
        for r in range(n_q):
            score, row_max = (
                state + at.scores + SCORE_ROW * r,
                splat_f(load_f32(state + at.row_max + 4 * r)),
            )
            row_sum = zero_f()
            for j in range(0, n, LANES):
                weight = vexp(load_f(score + 4 * j) - row_max)
                store_f(score + 4 * j, weight)
                row_sum += weight
            at_sum = state + at.row_sum + 4 * r
            store_f32(at_sum, load_f32(at_sum) + hsum(row_sum))

    return run
