"""The lightning indexer of sparse models: scores of all keys, and each token's top k."""

from typing import Any

import numpy as np

from tamis.jit_kernels.contract.ops import FORCED, STEP
from tamis.jit_kernels.contract.types import kv_row
from tamis.jit_kernels.cpu.kv.kv_rows import loading_one, row_at
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cpu.lang.simd import LANES, fma, hsum, load_f, store_f, zero_f
from tamis.jit_kernels.cpu.select.common import write_best, write_ends


def index_score(head_dim: int, n_key: int, type_k: str) -> Any:
    """Kernel of INDEX_SCORE: threads stride over blocks, each key unpacked once."""
    load, size = loading_one(type_k, head_dim), kv_row(type_k, head_dim).itemsize
    first = head_dim - n_key

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        key = a.scratch + 4 * n_key * tid
        for b in range(tid, (pos + n_tok) // a.block, n_thread):
            j = a.block * (b + 1) - 1
            row = a.k_pages + size * row_at(a.k_table, a.n_head_kv, a.n_head_kv - 1, j)
            for d in range(0, n_key, LANES):
                store_f(key + 4 * d, load(row, first + d))
            for t in range(max(0, j - pos), n_tok):
                total = np.float32(0)
                for h in range(a.n_head):
                    q, sums = a.q + 4 * n_key * (a.n_head * t + h), zero_f()
                    for d in range(0, n_key, LANES):
                        sums = fma(load_f(q + 4 * d), load_f(key + 4 * d), sums)
                    weight = load_f32(a.weights + 4 * (a.n_head * t + h))
                    total += weight * max(hsum(sums), np.float32(0))
                store_f32(a.scores + 4 * (a.capacity * t + b), total)

    return kernel


def index_choose() -> Any:
    """Kernel of INDEX_CHOOSE: threads stride over tokens."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        if tid == 0:
            store_i32(a.indptr, 0)
        begin = 0
        for t in range(n_tok):
            n_seen, tail = (pos + t + 1) // a.block, (pos + t + 1) % a.block
            n_best = min(n_seen, a.top_k)
            n = n_best + (1 if tail > 0 else 0)
            for r in range(a.n_row):
                row = a.n_row * t + r
                if row % n_thread == tid:
                    to = a.indices + 4 * begin
                    store_i32(a.indptr + 4 * (row + 1), begin + n)
                    if n_seen <= a.top_k:
                        write_ends(to, 0, n_seen, 0, 0)
                    else:
                        write_best(a.scores + 4 * a.capacity * t, 0, n_seen, a.top_k, to)
                    if tail > 0:
                        store_i32(to + 4 * n_best, n_seen)
                begin += n

    return kernel


def head_score(head_dim: int, n_key: int, type_k: str) -> Any:
    """Kernel of HEAD_SCORE: threads stride over blocks, each key unpacked once."""
    load, size = loading_one(type_k, head_dim), kv_row(type_k, head_dim).itemsize
    first = head_dim - n_key

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        key = a.scratch + 4 * n_key * tid
        for b in range(tid, (pos + n_tok - 1) // a.block + 1, n_thread):
            for j in range(a.block * b, min(a.block * (b + 1), pos + n_tok)):
                row = a.k_pages + size * row_at(a.k_table, a.n_head_kv, a.n_head_kv - 1, j)
                for d in range(0, n_key, LANES):
                    store_f(key + 4 * d, load(row, first + d))
                for t in range(max(0, j - pos), n_tok):
                    is_forced = b > (pos + t) // a.block - a.n_local
                    for h in range(a.n_head):
                        at = a.scores + 4 * (a.capacity * (a.n_head * t + h) + b)
                        q, sums = a.q + 4 * n_key * (a.n_head * t + h), zero_f()
                        for d in range(0, n_key, LANES):
                            sums = fma(load_f(q + 4 * d), load_f(key + 4 * d), sums)
                        score = np.float32(FORCED) if is_forced else hsum(sums)
                        store_f32(at, score if j == a.block * b else max(load_f32(at), score))

    return kernel


def head_choose() -> Any:
    """Kernel of HEAD_CHOOSE: threads stride over rows."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        if tid == 0:
            store_i32(a.indptr, 0)
        begin = 0
        for t in range(n_tok):
            n_seen = (pos + t) // a.block + 1
            for r in range(a.n_row):
                n, row = min(n_seen, a.top_k) if r < a.n_head else 0, a.n_row * t + r
                if row % n_thread == tid:
                    to = a.indices + 4 * begin
                    store_i32(a.indptr + 4 * (row + 1), begin + n)
                    scores = a.scores + 4 * a.capacity * (a.n_head * t + r)
                    if n == n_seen:
                        write_ends(to, 0, n_seen, 0, 0)
                    elif n > 0:
                        write_best(scores, 0, n_seen, a.top_k, to)
                begin += n

    return kernel


def entry_choose() -> Any:
    """Kernel of ENTRY_CHOOSE: threads stride over tokens."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        if tid == 0:
            store_i32(a.indptr, 0)
        begin = 0
        for t in range(n_tok):
            p = pos + t
            n_near, n_block = min(p + 1, a.n_window), (p + 1) // a.every if a.every > 0 else 0
            n = min(n_block, a.top_k)
            if t % n_thread == tid:
                to = a.indices + 4 * begin
                store_i32(a.indptr + 4 * (2 * t + 1), begin + n_near)
                store_i32(a.indptr + 4 * (2 * t + 2), begin + n_near + n)
                write_ends(to, 0, 0, p + 1 - n_near, p + 1)
                entries = to + 4 * n_near
                if n_block <= a.top_k:
                    write_ends(entries, 0, n, 0, 0)
                else:
                    write_best(a.scores + 4 * a.capacity * t, 0, n_block, a.top_k, entries)
                for at in range(entries, entries + 4 * n, 4):
                    store_i32(at, a.every * (load_i32(at) + 1) - 1)
            begin += n_near + n

    return kernel
