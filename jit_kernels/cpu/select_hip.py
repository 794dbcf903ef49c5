"""HiP's ops: the tree search for the best blocks, and the Selection round them."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.products import TILE_ROW, key_row, pad_list, rating
from tamis.jit_kernels.cpu.select import keep_best, key_at, ordered, threshold
from tamis.jit_kernels.cpu.simd import (
    load_f16x16,
    prefetch,
    splat_f32x16,
    store_f16x16,
    zero_f32x16,
)
from tamis.jit_kernels.cpu.tile import dot_half
from tamis.jit_kernels.ops import LIST_PAD, STEP, hip_work

AHEAD = 8  # branches whose keys are on their way while one is scored
LOWEST = np.float32(-3e38)
row_work = njit(hip_work)


@njit(error_model="numpy")
def halve(chunks, branches, n_chunk):
    """Split every chunk (first, end) in the middle; how many branches that gives."""
    count = 0
    for j in range(n_chunk):
        first, end = load_i32(chunks + 8 * j), load_i32(chunks + 8 * j + 4)
        middle = (first + end) // 2
        if middle > first:  # else the chunk is one block, and its own only branch
            store_i32(branches + 8 * count, first)
            store_i32(branches + 8 * count + 4, middle)
            count += 1
        store_i32(branches + 8 * count, middle)
        store_i32(branches + 8 * count + 4, end)
        count += 1
    return count


@njit(error_model="numpy")
def centre_of(branches, b):
    """The centre block of a branch, which stands for it."""
    return (load_i32(branches + 8 * b) + load_i32(branches + 8 * b + 4) - 1) // 2


@njit(error_model="numpy")
def keep_branches(branches, scores, n_branch, chunks, n_chunk):
    """Copy the n_chunk branches with the best scores, in order; the length of the longest."""
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
    """Kernel of HIP_ESTIMATE: threads take rows in turn."""

    @njit(error_model="numpy")
    def score(heads, k_pages, k_table, n_head_kv, h, first, end, stride):
        """The best q . k over every stride-th key of positions first .. end - 1."""
        best, j = LOWEST, first
        while j < end:  # a range would divide by its step
            key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
            for g in range(group):
                best = max(best, dot_half(heads + 4 * head_dim * g, key, head_dim))
            j += stride
        return best

    def kernel(
        tid, n_thread, step, q, k_pages, k_table, mask, tree, n_row, heads_per_kv, n_head_kv,
        n_chunk, block, stride, n_sink, n_local,
    ):  # fmt: skip
        high = max(n_sink, (load_i64(step + STEP.pos) + 1 - n_local) // block)
        n = high - n_sink
        for r in range(tid, n_row, n_thread):
            h, heads = r * group // heads_per_kv, q + 4 * head_dim * group * r
            chosen = mask + 4 * (1 + n_chunk) * r
            chunks = tree + 32 * n_chunk * r
            branches, scores = chunks + 8 * n_chunk, chunks + 24 * n_chunk
            count = min(n, n_chunk)
            for j in range(count):
                # Ends of equal parts, rounded to the nearest block (the paper's footnote 1).
                store_i32(chunks + 8 * j, n_sink + (2 * j * n + count) // (2 * count))
                store_i32(chunks + 8 * j + 4, n_sink + (2 * (j + 1) * n + count) // (2 * count))
            longest = (n + count - 1) // count if count > 0 else 0
            while longest > 1:
                n_branch = halve(chunks, branches, n_chunk)
                for b in range(n_branch):
                    # Centres lie far apart: without this a branch costs the way to memory.
                    later = centre_of(branches, min(b + AHEAD, n_branch - 1)) * block
                    key = key_at(k_pages, k_table, n_head_kv, h, later, head_dim)
                    for at in range(key, key + 2 * head_dim * min(block, 4), 64):
                        prefetch(at)
                    j = centre_of(branches, b) * block
                    best = score(heads, k_pages, k_table, n_head_kv, h, j, j + block, stride)
                    store_f32(scores + 4 * b, best)
                longest = keep_branches(branches, scores, n_branch, chunks, n_chunk)
            store_i32(chosen, count)
            for j in range(count):
                store_i32(chosen + 4 * (1 + j), load_i32(chunks + 8 * j))

    return kernel


@njit
def level_start(n_unit, level):
    """The first row of a level's means; level 0 has n_unit of them, each level half the last."""
    return 2 * n_unit - 2 * (n_unit >> level)


def hip_means(head_dim: int) -> Any:
    """Kernel of HIP_MEANS: threads take KV heads in turn (levels build on levels)."""

    @njit(error_model="numpy")
    def add_units(means, keys, first, end, unit):
        k_pages, k_table, n_head_kv, h = keys
        for u in range(first, end):
            for i in range(0, 2 * head_dim, 32):
                total = zero_f32x16()
                for j in range(u * unit, (u + 1) * unit):
                    total += load_f16x16(key_at(k_pages, k_table, n_head_kv, h, j, head_dim) + i)
                store_f16x16(means + 2 * head_dim * u + i, total * splat_f32x16(1.0 / unit))

    def kernel(tid, n_thread, step, k_pages, k_table, means, filled, n_head_kv, n_unit, unit):
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        row_size, end = 2 * head_dim, (pos + n_tok) // unit
        for h in range(tid, n_head_kv, n_thread):
            own = means + row_size * 2 * n_unit * h
            # Keys from pos on are new, whatever was there before.
            first = min(load_i64(filled + 8 * h), pos // unit)
            add_units(own, (k_pages, k_table, n_head_kv, h), first, end, unit)
            level = 1
            while end >> level > 0:
                below = own + row_size * level_start(n_unit, level - 1)
                to = own + row_size * level_start(n_unit, level)
                for c in range(first >> level, end >> level):
                    for i in range(0, row_size, 32):
                        at = below + 2 * row_size * c + i
                        total = load_f16x16(at) + load_f16x16(at + row_size)
                        store_f16x16(to + row_size * c + i, total * splat_f32x16(0.5))
                level += 1
            store_i64(filled + 8 * h, end)

    return kernel


@njit(error_model="numpy")
def split(chunks, halves, n, n_unit, level):
    """List the halves of n chunks of a level: rows of the level below; how many.

    n_unit: units of the search, and room of the means. A chunk of the level below that is whole
    but has no parent (the level above ends before it) joins them.
    """
    searched, room = n_unit
    above, below = level_start(room, level), level_start(room, level - 1)
    for i in range(n):
        row = below + 2 * (load_i32(chunks + 4 * i) - above)
        store_i32(halves + 8 * i, row)
        store_i32(halves + 8 * i + 4, row + 1)
    n_below = searched >> (level - 1)
    if n_below % 2 == 1:
        store_i32(halves + 8 * n, below + n_below - 1)
    return 2 * n + n_below % 2


@njit
def list_blocks(units, blocks, n, n_sink):
    """List the blocks of n units, ascending, from block n_sink on; how many."""
    count = 0
    for i in range(n):
        for b in range(4 * load_i32(units + 4 * i), 4 * load_i32(units + 4 * i) + 4):
            store_i32(blocks + 4 * count, b)
            count += b >= n_sink
    return count


def hip_search(head_dim: int, group: int) -> Any:
    """Kernel of HIP_SEARCH: threads take rows in turn."""
    normalise, rate = rating(head_dim, group)

    @njit(error_model="numpy")
    def list_keys(rows, keys, blocks, n, shape):
        _, k_table, n_head_kv, h = keys
        block, stride = shape
        count = 0
        for i in range(n):
            first = load_i32(blocks + 4 * i) * block
            j = first
            while j < first + block:  # a range would divide by its step
                store_i32(rows + 4 * count, key_row(k_table, n_head_kv, h, j))
                count, j = count + 1, j + stride
        return count

    @njit(error_model="numpy")
    def set_offsets(at, queries, keys, ends, scale):
        """Normalise by the keys that every query reads: before `sinks`, low to newest."""
        k_pages, k_table, n_head_kv, h = keys
        sinks, low, newest = ends
        n = 0
        for j in range(min(sinks, low)):
            store_i32(at[0] + 4 * n, key_row(k_table, n_head_kv, h, j))
            n += 1
        for j in range(low, newest + 1):
            store_i32(at[0] + 4 * n, key_row(k_table, n_head_kv, h, j))
            n += 1
        pad_list(at[0], n)
        normalise(at, queries, k_pages, n, scale)

    @njit(error_model="numpy")
    def best_units(at, spare, queries, means, n_unit, n_chunk, scale):
        """Units of the n_chunk best chunks, in at's list or in spare: its address, their number."""
        rows, scores, tile, offsets = at
        searched, room = n_unit
        level = 0
        while searched >> level > 2 * n_chunk:
            level += 1
        n = searched >> level
        for c in range(n):
            store_i32(rows + 4 * c, level_start(room, level) + c)
        while True:
            if n > n_chunk:
                pad_list(rows, n)
                rate((rows, scores, tile, offsets), queries, means, n, scale)
                keep_best(scores, rows, n, n_chunk, rows)
                n = n_chunk
            if level == 0:
                return rows, n
            n = split(rows, spare, n, n_unit, level)
            rows, spare, level = spare, rows, level - 1

    def kernel(
        tid, n_thread, step, q, k_pages, k_table, means, mask, work, n_row, heads_per_kv, n_head_kv,
        n_unit, n_chunk, block, stride, n_sink, n_local, mask_block, q_stride, capacity, scale_f,
    ):  # fmt: skip
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        per_block, n_sample = (
            (block + stride - 1) // stride,
            (mask_block + q_stride - 1) // q_stride,
        )
        work_size, list_size = 4 * row_work(group, capacity, n_sample), 4 * (capacity + LIST_PAD)
        apart = 4 * head_dim * n_row * group
        for item in range(tid, (n_tok + mask_block - 1) // mask_block * n_row, n_thread):
            r, first = item % n_row, item // n_row * mask_block
            h = r * group // heads_per_kv
            n_query = (min(n_tok - first, mask_block) + q_stride - 1) // q_stride
            queries = q + apart * first + 4 * head_dim * group * r, n_query, apart * q_stride
            rows = work + work_size * item
            spare, scores = rows + list_size, rows + 2 * list_size
            at = rows, scores, scores + list_size, scores + list_size + TILE_ROW * group
            keys = k_pages, k_table, n_head_kv, h
            searched = max(0, pos + first + 1 - n_local) // (4 * block)
            chosen = mask + 4 * (1 + n_chunk) * item
            low = 4 * block * searched
            own = means + 2 * head_dim * 2 * n_unit * h
            set_offsets(at, queries, keys, (n_sink * block, low, pos + first), scale_f)
            units, n = best_units(at, spare, queries, own, (searched, n_unit), n_chunk, scale_f)
            blocks = spare if units == rows else rows
            n = list_blocks(units, blocks, n, n_sink)
            store_i32(chosen, min(n, n_chunk))
            if n <= n_chunk:
                for i in range(n):
                    store_i32(chosen + 4 * (1 + i), load_i32(blocks + 4 * i))
                continue
            at = units, scores, at[2], at[3]  # the list of units is used up
            n_key = list_keys(units, keys, blocks, n, (block, stride))
            pad_list(units, n_key)
            rate(at, queries, k_pages, n_key, scale_f)
            if per_block > 1:
                for i in range(n):
                    best = load_f32(scores + 4 * i * per_block)
                    for j in range(i * per_block + 1, (i + 1) * per_block):
                        best = max(best, load_f32(scores + 4 * j))
                    store_f32(scores + 4 * i, best)
            keep_best(scores, blocks, n, n_chunk, chosen + 4)

    return kernel


def hip_select() -> Any:
    """Kernel of HIP_SELECT. Some ten thousand integers at most: one thread writes them."""

    def kernel(
        tid, n_thread, step, mask, indptr, indices, n_row, n_chunk, block, n_sink, n_local, n_near,
        align, mask_block, q_block,
    ):  # fmt: skip
        if tid != 0:
            return
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        count, row = 0, 0
        store_i32(indptr, 0)
        for first in range(0, n_tok, q_block):
            oldest = first // mask_block * mask_block  # the query that the mask was made for
            high = max(0, pos + oldest + 1 - n_local) // align * align // block
            end = (pos + min(n_tok, first + q_block) + block - 1) // block
            for r in range(n_row):
                chosen = mask + 4 * (1 + n_chunk) * (first // mask_block * n_row + r)
                following = min(n_sink, high)  # blocks before it are taken or passed over
                for i in range(following):
                    store_i32(indices + 4 * (count + i), i)
                count += following
                for j in range(load_i32(chosen)):
                    b = load_i32(chosen + 4 * (1 + j))
                    for i in range(max(following, b - n_near), min(high, b + n_near + 1)):
                        store_i32(indices + 4 * count, i)
                        count, following = count + 1, i + 1
                for i in range(high, end):
                    store_i32(indices + 4 * count, i)
                    count += 1
                row += 1
                store_i32(indptr + 4 * row, count)

    return kernel
