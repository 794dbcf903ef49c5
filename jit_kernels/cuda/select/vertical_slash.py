"""Ops of vertical-slash: find the columns and diagonals that a chunk's last queries attend to.

Scores are computed twice instead of being kept for all queries: first for the sums of their
exponentials, then for the weights, which each column and each diagonal adds up in the order of the
queries.
"""

from numba import cuda, float32, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP, slash_work
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E, LOWEST
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, staging
from tamis.jit_kernels.cuda.kv.kv_rows import key_row
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    sync_block,
    thread,
    warp,
    warp_max,
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
from tamis.jit_kernels.cuda.lang.ptx import exp2, load_shared, shared_address
from tamis.jit_kernels.cuda.lang.radix_topk import write_best, write_range
from tamis.jit_kernels.cuda.select.marks import mark_range, marked

FORCED = 3e38  # the weight of lines that always take part
row_work = device(slash_work)


def slash_lines(head_dim: int, group: int) -> list[Launch]:
    """Kernels of SLASH_LINES: sums of spans, of queries, of lines; the best lines."""

    @device
    def key_of(keys, j):
        k_pages, k_table, n_row, h, n = keys
        if j < 0 or j >= n:
            return 0
        return k_pages + 2 * head_dim * key_row(k_table, n_row, h, j)

    stage = staging(head_dim, group, key_of)

    @device
    def sizes(a):
        """Tokens of the call, positions held, the first of the last queries, spans of work."""
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        return n_tok, pos + n_tok, max(0, n_tok - a.n_last), (a.capacity + SPAN - 1) // SPAN

    @device
    def parts_of(a, h):
        """A row's maxima and sums, two floats a query, head and span; and those of all spans."""
        parts = a.work + 4 * row_work(group, a.capacity, a.n_last) * h
        return parts, parts + 8 * a.n_last * group * ((a.capacity + SPAN - 1) // SPAN)

    def sum_spans(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        n_tok, n, first, n_span = sizes(a)
        used, factor = (n + SPAN - 1) // SPAN, float32(a.scale * LOG2_E)
        for item in range(tid, a.n_row * used, n_thread):
            h, start = item % a.n_row, SPAN * (item // a.n_row)
            keys, parts = (a.k_pages, a.k_table, a.n_row, h, n), parts_of(a, h)[0]
            for t in range(first, n_tok):
                seen = n - n_tok + t + 1
                stage(shared, a.q + 4 * head_dim * group * (t * a.n_row + h), group, keys, start)
                for g in range(warp(), group, WARPS):
                    at, top, total = shared + ROW * g, float32(LOWEST), float32(0)
                    for i in range(lane(), min(SPAN, seen - start), WARP):
                        top = max(top, load_shared(uint32(at + 4 * i)) * factor)
                    top = warp_max(top)
                    for i in range(lane(), min(SPAN, seen - start), WARP):
                        total += exp2(load_shared(uint32(at + 4 * i)) * factor - top)
                    total = warp_sum(total)
                    if lane() == 0:
                        to = parts + 8 * (n_span * ((t - first) * group + g) + start // SPAN)
                        store_f32(to, top)
                        store_f32(to + 4, total)
                sync_block()  # before the next query's products overwrite what is read here

    def join_spans(tid, n_thread, a):
        n_tok, n, first, n_span = sizes(a)
        n_query = (n_tok - first) * group
        used = (n + SPAN - 1) // SPAN
        for item in range(tid * WARPS + warp(), a.n_row * n_query, n_thread * WARPS):
            parts, joined = parts_of(a, item // n_query)
            at, top, total = parts + 8 * n_span * (item % n_query), float32(LOWEST), float32(0)
            for i in range(lane(), used, WARP):
                top = max(top, load_f32(at + 8 * i))
            top = warp_max(top)
            for i in range(lane(), used, WARP):
                total += load_f32(at + 8 * i + 4) * exp2(load_f32(at + 8 * i) - top)
            total = warp_sum(total)
            if lane() == 0:
                store_f32(joined + 8 * (item % n_query), top)
                store_f32(joined + 8 * (item % n_query) + 4, float32(1) / total)

    def add_weights(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        n_tok, n, first, _ = sizes(a)
        used, factor = (n + SPAN - 1) // SPAN, float32(a.scale * LOG2_E)
        for item in range(tid, 2 * a.n_row * used, n_thread):
            h, slash, start = item // 2 % a.n_row, item % 2, SPAN * (item // (2 * a.n_row))
            keys, joined = (a.k_pages, a.k_table, a.n_row, h, n), parts_of(a, h)[1]
            total = float32(0)
            for t in range(first, n_tok):
                seen = n - n_tok + t + 1
                begin = start - slash * (n - seen)
                stage(shared, a.q + 4 * head_dim * group * (t * a.n_row + h), group, keys, begin)
                j = begin + thread()
                if j >= 0 and j < seen:
                    for g in range(group):
                        of_query = joined + 8 * ((t - first) * group + g)
                        score = load_shared(uint32(shared + ROW * g + 4 * thread())) * factor
                        total += exp2(score - load_f32(of_query)) * load_f32(of_query + 4)
                sync_block()  # before the next query's products overwrite what is read here
            i = start + thread()
            if i < n:
                forced = i >= n - a.n_local if slash == 1 else i < a.n_sink
                to = (a.slash if slash == 1 else a.vertical) + 4 * (a.capacity * h + i)
                store_f32(to, float32(FORCED) if forced else total)

    def choose(tid, n_thread, a):
        _, n, _, _ = sizes(a)
        for item in range(tid, 2 * a.n_row, n_thread):
            h, slash = item // 2, item % 2
            k = a.n_slash if slash == 1 else a.n_vertical
            out = (a.diagonals if slash == 1 else a.columns) + 4 * (1 + k) * h
            if n > k:
                weights = (a.slash if slash == 1 else a.vertical) + 4 * a.capacity * h
                write_best(weights, 0, n, k, out + 4)
            else:
                write_range(out + 4, 0, n)
            if thread() == 0:
                store_i32(out, min(n, k))
            sync_block()  # before the next row's counters overwrite what is read here

    return [
        Launch(sum_spans, blocks=2 if head_dim <= 128 else 1, shared=ROW * group),
        Launch(join_spans),
        Launch(add_weights, blocks=2 if head_dim <= 128 else 1, shared=ROW * group),
        Launch(choose, threads=512, any_size=True),
    ]


def slash_select() -> list[Launch]:
    """Kernels of SLASH_SELECT: see marks.marked."""

    @device
    def mark(a, r, words, first, end):
        n_tok = load_i64(a.step + STEP.n_tok)
        h, oldest = r % a.n_row, r // a.n_row * a.q_block
        newest = min(n_tok, oldest + a.q_block) - 1
        columns = a.columns + 4 * (1 + a.n_vertical) * h
        for i in range(thread(), load_i32(columns), THREADS):
            j = load_i32(columns + 4 * (1 + i))
            mark_range(words, max(first, j) - first, min(end, j + 1) - first)
        diagonals = a.diagonals + 4 * (1 + a.n_slash) * h
        for i in range(thread(), load_i32(diagonals), THREADS):
            # The positions that the row's queries see at this distance.
            apart = load_i32(diagonals + 4 * (1 + i)) - n_tok + 1
            low, high = max(first, apart + oldest), min(end, apart + newest + 1)
            mark_range(words, low - first, high - first)

    return marked(mark)
