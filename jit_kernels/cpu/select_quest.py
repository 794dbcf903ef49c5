"""Quest's ops: bounds of the keys of each page, and the scores of pages by them."""

from typing import Any

from tamis.jit_kernels.cpu.intrinsic import load_i64, store_f32, store_i64
from tamis.jit_kernels.cpu.select import key_at
from tamis.jit_kernels.cpu.simd import (
    hsum,
    load_f16x16,
    load_f32x16,
    store_f16x16,
    vmax,
    vmin,
    zero_f32x16,
)
from tamis.jit_kernels.ops import STEP


def quest_bounds(head_dim: int) -> Any:
    """Kernel of QUEST_BOUNDS: threads take pages in turn."""

    def kernel(tid, n_thread, step, k_pages, k_table, bounds, filled, n_head_kv, n_page, page):
        pos = load_i64(step + STEP.pos)
        # The page that was last is made anew: it may have grown, or lost positions to others.
        first = min(load_i64(filled), pos) // page
        n_new = pos // page + 1 - first
        for item in range(tid, n_new * n_head_kv, n_thread):
            h, p = item % n_head_kv, first + item // n_head_kv
            at = bounds + 4 * head_dim * (n_page * h + p)
            low, high = p * page, min(pos + 1, (p + 1) * page)
            for i in range(0, 2 * head_dim, 32):
                top = load_f16x16(key_at(k_pages, k_table, n_head_kv, h, low, head_dim) + i)
                bottom = top
                for j in range(low + 1, high):
                    x = load_f16x16(key_at(k_pages, k_table, n_head_kv, h, j, head_dim) + i)
                    top, bottom = vmax(top, x), vmin(bottom, x)
                store_f16x16(at + i, top)
                store_f16x16(at + 2 * head_dim + i, bottom)

    return kernel


def quest_score(head_dim: int, group: int) -> Any:
    """Kernel of QUEST_SCORE: threads share the pages of each row."""

    def kernel(
        tid, n_thread, step, q, bounds, filled, scores, n_row, heads_per_kv, n_page, page
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        n = pos // page + 1
        for r in range(n_row):
            h, heads = r * group // heads_per_kv, q + 4 * head_dim * group * r
            for p in range(n * tid // n_thread, n * (tid + 1) // n_thread):
                at, best = bounds + 4 * head_dim * (n_page * h + p), 0.0
                for g in range(group):
                    total = zero_f32x16()
                    for i in range(0, head_dim, 16):
                        x = load_f32x16(heads + 4 * (head_dim * g + i))
                        top = load_f16x16(at + 2 * i)
                        bottom = load_f16x16(at + 2 * (head_dim + i))
                        total += vmax(x * top, x * bottom)
                    bound = hsum(total)
                    best = max(best, bound) if g > 0 else bound
                store_f32(scores + 4 * (n_page * r + p), best)
        if tid == 0:
            store_i64(filled, pos + 1)

    return kernel
