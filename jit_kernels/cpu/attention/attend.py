"""Attention over a Selection of pages, with a running maximum (flash attention's recurrence).

Dao et al. 2022 (arXiv 2205.14135), Alg. 1. The positions of a Selection's blocks are gathered
into batches of up to PAGE keys; attend_batch.py does the arithmetic of one batch.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import MAX_Q_BLOCK, STEP, attend_scratch
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cpu.attention import attend_batch, attend_q8
from tamis.jit_kernels.cpu.attention.attend_batch import (
    BATCH,
    LOWEST,
    MASKED,
    PANEL,
    TILE_ROWS,
    Layout,
    layout_of,
    many_queries,
    masking,
    softmax,
)
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, load_i64, store_f32, store_i32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    count_i,
    load_f,
    splat_f,
    splat_i,
    store_f,
    store_i,
    zero_f,
)
from tamis.jit_kernels.cpu.lang.work_sharing import take

ZERO, ONE = np.float32(0), np.float32(1)
PAGE_BITS = PAGE.bit_length() - 1
SHORT = 4  # positions of a block that are listed one by one


@njit(error_model="numpy")
def first_at_least(indices, begin, end, value):
    """The first of the ascending indices begin..end that is >= value."""
    while begin < end:
        middle = (begin + end) // 2
        if load_i32(indices + 4 * middle) < value:
            begin = middle + 1
        else:
            end = middle
    return begin


@njit(error_model="numpy")
def note(batch, n, count, rows, position, bias):
    """Append `count` consecutive keys to the batch as entries n, n + 1, ...

    rows: the first key's row of the K pages and of the V pages; position: its position.
    """
    k_row, v_row = rows
    for i in range(0, count, LANES):
        entry, lanes = batch + 4 * (n + i), count_i() + splat_i(i)
        store_i(entry + BATCH.k_row, splat_i(k_row) + lanes)
        store_i(entry + BATCH.v_row, splat_i(v_row) + lanes)
        store_i(entry + BATCH.position, splat_i(position) + lanes)
        store_f(entry + BATCH.bias, splat_f(bias))


@njit(error_model="numpy")
def note_one(entry, j, tables, h, bias):
    """Write a key, of position j, as an entry of the batch."""
    k_table, v_table, n_head_kv = tables
    at, line = 4 * (j >> PAGE_BITS), j & PAGE - 1
    k_row = (load_i32(k_table + at) * n_head_kv + h << PAGE_BITS) + line
    v_row = (load_i32(v_table + at) * n_head_kv + h << PAGE_BITS) + line
    store_i32(entry + BATCH.k_row, k_row)
    store_i32(entry + BATCH.v_row, v_row)
    store_i32(entry + BATCH.position, j)
    store_f32(entry + BATCH.bias, bias)


@njit(error_model="numpy")
def padded(n):
    """The next multiple of PANEL."""
    return (n + PANEL - 1) // PANEL * PANEL


@njit(error_model="numpy")
def pad(batch, n):
    """Fill the batch up to a multiple of PANEL with copies of the first key of weight 0."""
    for i in range(n, padded(n), LANES):
        entry = batch + 4 * i
        store_i(entry + BATCH.k_row, splat_i(load_i32(batch + BATCH.k_row)))
        store_i(entry + BATCH.v_row, splat_i(load_i32(batch + BATCH.v_row)))
        store_f(entry + BATCH.bias, splat_f(MASKED))


@njit(error_model="numpy")
def gather(batch, cursor, keys, tables, h):
    """Gather the next batch of a row's keys: their number (0 at the end) and the new cursor.

    cursor: index and position; keys: last index, indices, log_weight, block, lowest and highest
    position; tables: k_table, v_table, n_head_kv.
    """
    s, j = cursor
    last, indices, log_weight, block, low, high = keys
    k_table, v_table, n_head_kv = tables
    n = 0
    if block == 1:  # each index is a visible position
        n = min(last - s, PAGE)
        for i in range(n):
            bias = load_f32(log_weight + 4 * (s + i)) if log_weight != 0 else ZERO
            note_one(batch + 4 * i, load_i32(indices + 4 * (s + i)), tables, h, bias)
        s += n
    while s < last and n < PAGE and block > 1:
        start = load_i32(indices + 4 * s) * block
        j, stop = max(j, start, low), min(start + block, high + 1)
        bias = load_f32(log_weight + 4 * s) if log_weight != 0 else ZERO
        if block < SHORT:
            end = min(stop, j + PAGE - n)
            for i in range(end - j):
                note_one(batch + 4 * (n + i), j + i, tables, h, bias)
            n, j = n + max(0, end - j), end
        else:
            page, line = j // PAGE, j % PAGE
            count = min(stop - j, PAGE - line, PAGE - n)
            if count > 0:
                k_row = (load_i32(k_table + 4 * page) * n_head_kv + h) * PAGE + line
                v_row = (load_i32(v_table + 4 * page) * n_head_kv + h) * PAGE + line
                note(batch, n, count, (k_row, v_row), j, bias)
                n += count
                j += count
        if j >= stop:
            s, j = s + 1, 0  # blocks of a token bank are in no order
    pad(batch, n)
    return n, (s, j)


def _ends(at: Layout, head_dim: int, group: int) -> tuple[Any, Any, Any]:
    """Functions start, finish and finish_part: prologue and epilogue of a row's n_q queries.

    Query r is head r % group of token r // group; tokens are `stride` bytes, or n_head heads,
    apart. `query` numbers the first head in out and lse, [n_tok, n_head] as one list.
    """
    row_size, part_size = 4 * head_dim, 4 * head_dim + 8

    @njit(error_model="numpy")
    def start(state, q, n_q, stride, scale):
        for r in range((n_q + 15) // 16 * 16):
            live, query = r < n_q, q + r // group * stride + r % group * row_size
            for d in range(0, row_size, 4 * LANES):
                x = load_f(query + d) * splat_f(scale) if live else zero_f()
                store_f(state + at.q + row_size * r + d, x)
                store_f(state + at.sums + row_size * r + d, zero_f())
            store_f32(state + at.row_max + 4 * r, LOWEST)
            store_f32(state + at.batch_max + 4 * r, LOWEST)
            store_f32(state + at.row_sum + 4 * r, ZERO)

    @njit(error_model="numpy")
    def write(state, r, factor, out):
        for d in range(0, row_size, 4 * LANES):
            store_f(out + d, load_f(state + at.sums + row_size * r + d) * splat_f(factor))

    @njit(error_model="numpy")
    def finish(state, n_q, query, n_head, out, lse):
        """Write the weighted mean and, unless its address is 0, the log-sum-exp."""
        for r in range(n_q):
            to = query + r // group * n_head + r % group
            row_max, row_sum = (
                load_f32(state + at.row_max + 4 * r),
                load_f32(state + at.row_sum + 4 * r),
            )
            write(state, r, ONE / row_sum if row_sum > ZERO else ZERO, out + row_size * to)
            if lse != 0:
                store_f32(
                    lse + 4 * to,
                    row_max + np.float32(math.log(row_sum)) if row_sum > ZERO else row_max,
                )

    @njit(error_model="numpy")
    def finish_part(state, n_q, query, n_head, partial, split):
        """Write a row that one thread has finished as n_part partial results: all in the first."""
        first, n_part, n_split = split
        for r in range(n_q):
            parts = (query + r // group * n_head + r % group) * n_split
            for part in range(first, first + n_part):
                to, factor = partial + part_size * (parts + part), ONE if part == first else ZERO
                write(state, r, factor, to)
                store_f32(to + row_size, load_f32(state + at.row_max + 4 * r))
                store_f32(to + row_size + 4, load_f32(state + at.row_sum + 4 * r) * factor)

    return start, finish, finish_part


def few_queries(at: Layout, heads: tuple[int, int], kv_types: tuple[str, str]) -> tuple[Any, ...]:
    """Functions pack(state), score and weigh for the queries of one token.

    score: q @ K.T of a batch; weigh: adds softmax weights @ V. heads: head_dim, group.
    """
    of_keys, of_values = (attend_batch if t == "f16" else attend_q8 for t in kv_types)

    @njit(error_model="numpy")
    def nothing(state):
        pass

    pack = nothing if kv_types[0] == "f16" else attend_q8.packing(at, *heads)
    return pack, of_keys.scoring(at, heads, kv_types), of_values.weighing(at, heads, kv_types)


class ScoreMod(NamedTuple):
    """How scores are modified: functions of ATTEND_SCORE_MOD, or no-ops of ATTEND."""

    # (record, first head) -> what the others need, and the positions that queries see ahead
    of: Any
    scores: Any  # (state, batch, n_q, n, pos, stride, what they need): changes scores


@njit
def nothing_of(a, head):
    """No parameters, and no positions after the query's own."""
    return ZERO, 0


@njit
def leave_scores(state, batch, n_q, n, pos, stride, needed):
    """Leave the scores as they are."""


UNMODIFIED = ScoreMod(nothing_of, leave_scores)


def _adding(
    at: Layout,
    head_dim: int,
    group: int,
    q_block: int,
    kv_types: tuple[str, str],
    modify_scores: Any,
) -> tuple[Any, Any]:
    """Functions pack(state) and add(state, batch, ahead, pages, n, n_q, seen, needed).

    pack converts the queries; add accumulates a batch of n keys. seen: position of the first query,
    stride between queries, window, positions ahead; needed: see ScoreMod.
    """
    weights = softmax(at)
    if q_block == 1:
        pack, score, weigh = few_queries(at, (head_dim, group), kv_types)

        @njit(error_model="numpy")
        def add_few(state, batch, ahead, pages, n, n_q, seen, needed):
            score(state, batch, pages, padded(n))
            modify_scores(state, batch, n_q, padded(n), seen[0], seen[1], needed)
            weights(state, batch, group, padded(n))
            weigh(state, batch, ahead, pages, n)

        return pack, add_few

    unpack, score_all, weigh_all = many_queries(at, head_dim, kv_types)
    mask = masking(at, group)

    @njit(error_model="numpy")
    def add_many(state, batch, ahead, pages, n, n_q, seen, needed):
        pos, stride, window, further = seen
        tiles = (n_q + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        unpack(state, batch, pages, n, padded(n))
        score_all(state, tiles, padded(n))
        modify_scores(state, batch, n_q, padded(n), pos, stride, needed)
        first, last = batch + BATCH.position, batch + BATCH.position + 4 * (n - 1)
        too_old = pos + (n_q - 1) // group * stride - window if window != 0 else -1
        if load_i32(last) > pos + further or load_i32(first) <= too_old:
            mask(state, batch, n_q, padded(n), (pos, stride, further), window)
        weights(state, batch, n_q, padded(n))
        weigh_all(state, tiles, n)

    @njit(error_model="numpy")
    def pack_many(state):
        pass

    return pack_many, add_many


def attend(head_dim: int, group: int, q_block: int, type_k: str, type_v: str) -> Any:
    """Kernel of ATTEND: threads share rows, or split-KV parts of rows."""
    return attending(head_dim, group, q_block, (type_k, type_v), lambda at, group: UNMODIFIED)


def attending(
    head_dim: int, group: int, q_block: int, kv_types: tuple[str, str], score_mod_of: Any
) -> Any:
    """The kernel of ATTEND with the ScoreMod that score_mod_of(layout, group) returns."""
    assert q_block <= MAX_Q_BLOCK
    at = layout_of(q_block * group, group, head_dim)
    state_size = attend_scratch(group, head_dim)
    assert at.size + 64 <= state_size
    needed_of, modify_scores = score_mod_of(at, group)
    pack, add = _adding(at, head_dim, group, q_block, kv_types, modify_scores)
    start, finish, finish_part = _ends(at, head_dim, group)

    def kernel(tid, n_thread, turns, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        row_q = a.q + 4 * head_dim * a.n_row * group * load_i64(a.step + STEP.row)
        n_head, state = a.n_row * group, (a.scratch + tid * state_size + 63) // 64 * 64
        n_item = (n_tok + q_block - 1) // q_block * a.n_row * a.n_split
        turn = 0
        item, end = take(turn, tid, n_thread, n_item, turns)
        while item < n_item:
            while item < end:
                part, row = item % a.n_split, item // a.n_split
                n_part = min(a.n_split - part, end - item)
                item += n_part
                head, first_tok = row % a.n_row * group, row // a.n_row * q_block
                n_q = min(n_tok - first_tok, q_block) * group
                first = pos + a.stride * first_tok
                low = max(0, first - a.window + 1) if a.window != 0 else 0
                needed, further = needed_of(a, head)
                high = first + a.stride * (n_q // group - 1)
                if further > 0:
                    high = min(high + further, pos + n_tok - 1)
                begin, last = load_i32(a.indptr + 4 * row), load_i32(a.indptr + 4 * row + 4)
                begin = first_at_least(a.indices, begin, last, low // a.block)
                n_seen = first_at_least(a.indices, begin, last, high // a.block + 1) - begin
                cursor = begin + n_seen * part // a.n_split, 0
                last = begin + n_seen * (part + n_part) // a.n_split
                query = n_head * first_tok + head
                at_q = row_q + 4 * head_dim * (n_head * a.stride * first_tok + head)
                start(state, at_q, n_q, 4 * head_dim * n_head * a.stride, a.scale)
                pack(state)
                keys = last, a.indices, a.log_weight, a.block, low, high
                tables, pages = (a.k_table, a.v_table, a.n_head_kv), (a.k_pages, a.v_pages)
                h = head // a.heads_per_kv
                batch, ahead = state + at.batches, state + at.batches + BATCH.size
                n, cursor = gather(batch, cursor, keys, tables, h)
                while n > 0:
                    n_ahead, cursor = gather(ahead, cursor, keys, tables, h)
                    seen = first, a.stride, a.window, further
                    add(state, batch, ahead, pages, n, n_q, seen, needed)
                    n, batch, ahead = n_ahead, ahead, batch
                if a.n_split == 1:
                    finish(state, n_q, query, n_head, a.out, a.lse)
                else:
                    finish_part(state, n_q, query, n_head, a.partial, (part, n_part, a.n_split))
            turn += 1
            item, end = take(turn, tid, n_thread, n_item, turns)

    return kernel


def attend_merge(head_dim: int, q_block: int) -> Any:
    """Kernel of ATTEND_MERGE, the same for all q_block: threads stride over heads."""
    row_size, part_size = 4 * head_dim, 4 * head_dim + 8

    @njit(error_model="numpy")
    def weight_of(part, row_max):
        return np.exp(load_f32(part + row_size) - row_max)

    def kernel(tid, n_thread, a):
        for query in range(tid, load_i64(a.step + STEP.n_tok) * a.n_head, n_thread):
            parts = a.partial + part_size * a.n_split * query
            row_max, row_sum = LOWEST, ZERO
            for p in range(a.n_split):
                row_max = max(row_max, load_f32(parts + part_size * p + row_size))
            for p in range(a.n_split):
                part = parts + part_size * p
                row_sum += weight_of(part, row_max) * load_f32(part + row_size + 4)
            factor, to = ONE / row_sum if row_sum > ZERO else ZERO, a.out + row_size * query
            for d in range(0, row_size, 4 * LANES):
                store_f(to + d, zero_f())
            for p in range(a.n_split):
                part = parts + part_size * p
                if load_f32(part + row_size + 4) > ZERO:
                    weight = splat_f(weight_of(part, row_max) * factor)
                    for d in range(0, row_size, 4 * LANES):
                        store_f(to + d, load_f(to + d) + load_f(part + d) * weight)
            if a.lse != 0:
                log = np.float32(math.log(row_sum)) if row_sum > ZERO else ZERO
                store_f32(a.lse + 4 * query, row_max + log)

    return kernel
