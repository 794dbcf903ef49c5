"""Int8 copies of keys, and their products with queries: sixteen keys are interleaved.

A product of four elements of each of the sixteen is one instruction with VNNI, three without; no
sum runs across lanes.
"""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import CODE_WORKERS, KEYS, N_CENTRE, STEP
from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.jit_kernels.cpu.attention.attend_batch import N_REGISTER
from tamis.jit_kernels.cpu.kv.kv_rows import loading_one, row_at
from tamis.jit_kernels.cpu.lang.blocks16 import dot_float
from tamis.jit_kernels.cpu.lang.intrinsic import load_i32, load_i64, store_f32, store_i32
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_outer_bytes,
    add_scaled_words,
    broadcast_column,
    broadcast_words,
    load_row,
    load_word_row,
    store_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    CPU,
    LANES,
    hmax,
    hsum,
    load_f,
    load_f32x16,
    round_i32,
    splat_f,
    splat_f32x16,
    splat_i32x16,
    store_f,
    store_low_bytes_x16,
    vabs,
    vmax,
    zero_f,
    zero_f32x16,
    zero_i32x16,
)

SIZE, ZERO = np.float32(127), np.float32(0)  # steps of the largest element of a key
# NEON multiplies signed bytes, VNNI unsigned ones by signed ones.
SIGNED = int(CPU.neon)
OFFSET = 0 if SIGNED else 128  # added to a key's signed codes
LESS = -OFFSET  # a literal
# The same for a query. Without VNNI two products must fit 16 bits: 2 * 127 * 127 and 2 * 255 * 64
# do.
Q_SIZE = np.float32(127 if CPU.vnni or SIGNED else 64)


def key_centre(head_dim: int, type_k: str) -> Any:
    """Kernel of KEY_CENTRE: threads stride over KV heads."""
    load, size = loading_one(type_k, head_dim), kv_row(type_k, head_dim).itemsize

    def kernel(tid, n_thread, a):
        n_kv = load_i64(a.step + STEP.pos) + 1
        n = min(n_kv, N_CENTRE)
        for h in range(tid, a.n_head_kv, n_thread):
            if load_i64(a.filled + 8 * h) > 0:
                continue
            centre, share = a.centre + 4 * head_dim * h, splat_f(np.float32(1.0 / n))
            for d in range(0, head_dim, LANES):
                store_f(centre + 4 * d, zero_f())
            for i in range(n):
                key = a.k_pages + size * row_at(a.k_table, a.n_head_kv, h, i * n_kv // n)
                for d in range(0, head_dim, LANES):
                    store_f(centre + 4 * d, load_f(centre + 4 * d) + load(key, d) * share)

    return kernel


def key_codes(head_dim: int, type_k: str) -> Any:
    """Kernel of KEY_CODES: threads stride over blocks of KEYS positions; the last codes queries."""
    load, size = loading_one(type_k, head_dim), kv_row(type_k, head_dim).itemsize
    block_size = KEYS * head_dim

    @njit(error_model="numpy")
    def code_key(key, centre, line, to, step):
        """Write a key's codes, four of every 64 bytes from `to` on, and its step."""
        top = zero_f()
        for d in range(0, head_dim, LANES):
            x = load(key, d) - load_f(centre + 4 * d)
            store_f(line + 4 * d, x)
            top = vmax(vabs(x), top)
        most = hmax(top)
        per = SIZE / most if most > ZERO else ZERO
        for d in range(0, head_dim, 16):  # bytes replace floats that were already read
            x = round_i32(load_f32x16(line + 4 * d) * splat_f32x16(per))
            store_low_bytes_x16(line + d, x + splat_i32x16(OFFSET))
        for d in range(0, head_dim, 4):
            store_i32(to + KEYS * d, load_i32(line + d))
        store_f32(step, most / SIZE)

    @njit(error_model="numpy")
    def code_query(query, codes, centre):
        """Write a query's codes; return their sum, their step and the product with the centre."""
        top, total = zero_f32x16(), zero_i32x16()
        for d in range(0, head_dim, 16):
            top = vmax(vabs(load_f32x16(query + 4 * d)), top)
        most = hmax(top)
        per = Q_SIZE / most if most > ZERO else ZERO
        for d in range(0, head_dim, 16):
            x = round_i32(load_f32x16(query + 4 * d) * splat_f32x16(per))
            store_low_bytes_x16(codes + d, x)
            total += x
        return hsum(total), most / Q_SIZE, dot_float(query, centre, head_dim)

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        if tid == n_thread - 1:
            for head in range(a.n_head):
                at = head_dim * head
                centre = a.centre + 4 * head_dim * (head * a.n_head_kv // a.n_head)
                total, step, product = code_query(a.q + 4 * at, a.q_codes + at, centre)
                store_i32(a.q_sums + 4 * head, total)
                store_f32(a.q_steps + 4 * head, step)
                store_f32(a.q_centre + 4 * head, product)
        n_worker = min(n_thread, CODE_WORKERS)
        line, first = a.line + 4 * head_dim * tid, min(load_i64(a.filled), pos)
        n_item = (pos // KEYS + 1 - first // KEYS) * a.n_head_kv if tid < n_worker else 0
        for item in range(tid, n_item, n_worker):
            h, block = item % a.n_head_kv, first // KEYS + item // a.n_head_kv
            to = a.codes + block_size * (a.capacity // KEYS * h + block)
            for j in range(max(first, KEYS * block), min(pos + 1, KEYS * (block + 1))):
                key = a.k_pages + size * row_at(a.k_table, a.n_head_kv, h, j)
                step = a.steps + 4 * (a.capacity * h + j)
                code_key(key, a.centre + 4 * head_dim * h, line, to + 4 * (j % KEYS), step)

    return kernel


def scoring_codes(head_dim: int, heads: int) -> Any:
    """The function score(n, queries, codes, steps, out, stride): n queries, a page's coded keys.

    queries: addresses of codes, sums, steps and products with the centre of the first of up to
    `heads`. out + stride * query receives PAGE float32s.
    """
    one, few = 1, 3

    def scoring(n: int) -> Any:
        @njit(error_model="numpy")
        def score(queries, codes, steps, out, stride):
            q_codes, q_sums, q_steps, q_centre = queries
            for j in range(0, PAGE, LANES):
                own = codes + KEYS * head_dim * (j // KEYS) + 4 * (j % KEYS)
                sums = broadcast_words(q_sums, n, one, LESS)
                for d in range(0, head_dim, 4):
                    keys = load_word_row(own + KEYS * d, one)
                    sums = add_outer_bytes(sums, q_codes + d, head_dim, keys, SIGNED)
                factors, more = broadcast_column(q_steps, 4, n), broadcast_column(q_centre, 4, n)
                found = add_scaled_words(more, sums, factors, load_row(steps + 4 * j, one))
                store_grid(out + 4 * j, stride, found)

        return score

    most = min(heads, N_REGISTER - 4)
    score_most, score_few, score_one = scoring(most), scoring(few), scoring(one)

    @njit(error_model="numpy")
    def from_head(queries, i):
        codes, sums, steps, centre = queries
        return codes + head_dim * i, sums + 4 * i, steps + 4 * i, centre + 4 * i

    @njit(error_model="numpy")
    def score(n, queries, codes, steps, out, stride):
        i = 0
        while n - i >= most:
            score_most(from_head(queries, i), codes, steps, out + stride * i, stride)
            i += most
        while n - i >= few:
            score_few(from_head(queries, i), codes, steps, out + stride * i, stride)
            i += few
        while i < n:
            score_one(from_head(queries, i), codes, steps, out + stride * i, stride)
            i += one

    return score
