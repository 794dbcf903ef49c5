"""HiP's search over int8 means of a block's keys, of four blocks' and of 16 blocks' keys."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import LIST_PAD, SIBLINGS, STEP, TILE, hip_work
from tamis.jit_kernels.contract.types import kv_row
from tamis.jit_kernels.cpu.attention.attend_batch import N_REGISTER
from tamis.jit_kernels.cpu.attention.gathered_scores import TILE_ROW, key_row, normaliser, pad_list
from tamis.jit_kernels.cpu.kv.kv_rows import loading_one
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.lang.register_tiles import add_bytes, store_folded, zero_word_grid
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    as_f32,
    as_i32,
    broadcast_f,
    count_at_least,
    fma,
    hmax,
    hsum,
    load_f,
    load_f32x4,
    load_f32x16,
    load_i,
    load_i32x16,
    pack_at_least,
    prefetch,
    round_i32,
    splat_f,
    splat_f32x16,
    splat_i32x16,
    store_f,
    store_f32x4,
    store_f32x16,
    store_low_bytes_x16,
    to_f32,
    vabs,
    vmax,
    vmin,
    zero_f,
    zero_f32x16,
    zero_i32x16,
)
from tamis.jit_kernels.cpu.select.common import keep_best, threshold

AHEAD = 8  # parents whose children are prefetched ahead of the one being scored: 32 rows
LOG2_E = np.float32(1.4426950408889634)
PASSED_OVER = np.float32(-1.0)  # below every score
SIZE, ZERO = np.float32(127.0), np.float32(0.0)  # steps of a byte
row_work = njit(hip_work)


@njit
def level_start(room, level):
    """The first row of a level's means: level 0 has `room` of them, each level a fourth."""
    return (room - (room >> 2 * level)) // 3 * 4


def hip_means(head_dim: int, type_k: str) -> Any:
    """Kernel of HIP_MEANS: threads stride over KV heads."""
    load, size = loading_one(type_k, head_dim), kv_row(type_k, head_dim).itemsize

    @njit(error_model="numpy")
    def add_up(total, keys, first, n):
        k_pages, k_table, n_head_kv, h = keys
        for d in range(0, head_dim, 16):
            store_f32x16(total + 4 * d, zero_f32x16())
        for j in range(first, first + n):
            key = k_pages + size * key_row(k_table, n_head_kv, h, j)
            for d in range(0, head_dim, LANES):
                store_f(total + 4 * d, load_f(total + 4 * d) + load(key, d))

    @njit(error_model="numpy")
    def store_mean(word, extent, total, n):
        """Write the mean total / n, quantised to bytes between its least and largest element.

        Four bytes at word, word + 16 and so on; both extremes are stored too. total is overwritten.
        """
        part = splat_f32x16(1.0 / n)
        least = most = load_f32x16(total) * part
        for d in range(16, head_dim, 16):
            x = load_f32x16(total + 4 * d) * part
            least, most = vmin(x, least), vmax(x, most)
        low = -hmax(zero_f32x16() - least)
        width = hmax(most) - low
        per = SIZE / width if width > ZERO else ZERO
        for d in range(0, head_dim, 16):
            x = load_f32x16(total + 4 * d) * part - splat_f32x16(low)
            store_low_bytes_x16(total + 4 * d, round_i32(x * splat_f32x16(per)))
            for i in range(0, 16, 4):
                store_i32(word + 4 * (d + i), load_i32(total + 4 * d + i))
        store_f32(extent, width / SIZE)
        store_f32(extent + 4 * SIBLINGS, low)

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n_row, end = level_start(a.room, a.top + 1), (pos + n_tok) // a.block
        for h in range(tid, a.n_head_kv, n_thread):
            # Keys from pos on are new, whatever was there before.
            first = min(load_i64(a.filled + 8 * h), pos // a.block)
            total, keys = a.sums + 4 * head_dim * h, (a.k_pages, a.k_table, a.n_head_kv, h)
            for level in range(a.top + 1):
                n = a.block << 2 * level
                for c in range(first >> 2 * level, end >> 2 * level):
                    row, place = n_row * h + level_start(a.room, level) + c, c % SIBLINGS
                    word = a.means + head_dim * (row - place) + 4 * place
                    add_up(total, keys, c * n, n)
                    store_mean(word, a.extents + 8 * (row - place) + 4 * place, total, n)
            store_i64(a.filled + 8 * h, end)

    return kernel


@njit
def power_of_two(x):
    """An approximation of 2^x, linear between whole x; x is clamped to +-120."""
    x = vmax(vmin(x, splat_f(120.0)), splat_f(-120.0))
    return as_f32(round_i32(fma(x, splat_f(8388608.0), splat_f(1065353216.0))))


@njit(error_model="numpy")
def keep(scores, items, n, k, out):
    """Copy the k best of n items, in order, or all of score >= 0; return the number.

    Reads and writes up to the next multiple of 16; ties go to earlier ones.
    """
    end = (n + 15) // 16 * 16
    for i in range(n, end):
        store_f32(scores + 4 * i, PASSED_OVER)
    count = 0
    for i in range(0, end, 16):
        count += count_at_least(as_i32(load_f32x16(scores + 4 * i)), zero_i32x16())
    bar = 0
    if count > k:
        # Floats that are not negative order as their bits do.
        bar, count = threshold(scores, 0, end, k), 0
        for i in range(0, end, 16):
            count += count_at_least(as_i32(load_f32x16(scores + 4 * i)), splat_i32x16(bar))
        if count > k:
            keep_best(scores, items, n, k, out)
            return k
    for i in range(0, end, 16):
        x, to = as_i32(load_f32x16(scores + 4 * i)), out
        pack_at_least(to, load_i32x16(items + 4 * i), x, splat_i32x16(bar))
        out += 4 * count_at_least(x, splat_i32x16(bar))
    return count


def rating(head_dim: int, group: int) -> tuple[Any, Any]:
    """The functions shorten(at, queries, scale) and rate(at, means, parents, n, n_head).

    shorten: writes the heads of queries as signed bytes, each four once for every sibling. rate:
    writes scores[j] of n rows of means, the children of listed parents, and ids[j], the row in its
    level. at: addresses of ids, scores, products with a tile, its extents, heads, factors, offsets.
    """
    n_each = min(group, N_REGISTER - 4)  # heads whose sums fit the registers
    head_size, one = SIBLINGS * head_dim, 1

    @njit(error_model="numpy")
    def shorten(at, queries, scale):
        _, _, tile, _, bytes_, factors, offsets = at
        heads, n_query, apart = queries
        for t in range(n_query * group):
            head = heads + t // group * apart + 4 * head_dim * (t % group)
            to = bytes_ + head_size * t
            top, total = zero_f32x16(), zero_i32x16()
            for d in range(0, head_dim, 16):
                top = vmax(vabs(load_f32x16(head + 4 * d)), top)
            size = hmax(top)
            per = SIZE / size if size > ZERO else ZERO
            for d in range(0, head_dim, 16):
                x = round_i32(load_f32x16(head + 4 * d) * splat_f32x16(per))
                store_low_bytes_x16(tile, x)
                for i in range(16):
                    store_i32(to + 4 * (d + i), load_i32(tile + i // 4 * 4))
                total += x
            factor = size / SIZE * scale * LOG2_E
            store_f32(factors + 8 * t, factor)
            store_f32(factors + 8 * t + 4, np.float32(hsum(total)) * factor)
            store_f32(offsets + 4 * t, -LOG2_E * load_f32(offsets + 4 * t))

    @njit(error_model="numpy")
    def multiply(at, means, parents, n_head):
        """Write the products of TILE rows with the queries, the rows' extents and indices."""
        ids, _, tile, extents, bytes_, _, _ = at
        rows, extents_at = means
        for i in range(0, TILE, SIBLINGS):
            parent = load_i32(parents + i)
            ahead = SIBLINGS * load_i32(parents + i + 4 * AHEAD)
            prefetch(extents_at + 8 * ahead)
            for line in range(0, head_size, 64):
                prefetch(rows + head_dim * ahead + line)
            own = extents_at + 8 * SIBLINGS * parent
            store_f32x4(extents + 4 * i, load_f32x4(own))
            store_f32x4(extents + TILE_ROW + 4 * i, load_f32x4(own + 16))
            for j in range(SIBLINGS):
                store_i32(ids + 4 * (i + j), SIBLINGS * parent + j)
            children = rows + head_size * parent
            for t in range(0, n_head, n_each):
                sums = zero_word_grid(n_each, one)
                for d in range(0, head_size, 4 * LANES):
                    sums = add_bytes(sums, bytes_ + head_size * t + d, head_size, children + d)
                store_folded(tile + TILE_ROW * t + 4 * i, TILE_ROW, sums)

    @njit(error_model="numpy")
    def rate(at, means, parents, n, n_head):
        ids, scores, tile, extents, bytes_, factors, offsets = at
        for j in range(0, n, TILE):
            own = ids + 4 * j, scores, tile, extents, bytes_, factors, offsets
            multiply(own, means, parents + j, n_head)  # TILE rows have TILE / 4 parents of 4 bytes
            for i in range(0, TILE, LANES):
                width, low = load_f(extents + 4 * i), load_f(extents + TILE_ROW + 4 * i)
                total = zero_f()
                for t in range(n_head):
                    x = to_f32(load_i(tile + TILE_ROW * t + 4 * i)) * width
                    rest = fma(low, broadcast_f(factors + 8 * t + 4), broadcast_f(offsets + 4 * t))
                    total += power_of_two(fma(x, broadcast_f(factors + 8 * t), rest))
                store_f(scores + 4 * (j + i), total)

    return shorten, rate


def hip_search(head_dim: int, group: int, type_k: str) -> Any:
    """Kernel of HIP_SEARCH: threads stride over rows."""
    normalise = normaliser(head_dim, group, type_k)
    shorten, rate = rating(head_dim, group)

    @njit(error_model="numpy")
    def set_offsets(rows, at, queries, keys, ends, scale):
        """Normalise by the keys that every query reads: before `sinks`, low to newest."""
        k_pages, k_table, n_head_kv, h = keys
        sinks, low, newest = ends
        n = 0
        for j in range(min(sinks, low)):
            store_i32(rows + 4 * n, key_row(k_table, n_head_kv, h, j))
            n += 1
        for j in range(low, newest + 1):
            store_i32(rows + 4 * n, key_row(k_table, n_head_kv, h, j))
            n += 1
        pad_list(rows, n)
        normalise((rows, at[2], at[6]), queries, k_pages, n, scale)

    @njit(error_model="numpy")
    def best_blocks(parents, at, means, sizes, n_head, chosen):
        """Write the n_chunk best of the searched blocks, without sinks; return the number."""
        searched, n_chunk, n_flat, n_sink, room = sizes
        ids, scores = at[0], at[1]
        level = 0
        while searched >> 2 * level > n_flat:
            level += 1
        n = searched >> 2 * level
        for i in range((n + SIBLINGS - 1) // SIBLINGS):
            store_i32(parents + 4 * i, i)
        while n > 0:
            pad_list(parents, (n + SIBLINGS - 1) // SIBLINGS)
            start = level_start(room, level)
            rate(at, (means[0] + head_dim * start, means[1] + 8 * start), parents, n, n_head)
            if level == 0:
                i = 0
                while i < n and load_i32(ids + 4 * i) < n_sink:
                    store_f32(scores + 4 * i, PASSED_OVER)
                    i += 1
                return keep(scores, ids, n, n_chunk, chosen)
            count = keep(scores, ids, n, n_chunk, parents)
            above, level = searched >> 2 * level, level - 1
            # A complete mean whose parent is incomplete is scored as a child of the next parent.
            rest = (searched >> 2 * level) - SIBLINGS * above
            store_i32(parents + 4 * count, above)
            n = SIBLINGS * count + rest
        return 0

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n_sample = (a.mask_block + a.q_stride - 1) // a.q_stride
        work_size = 4 * row_work(head_dim, group, n_sample, a.n_flat, a.n_near)
        most = group * n_sample
        capacity = a.n_flat + SIBLINGS * TILE
        apart = 4 * head_dim * a.n_row * group
        n_mean = level_start(a.room, a.top + 1)
        for item in range(tid, (n_tok + a.mask_block - 1) // a.mask_block * a.n_row, n_thread):
            r, first = item % a.n_row, item // a.n_row * a.mask_block
            h = r * group // a.heads_per_kv
            n_query = (min(n_tok - first, a.mask_block) + a.q_stride - 1) // a.q_stride
            queries = a.q + apart * first + 4 * head_dim * group * r, n_query, apart * a.q_stride
            parents = a.work + work_size * item
            near = parents + 4 * (a.n_flat // SIBLINGS + 1 + LIST_PAD)
            ids = near + 4 * (a.n_near + LIST_PAD)
            tile = ids + 8 * capacity
            extents_of = tile + TILE_ROW * (most + group)
            factors = extents_of + 2 * TILE_ROW
            offsets = factors + 8 * most
            at = ids, ids + 4 * capacity, tile, extents_of, offsets + 4 * most, factors, offsets
            searched = max(0, pos + first + 1 - a.n_local) // a.block
            ends = a.n_sink * a.block, searched * a.block, pos + first
            set_offsets(near, at, queries, (a.k_pages, a.k_table, a.n_head_kv, h), ends, a.scale)
            shorten(at, queries, a.scale)
            own = a.means + head_dim * n_mean * h, a.extents + 8 * n_mean * h
            chosen = a.mask + 4 * (1 + a.n_chunk) * item
            sizes = searched, a.n_chunk, a.n_flat, a.n_sink, a.room
            store_i32(chosen, best_blocks(parents, at, own, sizes, n_query * group, chosen + 4))

    return kernel
