"""HiP's ops: the paper's tree search for the best blocks, and the Selection that it gives."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.blocks16 import dot_half
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cpu.lang.simd import (
    prefetch,
)
from tamis.jit_kernels.cpu.select.common import key_at, ordered, threshold

AHEAD = 8  # branches whose keys are prefetched ahead of the one being scored
LOWEST = np.float32(-3e38)


@njit(error_model="numpy")
def halve(chunks, branches, n_chunk):
    """Split every chunk (first, end) in the middle; return the number of branches."""
    count = 0
    for j in range(n_chunk):
        first, end = load_i32(chunks + 8 * j), load_i32(chunks + 8 * j + 4)
        middle = (first + end) // 2
        if middle > first:  # otherwise the chunk is one block, and its own only branch
            store_i32(branches + 8 * count, first)
            store_i32(branches + 8 * count + 4, middle)
            count += 1
        store_i32(branches + 8 * count, middle)
        store_i32(branches + 8 * count + 4, end)
        count += 1
    return count


@njit(error_model="numpy")
def centre_of(branches, b):
    """The centre block of a branch, its representative."""
    return (load_i32(branches + 8 * b) + load_i32(branches + 8 * b + 4) - 1) // 2


@njit(error_model="numpy")
def keep_branches(branches, scores, n_branch, chunks, n_chunk):
    """Copy the n_chunk best branches to chunks, in order; return the longest one's length."""
    bar = threshold(scores, 0, n_branch, n_chunk)
    ties = n_chunk
    for b in range(n_branch):
        ties -= ordered(load_f32(scores + 4 * b)) > bar
    count, longest = 0, 0
    for b in range(n_branch):
        order = ordered(load_f32(scores + 4 * b))
        if order > bar or (order == bar and ties > 0):
            ties -= order == bar
            first, end = load_i32(branches + 8 * b), load_i32(branches + 8 * b + 4)
            store_i32(chunks + 8 * count, first)
            store_i32(chunks + 8 * count + 4, end)
            longest = max(longest, end - first)
            count += 1
    return longest


def hip_estimate(head_dim: int, group: int) -> Any:
    """Kernel of HIP_ESTIMATE: threads stride over rows of masks."""

    @njit(error_model="numpy")
    def score(a, heads, n_query, h, first):
        """The best q . k over every stride-th key of the block from position `first` on."""
        best, j = LOWEST, first
        apart = 4 * head_dim * group * a.n_row * a.q_stride  # bytes from one query to the next
        while j < first + a.block:  # a range would divide by its step
            key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
            for i in range(n_query):
                for g in range(group):
                    head = heads + apart * i + 4 * head_dim * g
                    best = max(best, dot_half(head, key, head_dim))
            j += a.stride
        return best

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n_mask = (n_tok + a.mask_block - 1) // a.mask_block
        for item in range(tid, n_mask * a.n_row, n_thread):
            oldest, r = item // a.n_row * a.mask_block, item % a.n_row
            n = max(0, (pos + oldest + 1 - a.n_local) // a.block - a.n_sink)
            n_query = (min(a.mask_block, n_tok - oldest) + a.q_stride - 1) // a.q_stride
            h = r * group // a.heads_per_kv
            heads = a.q + 4 * head_dim * group * (oldest * a.n_row + r)
            chosen = a.mask + 4 * (1 + a.n_chunk) * item
            chunks = a.tree + 32 * a.n_chunk * item
            branches, scores = chunks + 8 * a.n_chunk, chunks + 24 * a.n_chunk
            count = min(n, a.n_chunk)
            for j in range(count):
                # Ends of equal parts, rounded to the nearest block (the paper's footnote 1).
                store_i32(chunks + 8 * j, a.n_sink + (2 * j * n + count) // (2 * count))
                store_i32(chunks + 8 * j + 4, a.n_sink + (2 * (j + 1) * n + count) // (2 * count))
            longest = (n + count - 1) // count if count > 0 else 0
            while longest > 1:
                n_branch = halve(chunks, branches, a.n_chunk)
                for b in range(n_branch):
                    # Centres are far apart: without this a branch costs a memory access.
                    later = centre_of(branches, min(b + AHEAD, n_branch - 1)) * a.block
                    key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, later, head_dim)
                    for at in range(key, key + 2 * head_dim * min(a.block, 4), 64):
                        prefetch(at)
                    j = centre_of(branches, b) * a.block
                    store_f32(scores + 4 * b, score(a, heads, n_query, h, j))
                longest = keep_branches(branches, scores, n_branch, chunks, a.n_chunk)
            store_i32(chosen, count)
            for j in range(count):
                store_i32(chosen + 4 * (1 + j), load_i32(chunks + 8 * j))

    return kernel


def hip_select() -> Any:
    """Kernel of HIP_SELECT. Some ten thousand integers at most: one thread writes them."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        count, row = 0, 0
        store_i32(a.indptr, 0)
        for first in range(0, n_tok, a.q_block):
            oldest = first // a.mask_block * a.mask_block  # the query that the mask was made for
            high = max(0, pos + oldest + 1 - a.n_local) // a.block
            end = (pos + min(n_tok, first + a.q_block) + a.block - 1) // a.block
            for r in range(a.n_row):
                chosen = a.mask + 4 * (1 + a.n_chunk) * (first // a.mask_block * a.n_row + r)
                following = min(a.n_sink, high)  # blocks before it were written or skipped
                for i in range(following):
                    store_i32(a.indices + 4 * (count + i), i)
                count += following
                for j in range(load_i32(chosen)):
                    b = load_i32(chosen + 4 * (1 + j))
                    for i in range(max(following, b - a.n_near), min(high, b + a.n_near + 1)):
                        store_i32(a.indices + 4 * count, i)
                        count, following = count + 1, i + 1
                for i in range(high, end):
                    store_i32(a.indices + 4 * count, i)
                    count += 1
                row += 1
                store_i32(a.indptr + 4 * row, count)

    return kernel
