"""Scores of gathered keys: q . k for the heads of a query, and the log-sum-exp over a list.

Rows are int32 indices of rows of head_dim elements, of a type of KV_TYPES, at a base address. A
list is followed by LIST_PAD more valid rows (`pad_list`): several keys are multiplied at a time,
and later ones are prefetched.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import LIST_PAD, TILE
from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.jit_kernels.cpu.attention.attend_batch import LOWEST, MASKED, N_REGISTER
from tamis.jit_kernels.cpu.kv.kv_rows import loading_each
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, store_f32, store_i32
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_products,
    addresses,
    load_column,
    prefetch_each,
    store_sums,
    zero_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    hmax,
    hsum,
    lane,
    load_f,
    splat_f,
    vexp,
    vmax,
    zero_f,
)

AHEAD = 16  # rows prefetched while others are multiplied
TILE_ROW = 4 * TILE  # bytes of a head's products in a tile


@njit(error_model="numpy")
def key_row(k_table, n_head_kv, h, j):
    """The row of the key pages that holds KV head h's key of position j."""
    return (load_i32(k_table + 4 * (j // PAGE)) * n_head_kv + h) * PAGE + j % PAGE


@njit(error_model="numpy")
def pad_list(rows, n):
    """Repeat the last of n > 0 entries LIST_PAD times."""
    for i in range(LIST_PAD):
        store_i32(rows + 4 * (n + i), load_i32(rows + 4 * (n - 1)))


def products_of(head_dim: int, group: int, type: str = "f16") -> Any:
    """The function run(tile, heads, rows, base, n) for `group` heads, f32 [group, head_dim].

    tile f32 [group, TILE]: receives q . k of the first n <= TILE rows, and of some after them.
    """
    fits = [n for n in (1, 2, 4, 8) if n <= LANES and (group + 1) * n <= N_REGISTER]
    n_key = max(fits, default=1)
    size, load = kv_row(type, head_dim).itemsize, loading_each(type, head_dim)
    q_row, tile_row = 4 * head_dim, TILE_ROW

    @njit(error_model="numpy")
    def run(tile, heads, rows, base, n):
        for j in range(0, n, n_key):
            keys = addresses(rows + 4 * j, base, size, n_key)
            prefetch_each(addresses(rows + 4 * (j + AHEAD), base, size, n_key), size)
            sums = zero_grid(group, n_key)
            for d in range(0, head_dim, LANES):
                queries = load_column(heads + 4 * d, q_row, group)
                sums = add_products(sums, queries, load(keys, d))
            store_sums(tile + 4 * j, tile_row, sums)

    return run


def normaliser(head_dim: int, group: int, type: str) -> Any:
    """The function run(at, queries, base, n, scale) over the heads of several queries.

    offsets[query, head] = log sum exp of its scores of the n listed rows. at: addresses of rows,
    tile f32 [group, TILE], offsets f32 [n_query, group]; queries: address of the first one's heads,
    number, bytes from one to the next.
    """
    products = products_of(head_dim, group, type)

    @njit(error_model="numpy")
    def run(at, queries, base, n, scale):
        rows, tile, offsets = at
        heads, n_query, apart = queries
        for t in range(n_query):
            for g in range(group):
                store_f32(offsets + 4 * (group * t + g), LOWEST)
            for j in range(0, n, TILE):
                count = min(TILE, n - j)
                products(tile, heads + t * apart, rows + 4 * j, base, count)
                for g in range(group):
                    row, to = tile + TILE_ROW * g, offsets + 4 * (group * t + g)
                    for i in range(count, TILE):
                        store_f32(row + 4 * i, MASKED)
                    top = splat_f(load_f32(to))
                    for i in range(0, TILE, LANES):
                        top = vmax(load_f(row + 4 * i) * splat_f(scale), top)
                    best = hmax(top)
                    total = zero_f()
                    for i in range(0, TILE, LANES):
                        total += vexp(load_f(row + 4 * i) * splat_f(scale) - splat_f(best))
                    before = lane(vexp(splat_f(load_f32(to) - best)), 0)
                    store_f32(to, best + np.float32(math.log(hsum(total) + before)))

    return run
