"""Column sums of attention weights: for each position, the weight that queries gave it."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cpu.attention.gathered_scores import key_row
from tamis.jit_kernels.cpu.attention.streamed_dot import picking, sweeping
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, load_i64, store_f32, store_i32
from tamis.jit_kernels.cpu.lang.simd import (
    hmax,
    hsum,
    load_f32x16,
    splat_f32x16,
    store_f32x16,
    vexp,
    vmax,
    zero_f32x16,
)
from tamis.jit_kernels.cpu.select.common import LOWEST, key_at

ONE = np.float32(1)


@njit(error_model="numpy")
def exponentials(row, n, end, scale):
    """Replace n entries x by exp((x - max) * scale), padding up to `end` by 0; return the sum."""
    for i in range(n, end):
        store_f32(row + 4 * i, LOWEST)
    row_max, row_sum, factor = splat_f32x16(LOWEST), zero_f32x16(), splat_f32x16(scale)
    for i in range(0, end, 16):
        row_max = vmax(row_max, load_f32x16(row + 4 * i))
    row_max = splat_f32x16(hmax(row_max))
    for i in range(0, end, 16):
        weight = vexp((load_f32x16(row + 4 * i) - row_max) * factor)
        store_f32x16(row + 4 * i, weight)
        row_sum += weight
    return hsum(row_sum)


@njit(error_model="numpy")
def n_kept(past_pos, n_past, pos):
    """How many consecutive past queries, ending just before `pos`, are stored."""
    n = 0
    while n < n_past and n < pos:
        p = pos - 1 - n
        if load_i64(past_pos + 8 * (p % n_past)) != p:
            break
        n += 1
    return n


def column_sums(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of COLUMN_SUMS: threads stride over KV heads."""
    sweep, size, rows_per_kv = sweeping(head_dim, heads, PAGE), 4 * head_dim, heads // group

    def kernel(tid, n_thread, a):
        pos, stride = load_i64(a.step + STEP.pos), 4 * a.capacity
        n_query = n_kept(a.past_pos, a.n_past, pos)
        for h in range(tid, a.n_head_kv, n_thread):
            first, row = a.sums + stride * rows_per_kv * h, a.scores + stride * heads * h
            for r in range(rows_per_kv):
                for i in range(0, stride, 64):
                    store_f32x16(first + stride * r + i, zero_f32x16())
            for t in range(max(1, n_query)):
                p, queries = pos, a.q + size * heads * h
                if n_query > 0:
                    p = pos - 1 - t
                    queries = a.past + size * heads * (a.n_head_kv * (p % a.n_past) + h)
                end = (p // PAGE + 1) * PAGE
                for j in range(0, end, PAGE):
                    keys = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
                    following = min(j + PAGE, end - PAGE)
                    ahead = key_at(a.k_pages, a.k_table, a.n_head_kv, h, following, head_dim)
                    sweep(queries, keys, ahead, row + 4 * j, stride)
                for g in range(heads):
                    own, to = row + stride * g, first + stride * (g // group)
                    share = splat_f32x16(ONE / exponentials(own, p + 1, end, a.scale))
                    for i in range(0, 4 * end, 64):
                        x = load_f32x16(to + i) + load_f32x16(own + i) * share
                        store_f32x16(to + i, x)

    return kernel


def column_add(head_dim: int, group: int) -> Any:
    """Kernel of COLUMN_ADD: threads stride over rows."""
    pick, size = picking(head_dim, group), 4 * head_dim

    def kernel(tid, n_thread, a):
        for r in range(tid, a.n_row, n_thread):
            begin = load_i32(a.indptr + 4 * r)
            n, kept, h = load_i32(a.indptr + 4 * r + 4) - begin, a.indices + 4 * begin, r * group
            own, rows = a.scores + 4 * a.most * group * r, a.lines + 4 * a.most * r
            for i in range(n):
                j = load_i32(kept + 4 * i)
                store_i32(rows + 4 * i, key_row(a.k_table, a.n_head_kv, h // a.heads_per_kv, j))
            pick(a.q + size * h, a.k_pages, rows, n, own, 4 * a.most)
            for g in range(group):
                weights, end = own + 4 * a.most * g, (n + 15) // 16 * 16
                share = ONE / exponentials(weights, n, end, a.scale)
                for i in range(n):
                    at = a.sums + 4 * (a.capacity * r + load_i32(kept + 4 * i))
                    store_f32(at, load_f32(at) + load_f32(weights + 4 * i) * share)

    return kernel
