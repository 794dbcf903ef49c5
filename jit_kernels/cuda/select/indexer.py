"""The indexer of sparse models: scores of all keys, and each token's top k."""

from typing import Any

from numba import float32

from tamis.jit_kernels.contract.ops import FORCED, STEP
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
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cuda.lang.radix_topk import write_best, write_range


def _product_of(head_dim: int, n_key: int, type_k: str) -> Any:
    """The function (query, K row): their product, in every lane; a warp's."""
    read, first = reading_one(type_k, head_dim), head_dim - n_key

    @device
    def product(q, row):
        total = float32(0)
        for d in range(lane(), n_key, WARP):
            total += load_f32(q + 4 * d) * read(row, first + d)
        return warp_sum(total)

    return product


@device
def write_some(scores, n_seen, n, to):
    """Write the n best of n_seen entries, ascending, all of them where n is as many."""
    if n < n_seen:
        if n > 0:
            write_best(scores, 0, n_seen, n, to)
    else:
        write_range(to, 0, n_seen)
    sync_block()


def index_score(head_dim: int, n_key: int, type_k: str) -> list[Launch]:
    """Kernel of INDEX_SCORE: warps stride over blocks of tokens."""
    product, size = _product_of(head_dim, n_key, type_k), row_bytes(type_k, head_dim)

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n_block = (pos + n_tok) // a.block
        for item in range(tid * WARPS + warp(), n_tok * n_block, n_thread * WARPS):
            t, b = item // n_block, item % n_block
            j = a.block * (b + 1) - 1
            if j <= pos + t:
                row = a.k_pages + size * key_row(a.k_table, a.n_head_kv, a.n_head_kv - 1, j)
                total = float32(0)
                for h in range(a.n_head * t, a.n_head * (t + 1)):
                    score = product(a.q + 4 * n_key * h, row)
                    total += load_f32(a.weights + 4 * h) * max(score, float32(0))
                if lane() == 0:
                    store_f32(a.scores + 4 * (a.capacity * t + b), total)

    return [Launch(kernel, blocks=4)]


def index_choose() -> list[Launch]:
    """Kernel of INDEX_CHOOSE: blocks stride over rows."""

    def kernel(tid, n_thread, a):
        n_tok, pos, begin = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos), 0
        if tid == 0 and thread() == 0:
            store_i32(a.indptr, 0)
        for t in range(n_tok):
            n_seen, tail = (pos + t + 1) // a.block, (pos + t + 1) % a.block
            n_best = min(n_seen, a.top_k)
            n = n_best + (1 if tail > 0 else 0)
            for r in range(a.n_row):
                row = a.n_row * t + r
                if row % n_thread == tid:
                    to = a.indices + 4 * begin
                    write_some(a.scores + 4 * a.capacity * t, n_seen, n_best, to)
                    if thread() == 0:
                        store_i32(a.indptr + 4 * (row + 1), begin + n)
                        if tail > 0:
                            store_i32(to + 4 * n_best, n_seen)
                begin += n

    return [Launch(kernel)]


def head_score(head_dim: int, n_key: int, type_k: str) -> list[Launch]:
    """Kernel of HEAD_SCORE: warps stride over blocks of index heads of tokens."""
    product, size = _product_of(head_dim, n_key, type_k), row_bytes(type_k, head_dim)

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n_block = (pos + n_tok - 1) // a.block + 1
        for item in range(tid * WARPS + warp(), n_tok * a.n_head * n_block, n_thread * WARPS):
            head, b = item // n_block, item % n_block
            p = pos + head // a.n_head
            last, best = min(a.block * (b + 1) - 1, p), float32(FORCED)
            if b <= p // a.block - a.n_local:
                best = float32(-FORCED)
                for j in range(a.block * b, last + 1):
                    row = a.k_pages + size * key_row(a.k_table, a.n_head_kv, a.n_head_kv - 1, j)
                    best = max(best, product(a.q + 4 * n_key * head, row))
            if lane() == 0 and a.block * b <= p:
                store_f32(a.scores + 4 * (a.capacity * head + b), best)

    return [Launch(kernel, blocks=4)]


def head_choose() -> list[Launch]:
    """Kernel of HEAD_CHOOSE: blocks stride over rows."""

    def kernel(tid, n_thread, a):
        n_tok, pos, begin = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos), 0
        if tid == 0 and thread() == 0:
            store_i32(a.indptr, 0)
        for t in range(n_tok):
            n_seen = (pos + t) // a.block + 1
            for r in range(a.n_row):
                n, row = min(n_seen, a.top_k) if r < a.n_head else 0, a.n_row * t + r
                if row % n_thread == tid:
                    if r < a.n_head:
                        scores = a.scores + 4 * a.capacity * (a.n_head * t + r)
                        write_some(scores, n_seen, n, a.indices + 4 * begin)
                    if thread() == 0:
                        store_i32(a.indptr + 4 * (row + 1), begin + n)
                begin += n

    return [Launch(kernel)]


def entry_choose() -> list[Launch]:
    """Kernel of ENTRY_CHOOSE: blocks stride over tokens."""

    def kernel(tid, n_thread, a):
        n_tok, pos, begin = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos), 0
        if tid == 0 and thread() == 0:
            store_i32(a.indptr, 0)
        for t in range(n_tok):
            p = pos + t
            n_near, n_block = min(p + 1, a.n_window), (p + 1) // a.every if a.every > 0 else 0
            n = min(n_block, a.top_k)
            if t % n_thread == tid:
                near = a.indices + 4 * begin
                entries = near + 4 * n_near
                for i in range(thread(), n_near, THREADS):
                    store_i32(near + 4 * i, p + 1 - n_near + i)
                if thread() == 0:
                    store_i32(a.indptr + 4 * (2 * t + 1), begin + n_near)
                    store_i32(a.indptr + 4 * (2 * t + 2), begin + n_near + n)
                write_some(a.scores + 4 * a.capacity * t, n_block, n, entries)
                for i in range(thread(), n, THREADS):
                    at = entries + 4 * i
                    store_i32(at, a.every * (load_i32(at) + 1) - 1)
            begin += n_near + n

    return [Launch(kernel)]
