"""Quest's ops: bounds of the keys of each page, and the scores of pages by them."""

from numba import cuda, float32, uint8

from tamis.jit_kernels.contract.op import POS
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, joined, staging
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, reading_one, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import address, device
from tamis.jit_kernels.cuda.lang.ptx import shared_address

AT_ONCE = 8  # keys of which a lane has an element in flight


def quest_bounds(head_dim: int, type_k: str) -> list[Launch]:
    """Kernel of QUEST_BOUNDS: warps stride over pages, of which each takes WARP elements."""
    size, read = row_bytes(type_k, head_dim), reading_one(type_k, head_dim)

    @device
    def key_at(keys, j):
        k_pages, k_table, n_head_kv, h = keys
        return k_pages + size * key_row(k_table, n_head_kv, h, j)

    @device
    def some_of(keys, j, last, d):
        """Element d of AT_ONCE keys from j on, of the last one for those after it."""
        return (
            read(key_at(keys, j), d), read(key_at(keys, min(j + 1, last)), d),
            read(key_at(keys, min(j + 2, last)), d), read(key_at(keys, min(j + 3, last)), d),
            read(key_at(keys, min(j + 4, last)), d), read(key_at(keys, min(j + 5, last)), d),
            read(key_at(keys, min(j + 6, last)), d), read(key_at(keys, min(j + 7, last)), d),
        )  # fmt: skip

    @device
    def extremes(x):
        top = max(max(max(x[0], x[1]), max(x[2], x[3])), max(max(x[4], x[5]), max(x[6], x[7])))
        low = min(min(min(x[0], x[1]), min(x[2], x[3])), min(min(x[4], x[5]), min(x[6], x[7])))
        return top, low

    def kernel(tid, n_thread, a):
        pos = a.step[POS]
        for i in range(tid * THREADS + thread(), a.n_head * head_dim, n_thread * THREADS):
            h, d = i // head_dim, i % head_dim
            x = a.q[0, h, d]
            a.parts[h, 0, d], a.parts[h, 1, d] = max(x, float32(0)), min(x, float32(0))
        # The page that was last is made anew: it may have grown, or lost positions to others.
        first = min(a.filled[0], pos) // a.page
        n_new, n_part = pos // a.page + 1 - first, (head_dim + WARP - 1) // WARP
        for item in range(tid * WARPS + warp(), n_new * a.n_head_kv * n_part, n_thread * WARPS):
            d, page = item % n_part * WARP + lane(), item // n_part
            h, p = page % a.n_head_kv, first + page // a.n_head_kv
            keys = (a.k_pages, a.k_table, a.n_head_kv, h)
            low, high = p * a.page, min(pos + 1, (p + 1) * a.page)
            if d >= head_dim:
                continue
            top = read(key_at(keys, low), d)
            bottom = top
            for j in range(low, high, AT_ONCE):
                most, least = extremes(some_of(keys, j, high - 1, d))
                top, bottom = max(top, most), min(bottom, least)
            a.bounds[h, p, 0, d], a.bounds[h, p, 1, d] = top, bottom

    return [Launch(kernel, blocks=4)]


def quest_score(head_dim: int, heads: int, group: int) -> list[Launch]:
    """Kernel of QUEST_SCORE: blocks stride over spans of a KV head's pages.

    The larger of q M and q m is max(q, 0) M + min(q, 0) m, as m <= M: a product of rows of twice
    the length.
    """

    @device
    def bounds_at(own, p):
        bounds, n = own
        return address(bounds[p]) if p < n else 0

    stage, best_of = staging(2 * head_dim, heads, bounds_at), joined(group)

    def kernel(tid, n_thread, a):
        pos, shared = a.step[POS], shared_address(cuda.shared.array(0, uint8))
        n = pos // a.page + 1
        for item in range(tid, (n + SPAN - 1) // SPAN * a.n_head_kv, n_thread):
            h, start = item % a.n_head_kv, item // a.n_head_kv * SPAN
            stage(shared, a.parts[heads * h], heads, (a.bounds[h], n), start)
            if start + thread() < n:
                for r in range(0, heads, group):
                    a.scores[heads * h + r, start + thread()] = best_of(shared, r)
            sync_block()  # before the next span's products overwrite what is read here
        if tid == 0 and thread() == 0:
            a.filled[0] = pos + 1

    return [Launch(kernel, blocks=2 if head_dim <= 128 else 1, shared=ROW * heads)]
