"""MagicPIG's ops: LSH tables of keys, and the sample of keys that collide with a query."""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import LSH_ROWS, LSH_WORKERS, STEP
from tamis.jit_kernels.cpu.attention.attend_batch import widest
from tamis.jit_kernels.cpu.lang.blocks16 import dot_float, dot_half
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    load_u16,
    store_f32,
    store_i16,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_products,
    broadcast_column,
    load_half_row,
    store_grid,
    zero_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    bits_above,
    hsum,
    load_f16x16,
    load_f32x16,
    lowest_bit,
    prefetch,
    splat_f32x16,
    store_f32x16,
    zero_f32x16,
)
from tamis.jit_kernels.cpu.select.common import key_at, middle, write_ends

ZERO, ONE = np.float32(0), np.float32(1)
AHEAD = 8  # keys by which reads are prefetched


def lsh_centre(head_dim: int) -> Any:
    """Kernel of LSH_CENTRE: threads stride over KV heads."""

    def kernel(tid, n_thread, a):
        low, high = middle(load_i64(a.step + STEP.pos), a.n_sink, a.n_local, 0)
        if tid == 0:
            store_i64(a.begin, high)
        for h in range(tid, a.n_head_kv, n_thread):
            mean = a.centre + 4 * head_dim * h
            share = splat_f32x16(ONE / np.float32(max(1, high - low)))
            for d in range(0, head_dim, 16):
                total = zero_f32x16()
                for j in range(low, high):
                    key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
                    total += load_f16x16(key + 2 * d)
                store_f32x16(mean + 4 * d, total * share)
            for j in range(low, high):
                key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
                total = zero_f32x16()
                for d in range(0, head_dim, 16):
                    x = load_f16x16(key + 2 * d) - load_f32x16(mean + 4 * d)
                    total += x * x
                store_f32(a.norms + 4 * (a.capacity * h + j), math.sqrt(hsum(total)))

    return kernel


def _hashing(head_dim: int, n_row: int, n_plane: int, n_bit: int) -> tuple[Any, Any]:
    """Functions project(rows, planes, out) of n_row rows, and code(out, row, table)."""
    n_col = widest(n_row, lambda n: n <= 2)
    width, row_size, out_size = n_col * LANES, 4 * head_dim, 4 * n_plane

    @njit(error_model="numpy")
    def project(rows, planes, out):
        for p in range(0, n_plane, width):
            sums = zero_grid(n_row, n_col)
            for d in range(head_dim):
                column = broadcast_column(rows + 4 * d, row_size, n_row)
                sums = add_products(sums, column, load_half_row(planes + 2 * p, n_col))
                planes += 2 * n_plane
            planes -= 2 * n_plane * head_dim
            store_grid(out + 4 * p, out_size, sums)

    @njit(error_model="numpy")
    def code(out, row, table):
        x = load_f32x16(out + out_size * row + 4 * n_bit * table)
        return bits_above(x, zero_f32x16()) & ((1 << n_bit) - 1)

    return project, code


def lsh_codes(head_dim: int, n_plane: int, n_bit: int, n_table: int) -> Any:
    """Kernel of LSH_CODES: threads stride over LSH_ROWS keys."""
    project, code = _hashing(head_dim, LSH_ROWS, n_plane, n_bit)

    def kernel(tid, n_thread, a):
        end, n_worker = load_i64(a.begin), min(n_thread, LSH_WORKERS)
        rows = a.work + 4 * a.work_size * tid
        out = rows + 4 * head_dim * LSH_ROWS
        for h in range(a.n_head_kv if tid < n_worker else 0):
            mean = a.centre + 4 * head_dim * h
            for first in range(a.n_sink + LSH_ROWS * tid, end, LSH_ROWS * n_worker):
                for i in range(LSH_ROWS):
                    j = min(first + i, end - 1)
                    key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
                    for d in range(0, head_dim, 16):
                        x = load_f16x16(key + 2 * d) - load_f32x16(mean + 4 * d)
                        store_f32x16(rows + 4 * (head_dim * i + d), x)
                project(rows, a.planes, out)
                for t in range(n_table):
                    to = a.codes + 2 * (a.capacity * (n_table * h + t) + first)
                    for i in range(min(LSH_ROWS, end - first)):
                        store_i16(to + 2 * i, code(out, i, t))

    return kernel


def lsh_query(head_dim: int, heads: int, n_plane: int, n_bit: int, n_table: int) -> Any:
    """Kernel of LSH_QUERY: threads stride over KV heads."""
    project, code = _hashing(head_dim, heads, n_plane, n_bit)

    def kernel(tid, n_thread, a):
        out, n_worker = a.work + 4 * a.work_size * tid, min(n_thread, LSH_WORKERS)
        for h in range(tid, a.n_head_kv if tid < n_worker else 0, n_worker):
            project(a.q + 4 * head_dim * heads * h, a.planes, out)
            for g in range(heads):
                for t in range(n_table):
                    store_i16(a.codes + 2 * (n_table * (heads * h + g) + t), code(out, g, t))

    return kernel


def lsh_tables(n_bit: int, n_table: int) -> Any:
    """Kernel of LSH_TABLES: threads stride over tables of KV heads."""
    n_code = 1 << n_bit

    def kernel(tid, n_thread, a):
        end = load_i64(a.begin)
        for item in range(tid, a.n_head_kv * n_table, n_thread):
            own, out = a.codes + 2 * a.capacity * item, a.order + 4 * a.capacity * item
            at = a.starts + 4 * (n_code + 1) * item
            for c in range(n_code + 1):
                store_i32(at + 4 * c, 0)
            for j in range(a.n_sink, end):
                c = at + 4 * load_u16(own + 2 * j)
                store_i32(c, load_i32(c) + 1)
            total = 0
            for c in range(n_code + 1):
                total += load_i32(at + 4 * c)
                store_i32(at + 4 * c, total)
            # From the ends of the codes' lists down to their starts: lists are ascending.
            for j in range(end - 1, a.n_sink - 1, -1):
                c = at + 4 * load_u16(own + 2 * j)
                store_i32(c, load_i32(c) - 1)
                store_i32(out + 4 * load_i32(c), j)

    return kernel


def lsh_sample(head_dim: int, n_bit: int, n_table: int) -> Any:
    """Kernel of LSH_SAMPLE: threads stride over heads."""
    n_start = (1 << n_bit) + 1

    @njit(error_model="numpy")
    def collide(codes, starts, order, capacity, once, twice):
        """Set bits of positions in at least one (`once`) and at least two (`twice`) buckets."""
        for t in range(n_table):
            at = starts + 4 * (n_start * t + load_u16(codes + 2 * t))
            for i in range(load_i32(at), load_i32(at + 4)):
                j = load_i32(order + 4 * (capacity * t + i))
                word, bit = 8 * (j >> 6), 1 << (j & 63)
                seen = load_i64(once + word)
                store_i64(twice + word, load_i64(twice + word) | (seen & bit))
                store_i64(once + word, seen | bit)

    @njit(error_model="numpy")
    def bias_of(bias, n_bias, cosine):
        """The table's value at a cosine, interpolated linearly."""
        x = (min(ONE, max(-ONE, cosine)) + ONE) * np.float32(0.5 * (n_bias - 1))
        i = min(int(x), n_bias - 2)
        low, high = load_f32(bias + 4 * i), load_f32(bias + 4 * i + 4)
        return low + (high - low) * (x - np.float32(i))

    def kernel(tid, n_thread, a):
        pos, end = load_i64(a.step + STEP.pos), load_i64(a.begin)
        n_word = a.capacity // 64 + 1
        for head in range(tid, a.n_head, n_thread):
            h, query = head // a.heads_per_kv, a.q + 4 * head_dim * head
            once = a.bits + 16 * n_word * head
            twice, table = once + 8 * n_word, n_table * h
            for i in range(0, 16 * n_word, 8):
                store_i64(once + i, 0)
            collide(
                a.codes + 2 * n_table * head, a.starts + 4 * n_start * table,
                a.order + 4 * a.capacity * table, a.capacity, once, twice,
            )  # fmt: skip
            out = a.sets + 4 * a.set_capacity * head
            weights = a.log_weight + 4 * a.set_capacity * head
            first = write_ends(out, 0, min(a.n_sink, pos + 1), 0, 0)
            n = first
            for w in range(end // 64 + 1):
                word = load_i64(twice + 8 * w)
                while word != 0:
                    store_i32(out + 4 * n, 64 * w + lowest_bit(word))
                    word &= word - 1
                    n += 1
            length = math.sqrt(dot_float(query, query, head_dim))
            offset = dot_float(query, a.centre + 4 * head_dim * h, head_dim)
            for i in range(first, n):
                later = load_i32(out + 4 * min(i + AHEAD, n - 1))
                key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, later, head_dim)
                for line in range(key, key + 2 * head_dim, 64):
                    prefetch(line)
                j = load_i32(out + 4 * i)
                key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
                sizes = length * load_f32(a.norms + 4 * (a.capacity * h + j))
                inner = dot_half(query, key, head_dim) - offset
                cosine = inner / sizes if sizes > ZERO else ZERO
                store_f32(weights + 4 * i, bias_of(a.bias, a.n_bias, cosine))
            last = write_ends(out, n, 0, end, pos + 1)
            for i in range(first):
                store_f32(weights + 4 * i, ZERO)
            for i in range(n, last):
                store_f32(weights + 4 * i, ZERO)
            store_i32(a.counts + 4 * head, last)

    return kernel
