"""The few_queries path for a quantised KV cache: int16 queries times int8 or int4 K and V.

Queries are quantised to int16, one scale per KV_BLOCK elements; keys are transposed, so that a
vector has pairs of elements of LANES keys. No sum then runs across lanes, and one int16
multiply-add does the work of two float32 ones. A block's sum is below 32 * 127 * 32767 < 2^27.
"""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.types import KV_BLOCK, kv_row
from tamis.jit_kernels.cpu.attention.attend_batch import (
    BATCH,
    N_REGISTER,
    SCORE_ROW,
    Layout,
    widest,
)
from tamis.jit_kernels.cpu.kv.kv_rows import (
    crossing,
    load_words_each,
    loading_quants,
    prefetching,
    scales_at,
    store_crossed,
    store_scales,
)
from tamis.jit_kernels.cpu.lang.intrinsic import load_i32, store_f32
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_outer,
    add_products,
    add_scaled_words,
    addresses,
    broadcast_column,
    load_grid,
    load_row,
    load_word_row,
    scale_rows,
    store_grid,
    transposed,
    zero_grid,
    zero_word_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    hmax,
    load_f,
    round_i32,
    splat_f,
    store_f,
    vabs,
    vmax,
    zero_f,
)

LARGEST, TINY = np.float32(32767), np.float32(1e-30)


def packing(at: Layout, head_dim: int, group: int) -> Any:
    """The function pack(state): the group's queries as int16, in the order of store_crossed."""
    n_block = head_dim // KV_BLOCK

    @njit(error_model="numpy")
    def pack(state):
        for r in range(group):
            query, words = state + at.q + 4 * head_dim * r, state + at.words + 2 * head_dim * r
            for block in range(n_block):
                most = zero_f()
                for d in range(KV_BLOCK * block, KV_BLOCK * (block + 1), LANES):
                    most = vmax(vabs(load_f(query + 4 * d)), most)
                scale = hmax(most) / LARGEST
                factor = splat_f(np.float32(1) / scale if scale > TINY else np.float32(0))
                for d in range(KV_BLOCK * block, KV_BLOCK * (block + 1), LANES):
                    store_crossed(words + 2 * d, round_i32(load_f(query + 4 * d) * factor))
                store_f32(state + at.word_scales + 4 * (n_block * r + block), scale)

    return pack


def scoring(at: Layout, heads: tuple[int, int], kv_types: tuple[str, str]) -> Any:
    """The function score(state, batch, pages, n) of few_queries, for keys of q8_0 or q4_0.

    Scores after the n-th, up to a whole register tile, are undefined.
    """
    (head_dim, group), (type_k, type_v) = heads, kv_types
    n_block, lanes = head_dim // KV_BLOCK, LANES
    n_col = max((n for n in (4, 2, 1) if (2 * group + 1) * n < N_REGISTER), default=1)
    q_row, scale_row, score_row = 2 * head_dim, 4 * n_block, SCORE_ROW
    row_size, n_byte = kv_row(type_k, head_dim).itemsize, scales_at(type_k, head_dim)
    whole = n_byte // (4 * LANES) * 4 * LANES
    rest = max(1, (n_byte - whole) // 4)  # words after the last whole vector
    line = SCORE_ROW * head_dim // n_byte // 2  # of the panel, for each byte of a row
    cross = crossing(type_k)
    ask = prefetching(type_v, head_dim, LANES, head_dim)

    @njit(error_model="numpy")
    def turn(state, batch, pages, n):
        k_pages, v_pages = pages
        for j in range(0, n, LANES):
            ask(batch + BATCH.v_row + 4 * j, v_pages, 0)
            keys = addresses(batch + BATCH.k_row + 4 * j, k_pages, row_size, lanes)
            panel = state + at.keys + 4 * j
            for d in range(0, whole, 4 * LANES):
                words = transposed(load_words_each(keys, d, lanes))
                cross(panel + line * d, SCORE_ROW, words)
            if whole < n_byte:
                words = transposed(load_words_each(keys, whole, rest))
                cross(panel + line * whole, SCORE_ROW, words)
            store_scales(state + at.scales + 4 * j, score_row, keys, n_byte, n_block)

    @njit(error_model="numpy")
    def score(state, batch, pages, n):
        turn(state, batch, pages, n)
        for j in range(0, n, n_col * LANES):
            sums = zero_grid(group, n_col)
            for block in range(n_block):
                products = zero_word_grid(group, n_col)
                for pair in range(block * KV_BLOCK // 2, (block + 1) * KV_BLOCK // 2):
                    row = load_word_row(state + at.keys + SCORE_ROW * pair + 4 * j, n_col)
                    products = add_outer(products, state + at.words + 4 * pair, q_row, row)
                scales = load_row(state + at.scales + SCORE_ROW * block + 4 * j, n_col)
                own = broadcast_column(state + at.word_scales + 4 * block, scale_row, group)
                sums = add_scaled_words(sums, products, own, scales)
            store_grid(state + at.scores + 4 * j, SCORE_ROW, sums)

    return score


def weighing(at: Layout, heads: tuple[int, int], kv_types: tuple[str, str]) -> Any:
    """The function weigh(state, batch, ahead, pages, n) of few_queries, for q8_0 or q4_0 values.

    Weights are first multiplied by the scales of the values' blocks.
    """
    (head_dim, group), (type_k, type_v) = heads, kv_types
    n_block, lanes = head_dim // KV_BLOCK, LANES
    n_col = widest(group, lambda n: KV_BLOCK % (n * LANES) == 0)
    q_row, score_row, width, four = 4 * head_dim, SCORE_ROW, n_col * LANES, 4
    row_size, n_byte = kv_row(type_v, head_dim).itemsize, scales_at(type_v, head_dim)
    ask, load_value = prefetching(type_k, head_dim, 1, width), loading_quants(type_v, n_col)

    @njit(error_model="numpy")
    def scale(state, batch, v_pages, n):
        for j in range(0, n, LANES):
            values = addresses(batch + BATCH.v_row + 4 * j, v_pages, row_size, lanes)
            scales = state + at.scales + 4 * j
            store_scales(scales, score_row, values, n_byte, n_block)
            for block in range(n_block):
                factor = load_f(scales + SCORE_ROW * block)
                for r in range(group):
                    own = state + at.weights + SCORE_ROW * (group * block + r) + 4 * j
                    store_f(own, load_f(state + at.scores + SCORE_ROW * r + 4 * j) * factor)

    @njit(error_model="numpy")
    def weigh(state, batch, ahead, pages, n):
        k_pages, v_pages = pages
        scale(state, batch, v_pages, n)
        for d in range(0, head_dim, width):
            own = state + at.weights + SCORE_ROW * group * (d // KV_BLOCK)
            shrink = broadcast_column(state + at.shrink, four, group)
            sums = scale_rows(load_grid(state + at.sums + 4 * d, q_row, group, n_col), shrink)
            for j in range(n):
                ask(ahead + BATCH.k_row + 4 * j, k_pages, d)
                value = v_pages + row_size * load_i32(batch + BATCH.v_row + 4 * j)
                weights = broadcast_column(own + 4 * j, score_row, group)
                sums = add_products(sums, weights, load_value(value, d))
            store_grid(state + at.sums + 4 * d, q_row, sums)

    return weigh
