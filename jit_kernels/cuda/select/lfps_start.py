"""LFPS_START: the tables of `lfps` from the weights of the last queries, once after a prompt."""

import math
from typing import Any

from numba import cuda, float32, float64, int32, uint8, uint32

from tamis.jit_kernels.contract.ops import LFPS_META, LFPS_STATS, STEP
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, staging
from tamis.jit_kernels.cuda.kv.kv_rows import key_row
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    block_max,
    block_sum,
    lane,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_i64,
    store_f32,
    store_f64,
)
from tamis.jit_kernels.cuda.lang.ptx import ballot, count_bits, exp2, load_shared, shared_address
from tamis.jit_kernels.cuda.lang.readers import const_f16
from tamis.jit_kernels.cuda.select.common import LOWEST
from tamis.jit_kernels.cuda.select.lfps_tables import (
    META,
    STATS,
    add_up,
    compare,
    mean_and_bar,
    rescale,
    slash_shift,
)

SLICE = 8  # elements of a mean that a block sums


@device
def lowest_of(bits):
    """The index of the lowest set bit of a word."""
    lowest = uint32(bits & (uint32(0) - bits))
    return int32(count_bits(uint32(lowest - uint32(1))))


@device
def next_due(meta, h, n_head_kv, rows_per_kv, middle):
    """The first KV head from h on whose tables are not made yet; n_head_kv if none.

    middle: the position, the first of the middle and how many come after it.
    """
    pos, low, n_local = middle
    while h < n_head_kv and pos + 1 - n_local > low:
        own, due = h + lane(), False
        if own < n_head_kv:
            due = load_i64(meta + META * rows_per_kv * own + LFPS_META.next) != pos
        found = ballot(uint32(1 if due else 0))
        if found != 0:
            return h + lowest_of(found)
        h += WARP
    return n_head_kv


@device
def n_kept(past_pos, n_past, low, pos, n_local):
    """How many consecutive stored queries, ending just before `pos`, see the middle."""
    for first in range(0, n_past, WARP):
        i, there = first + lane(), False
        p = pos - 1 - i
        if i < n_past and p + 1 - n_local > low:
            there = load_i64(past_pos + 8 * (p % n_past)) == p
        missing = ballot(uint32(0 if there else 1))
        if missing != 0:
            return first + lowest_of(missing)
    return n_past


@device
def query_at(q, past, n_past, size, i, n_query, pos):
    """Address and position of the i-th query before pos, or of the query at pos if not stored.

    size: bytes of the queries of a position.
    """
    if n_query == 0:
        return q, pos
    p = pos - 1 - i
    return past + size * (p % n_past), p


def _weighing(head_dim: int, stage: Any) -> Any:
    """The function that computes a query's log-sum-exp."""

    @device
    def weigh(shared, query, keys, scale, parts):
        """The log-sum-exp of a query's logits, and their variance."""
        (low, last), top, total = keys[4:], float32(LOWEST), float32(0)
        s1, s2 = 0.0, 0.0
        for start in range(low, last, SPAN):
            stage(shared, query, 1, keys, start)
            if start + thread() < last:
                x = load_shared(uint32(shared + 4 * thread())) * scale
                s1, s2 = s1 + float64(x), s2 + float64(x) * float64(x)
                above = max(top, x)
                total *= exp2((top - above) * float32(LOG2_E))
                total, top = total + exp2((x - above) * float32(LOG2_E)), above
            sync_block()  # before the next products overwrite what is read here
        highest = block_max(top)
        total = block_sum(total * exp2((top - highest) * float32(LOG2_E)))
        parts[0, thread()], parts[1, thread()] = s1, s2
        add_up(parts, 2)
        mean, square = parts[0, 0] / (last - low), parts[1, 0] / (last - low)
        norm = float32(0)
        for d in range(thread(), head_dim, THREADS):
            norm += load_f32(query + 4 * d) * load_f32(query + 4 * d)
        norm = block_sum(norm)  # and all have read the parts
        spread = (square - mean * mean) / float64(norm) if norm > 0 else 0.0
        return float32(float64(highest) + math.log(float64(total))), spread

    return weigh


def _averaging(head_dim: int) -> Any:
    """The function that writes the mean of some elements of rows low .. high - 1."""

    @device
    def average(rows, span, begin, out, parts):
        (pages, table, n_head_kv, h), (low, high) = rows, span
        d, total = begin + thread() % SLICE, float32(0)
        for j in range(low + thread() // SLICE, high, THREADS // SLICE):
            total += const_f16(pages + 2 * (head_dim * key_row(table, n_head_kv, h, j) + d))
        parts[0, thread()] = float64(total)
        sync_block()
        if thread() < SLICE:
            whole = 0.0
            for i in range(thread(), THREADS, SLICE):
                whole += parts[0, i]
            store_f32(out + 4 * d, float32(whole / (high - low)))
        sync_block()  # before the next sum overwrites what is read here

    return average


def _key_reader(head_dim: int) -> Any:
    """The function that returns a key's address, 0 outside low .. last - 1."""

    @device
    def key_at(keys, j):
        k_pages, k_table, n_head_kv, h, low, last = keys
        inside = low <= j and j < last
        row = key_row(k_table, n_head_kv, h, j) if inside else 0
        return k_pages + 2 * head_dim * row if inside else 0

    return key_at


def _dividing(head_dim: int, heads: int, rows_per_kv: int) -> Any:
    """The kernel that computes the queries' log-sum-exp; blocks stride over queries of heads."""
    weigh, size = _weighing(head_dim, staging(head_dim, 1, _key_reader(head_dim))), 4 * head_dim

    def divide(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        parts = cuda.shared.array((2, THREADS), float64)
        pos, n_float = load_i64(a.step + STEP.pos), size * heads * a.n_head_kv
        middle = pos, a.n_sink, a.n_local
        h = next_due(a.meta, 0, a.n_head_kv, rows_per_kv, middle)
        while h < a.n_head_kv:
            n_query = n_kept(a.past_pos, a.n_past, a.n_sink, pos, a.n_local)
            for item in range(tid, heads * max(1, n_query), n_thread):
                i, head = item // heads, heads * h + item % heads
                queries, p = query_at(a.q, a.past, a.n_past, n_float, i, n_query, pos)
                keys = a.k_pages, a.k_table, a.n_head_kv, h, a.n_sink, p + 1 - a.n_local
                log_sum, ratio = weigh(shared, queries + size * head, keys, a.scale, parts)
                if thread() == 0:
                    store_f32(a.scores + 4 * (a.capacity * head + i), log_sum)
                    if i == 0:
                        store_f64(a.spread + 8 * head, ratio)
            h = next_due(a.meta, h + 1, a.n_head_kv, rows_per_kv, middle)

    return divide


def _filling(head_dim: int, heads: int, group: int) -> Any:
    """The kernel that fills the tables; blocks stride over spans of them."""
    rows_per_kv, size = heads // group, 4 * head_dim
    stage_row = staging(head_dim, group, _key_reader(head_dim))

    @device
    def entry(shared, given, pages, row, sums, at):
        """One table entry, by one thread: the sum of the weights of its positions."""
        (q, past, n_past, n_query, pos), (start, is_slash) = given, at
        log_sums, capacity, n_sink, n_local, scale = sums
        total, n_float = float32(0), size * heads * pages[2]
        for i in range(max(1, n_query)):
            queries, p = query_at(q, past, n_past, n_float, i, n_query, pos)
            first, last = start - (slash_shift(capacity, p) if is_slash else 0), p + 1 - n_local
            if first + SPAN <= n_sink or first >= last:
                continue
            keys = pages[0], pages[1], pages[2], pages[3], n_sink, last
            stage_row(shared, queries + size * group * row, group, keys, first)
            j = first + thread()
            if n_sink <= j and j < last:
                for g in range(group):
                    x = load_shared(uint32(shared + ROW * g + 4 * thread())) * scale
                    x -= load_f32(log_sums + 4 * (capacity * (group * row + g) + i))
                    total += exp2(x * float32(LOG2_E))
            sync_block()  # before the next products overwrite what is read here
        return total

    def fill(tid, n_thread, a):
        shared, pos = shared_address(cuda.shared.array(0, uint8)), load_i64(a.step + STEP.pos)
        n_span = (a.capacity + SPAN - 1) // SPAN
        sums = (a.scores, a.capacity, a.n_sink, a.n_local, a.scale)
        middle = pos, a.n_sink, a.n_local
        h = next_due(a.meta, 0, a.n_head_kv, rows_per_kv, middle)
        while h < a.n_head_kv:
            n_query = n_kept(a.past_pos, a.n_past, a.n_sink, pos, a.n_local)
            given = (a.q, a.past, a.n_past, n_query, pos)
            pages = (a.k_pages, a.k_table, a.n_head_kv, h)
            share = float32(1) / (float32(2 * max(1, n_query) * group) * (float32(1) - a.decay))
            for item in range(tid, 2 * rows_per_kv * n_span, n_thread):
                row, slash = rows_per_kv * h + item // 2 // n_span, item % 2 == 1
                start = item // 2 % n_span * SPAN
                x = entry(shared, given, pages, row, sums, (start, slash)) * share
                if start + thread() < a.capacity:
                    table = a.sla if slash else a.ver
                    store_f32(table + 4 * (a.capacity * row + start + thread()), x)
            h = next_due(a.meta, h + 1, a.n_head_kv, rows_per_kv, middle)

    return fill


def _finishing(head_dim: int, rows_per_kv: int) -> Any:
    """The kernel of power sums, bitmaps and means; blocks stride over tables and mean slices."""
    average, size = _averaging(head_dim), 4 * head_dim

    @device
    def finish_table(a, table, bits, state, pos, slash, parts):
        """Compute the power sums and bitmaps of a whole table."""
        low, high = a.n_sink, pos + 1 - a.n_local
        shift = slash_shift(a.capacity, pos) if slash else 0
        sums = state + (LFPS_STATS.sla if slash else LFPS_STATS.ver)
        rescale(table, sums, (low + shift, high + shift), float32(1), parts)
        levels, n_word = mean_and_bar(sums, high - low, a.a), a.capacity // 64 + 1
        compare(table, bits, n_word, levels, (0, n_word - 1), (warp(), WARPS))
        if thread() == 0:
            store_f64(state + LFPS_STATS.scale, 1.0)

    def finish(tid, n_thread, a):
        parts, n_table = cuda.shared.array((4, THREADS), float64), 2 * rows_per_kv
        pos, n_word = load_i64(a.step + STEP.pos), a.capacity // 64 + 1
        middle, span = (pos, a.n_sink, a.n_local), (a.n_sink, pos + 1 - a.n_local)
        h = next_due(a.meta, 0, a.n_head_kv, rows_per_kv, middle)
        while h < a.n_head_kv:
            for item in range(tid, n_table + 2 * (head_dim // SLICE), n_thread):
                odd, pages = item % 2 == 1, a.v_pages if item % 2 == 1 else a.k_pages
                if item < n_table:
                    row = rows_per_kv * h + item // 2
                    table = (a.sla if odd else a.ver) + 4 * a.capacity * row
                    words = a.bits + 16 * n_word * (2 * row + item % 2)
                    state = a.stats + STATS * row
                    finish_table(a, table, words, state, pos, odd, parts)
                else:
                    keys = pages, a.v_table if odd else a.k_table, a.n_head_kv, h
                    mean = a.means + size * (2 * h + item % 2)
                    average(keys, span, (item - n_table) // 2 * SLICE, mean, parts)
            h = next_due(a.meta, h + 1, a.n_head_kv, rows_per_kv, middle)

    return finish


def lfps_start(head_dim: int, heads: int, group: int) -> list[Launch]:
    """Kernels of LFPS_START, which return immediately if all tables continue."""
    rows_per_kv = heads // group
    return [
        Launch(_dividing(head_dim, heads, rows_per_kv), shared=ROW),
        Launch(_filling(head_dim, heads, group), shared=ROW * group),
        Launch(_finishing(head_dim, rows_per_kv), blocks=2),
    ]
