"""Quest's ops: bounds of the keys of each page, and the scores of pages by them."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.op import POS
from tamis.jit_kernels.contract.types import LINE, kv_row
from tamis.jit_kernels.cpu.attention.attend_batch import widest
from tamis.jit_kernels.cpu.kv.kv_rows import loading_one, row_at
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, store_f32
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_products,
    load_column,
    load_half_spaced,
    store_sums,
    zero_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    load_f,
    load_f32x16,
    prefetch,
    store_f,
    store_f32x16,
    store_half,
    vmax,
    vmin,
    zero_f32x16,
)

AHEAD = 16  # pages by which reads of bounds are prefetched


def quest_bounds(head_dim: int, type_k: str) -> Any:
    """Kernel of QUEST_BOUNDS: threads stride over pages."""
    load, size = loading_one(type_k, head_dim), kv_row(type_k, head_dim).itemsize

    @njit(error_model="numpy")
    def split(q, parts, n_head):
        for h in range(n_head):
            for d in range(0, head_dim, 16):
                x = load_f32x16(q[h] + 4 * d)
                store_f32x16(parts[h, 0] + 4 * d, vmax(x, zero_f32x16()))
                store_f32x16(parts[h, 1] + 4 * d, vmin(x, zero_f32x16()))

    def kernel(tid, n_thread, a):
        pos = a.step[POS]
        if tid == n_thread - 1:
            split(a.q[0], a.parts, a.n_head)
        # The last page is recomputed: it may have grown, or have been truncated and rewritten.
        first = min(a.filled[0], pos) // a.page
        n_new = pos // a.page + 1 - first
        for item in range(tid, n_new * a.n_head_kv, n_thread):
            h, p = item % a.n_head_kv, first + item // a.n_head_kv
            tops, bottoms = a.bounds[h, p, 0], a.bounds[h, p, 1]
            low, high = p * a.page, min(pos + 1, (p + 1) * a.page)
            for d in range(0, head_dim, LANES):
                top = load(a.k_pages + size * row_at(a.k_table, a.n_head_kv, h, low), d)
                bottom = top
                for j in range(low + 1, high):
                    x = load(a.k_pages + size * row_at(a.k_table, a.n_head_kv, h, j), d)
                    top, bottom = vmax(top, x), vmin(bottom, x)
                store_half(tops + 2 * d, top)
                store_half(bottoms + 2 * d, bottom)

    return kernel


def quest_score(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of QUEST_SCORE: threads share the pages of each KV head, read once for its heads.

    The larger of q M and q m is max(q, 0) M + min(q, 0) m, as m <= M.
    """
    several = widest(heads, lambda n: 4 % n == 0)
    row, part, page_size = 8 * head_dim, 4 * head_dim, 4 * head_dim

    def scoring(n_page: int) -> Any:
        @njit(error_model="numpy")
        def score(parts, bounds, scores, stride):
            sums = zero_grid(heads, n_page)
            for d in range(0, head_dim, LANES):
                at = bounds + 2 * d
                column = load_column(parts + 4 * d, row, heads)
                sums = add_products(sums, column, load_half_spaced(at, page_size, n_page))
                column = load_column(parts + part + 4 * d, row, heads)
                at += 2 * head_dim
                sums = add_products(sums, column, load_half_spaced(at, page_size, n_page))
            store_sums(scores, stride, sums)

        return score

    score, score_one = scoring(several), scoring(1)

    @njit(error_model="numpy")
    def join(scores, stride, n):
        """Reduce each group's heads by maximum, into its first head's scores."""
        whole = n // LANES * LANES
        for r in range(0, heads, group):
            first = scores + stride * r
            for g in range(1, group):
                for i in range(0, whole, LANES):
                    more = load_f(first + stride * g + 4 * i)
                    store_f(first + 4 * i, vmax(load_f(first + 4 * i), more))
                for i in range(whole, n):
                    more = load_f32(first + stride * g + 4 * i)
                    store_f32(first + 4 * i, max(load_f32(first + 4 * i), more))

    def kernel(tid, n_thread, a):
        pos = a.step[POS]
        n, stride = pos // a.page + 1, 4 * a.n_page
        first, end = n * tid // n_thread, n * (tid + 1) // n_thread
        whole = first + (end - first) // several * several
        for h in range(a.n_head_kv):
            queries, own, rows = a.parts[heads * h], a.bounds[h], a.scores[heads * h]
            for p in range(first, whole, several):
                for line in range(page_size * AHEAD, page_size * (AHEAD + several), LINE):
                    prefetch(own[p] + line)
                score(queries, own[p], rows + 4 * p, stride)
            for p in range(whole, end):
                score_one(queries, own[p], rows + 4 * p, stride)
            if group > 1:
                join(rows + 4 * first, stride, end - first)
        if tid == 0:
            a.filled[0] = pos + 1

    return kernel
