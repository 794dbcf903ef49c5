"""Ops that make Selections: windows, scores of keys, the best k, unions."""

from numba import cuda, float32, int32, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, joined, staging
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    MOST_THREADS,
    MOST_WARPS,
    THREADS,
    Launch,
    sync_block,
    thread,
    threads,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    int64,
    load_i32,
    load_i64,
    quotient,
    remainder,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    load_shared,
    shared_address,
    store_shared_f32,
)
from tamis.jit_kernels.cuda.lang.radix_topk import (
    HELD,
    SUBSPAN,
    clear_bits,
    hold,
    set_bit,
    write_best_by_maxima,
    write_best_found,
    write_best_held,
    write_bits,
    write_range,
)
from tamis.jit_kernels.cuda.select.marks import mark_range, marked

LOWEST, NOTHING = -3e38, -3.4e38  # the score of positions that are not chosen from; below it


def select_window() -> list[Launch]:
    """Kernel of SELECT_WINDOW: each block writes whole rows, after the sum of those before."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n_q_block = quotient(n_tok + a.q_block - 1, a.q_block)
        most = quotient(a.n_sink + a.block - 1, a.block)
        count, row = 0, int64(tid)  # entries of a row of the query blocks so far; the block's next
        for qb in range(n_q_block):
            oldest = pos + qb * a.q_block
            newest = pos + min(n_tok, (qb + 1) * a.q_block) - 1
            low = quotient(max(0, oldest - a.n_recent + 1), a.block) if a.n_recent != 0 else 0
            sinks = min(low, most)
            size = sinks + quotient(newest, a.block) + 1 - low
            while row < (qb + 1) * a.n_row:
                begin = count * a.n_row + (row - qb * a.n_row) * size
                for i in range(thread(), size, THREADS):
                    store_i32(a.indices + 4 * (begin + i), i if i < sinks else low + i - sinks)
                if thread() == 0:
                    store_i32(a.indptr + 4 * (row + 1), begin + size)
                    if row == 0:
                        store_i32(a.indptr, 0)
                row += n_thread
            count += size

    return [Launch(kernel)]


@device
def window_start(pos, n_local, drop):
    """The first position beside the sinks that a query at `pos` sees.

    It leaves out drop / 2^32 of the positions, or fewer, so that it sees the local window.
    """
    return max(0, min(drop * pos >> 32, pos + 1 - n_local))


@device
def middle(pos, n_sink, n_local, drop):
    """The range of positions between sinks and local window that a method chooses from."""
    low = max(n_sink, window_start(pos, n_local, drop))
    return low, max(n_sink, pos + 1 - n_local)


def score_keys(head_dim: int, heads: int, group: int, type_k: str) -> list[Launch]:
    """Kernel of SCORE_KEYS: blocks stride over spans of a KV head's positions."""
    size = row_bytes(type_k, head_dim)

    @device
    def key_at(keys, j):
        k_pages, k_table, n_head_kv, h, first, last = keys
        page = j // PAGE
        if page < first or page >= last:
            return 0
        return k_pages + size * key_row(k_table, n_head_kv, h, j)

    stage, best_of = staging(head_dim, heads, key_at, type_k), joined(group)

    @device
    def asked_of(counts, h):
        """How many of a KV head's query heads are scored."""
        return load_i32(counts + 4 * h) if counts != 0 else heads

    @device
    def asking_head(counts, i):
        """The i-th KV head of those that have any."""
        h = i
        if counts != 0:
            h = 0
            while i > 0 or load_i32(counts + 4 * h) == 0:
                i -= 1 if load_i32(counts + 4 * h) > 0 else 0
                h += 1
        return h

    @device
    def put_maxima(shared, n, tops, stride):
        for i in range(thread(), n // group * SUBSPAN, THREADS):
            r, at = i // SUBSPAN * group, i % SUBSPAN
            top = float32(NOTHING)
            for m in range(SPAN // SUBSPAN):
                top = max(top, load_shared(uint32(shared + ROW * r + 4 * (at + SUBSPAN * m))))
            store_f32(tops + stride * r + 4 * at, top)

    def kernel(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        low, high = middle(load_i64(a.step + STEP.pos), a.n_sink, a.n_local, a.drop)
        first, last = low // PAGE, (high + PAGE - 1) // PAGE
        begin = low // SPAN
        n_span = (PAGE * last + SPAN - 1) // SPAN - begin if high > low else 0
        # Numbered are the KV heads that ask: all items of a block could be of one that does not.
        n_asking = 0
        for h in range(a.n_head_kv):
            n_asking += 1 if asked_of(a.counts, h) > 0 else 0
        for item in range(tid, n_asking * n_span, n_thread):
            h, span = asking_head(a.counts, item % n_asking), begin + item // n_asking
            n = asked_of(a.counts, h)
            keys = a.k_pages, a.k_table, a.n_head_kv, h, first, last
            stage(shared, a.q + 4 * head_dim * heads * h, n, keys, SPAN * span)
            j = SPAN * span + thread()
            there, inside = first <= j // PAGE and j // PAGE < last, low <= j and j < high
            for r in range(0, n, group):
                best = best_of(shared, r) if inside else float32(LOWEST)
                if there:
                    store_f32(a.scores + 4 * (a.capacity * (heads * h + r) + j), best)
                at = uint32(shared + ROW * r + 4 * thread())
                store_shared_f32(at, best if there else float32(NOTHING))
            sync_block()
            tops = a.maxima + a.capacity // 4 * heads * h + 4 * SUBSPAN * span
            put_maxima(shared, n, tops, a.capacity // 4)
            sync_block()  # before the next span's products overwrite what is read here

    return [Launch(kernel, blocks=2 if head_dim <= 128 else 1, shared=ROW * heads)]


@device
def found_of(a, r):
    """A scored row's candidates: see COPY_CANDIDATES."""
    first = 4 * a.capacity * r
    return a.found + first, a.exact + first, load_i32(a.n_found + 4 * r)


def select_best() -> list[Launch]:
    """Kernel of SELECT_BEST: blocks stride over rows."""

    def kernel(tid, n_thread, a):
        pos, shared = load_i64(a.step + STEP.pos), shared_address(cuda.shared.array(0, uint8))
        low, high = middle(pos, a.n_sink, a.n_local, 0)
        n_middle, sinks = min(high - low, a.n_top), min(a.n_sink, pos + 1)
        for r in range(tid, a.n_row, n_thread):
            out = a.sets + 4 * a.set_capacity * r
            write_range(out, 0, sinks)
            if high - low <= a.n_top:
                write_range(out + 4 * sinks, low, high)
            elif a.n_top > 0:
                first = a.capacity * a.group * r
                rows = a.scores + 4 * first, a.maxima + first // 4, a.capacity
                order, to = a.order + 4 * a.capacity * r, out + 4 * sinks
                if a.found == 0:
                    write_best_by_maxima(shared, rows, low, high, a.n_top, order, to)
                else:
                    write_best_found(shared, found_of(a, r), low, high, a.n_top, order, to)
            write_range(out + 4 * (sinks + n_middle), high, pos + 1)
            if thread() == 0:
                store_i32(a.counts + 4 * r, sinks + n_middle + max(0, pos + 1 - high))
            sync_block()  # before the next row's keys overwrite what is read here

    return [Launch(kernel, shared=4 * HELD, threads=512, any_size=True)]


def select_top_k() -> list[Launch]:
    """Kernel of SELECT_TOP_K: blocks stride over rows; all rows have the same size."""

    def kernel(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        n_block = load_i64(a.step + STEP.pos) // a.block + 1
        size = min(n_block, a.n_sink + a.n_recent + a.n_top)
        high = n_block - a.n_recent
        for r in range(tid, a.n_row, n_thread):
            out = a.indices + 4 * size * r
            if thread() == 0:
                store_i32(a.indptr, 0)
                store_i32(a.indptr + 4 * (r + 1), (r + 1) * size)
            if size == n_block:
                write_range(out, 0, n_block)
                continue
            write_range(out, 0, a.n_sink)
            if a.n_top > 0:
                scores, low = a.scores + 4 * a.capacity * r, a.n_sink
                hold(shared, scores, low, high)
                write_best_held((shared, scores, low), low, high, a.n_top, out + 4 * low)
                sync_block()  # before the next row's keys overwrite what is read here
            write_range(out + 4 * (a.n_sink + a.n_top), high, n_block)

    return [Launch(kernel, shared=4 * HELD, threads=512, any_size=True)]


def select_union() -> list[Launch]:
    """Kernel of SELECT_UNION: blocks stride over KV heads."""

    def kernel(tid, n_thread, a):
        n, parts = load_i64(a.step + STEP.pos) // 64 + 1, cuda.shared.array(MOST_WARPS, int32)
        for h in range(tid, a.n_head_kv, n_thread):
            words = a.bits + 8 * a.n_word * h
            clear_bits(words, 0, n)
            sync_block()
            for r in range(h * a.rows_per_kv, (h + 1) * a.rows_per_kv):
                for i in range(thread(), load_i32(a.counts + 4 * r), threads()):
                    set_bit(words, load_i32(a.sets + 4 * (a.capacity * r + i)))
            sync_block()
            count = write_bits(words, 0, n, a.joined + 4 * a.joined_capacity * h, parts)
            if thread() == 0:
                store_i32(a.n_joined + 4 * h, count)

    return [Launch(kernel, threads=MOST_THREADS, any_size=True)]


def select_pack() -> list[Launch]:
    """Kernel of SELECT_PACK: blocks take parts of rows, after the sum of those before."""

    def kernel(tid, n_thread, a):
        n_part = max(1, n_thread // a.n_row)
        for item in range(tid, a.n_row * n_part, n_thread):
            r, part = quotient(item, n_part), remainder(item, n_part)
            begin, n = 0, load_i32(a.counts + 4 * r)
            for before in range(r):
                begin += load_i32(a.counts + 4 * before)
            for i in range(THREADS * part + thread(), n, THREADS * n_part):
                store_i32(a.indices + 4 * (begin + i), load_i32(a.sets + 4 * (a.capacity * r + i)))
            if part == 0 and thread() == 0:
                store_i32(a.indptr + 4 * (r + 1), begin + n)
                if r == 0:
                    store_i32(a.indptr, 0)

    return [Launch(kernel)]


def select_join() -> list[Launch]:
    """Kernels of SELECT_JOIN: see marks.marked."""

    @device
    def mark(a, r, words, first, end):
        begin, stop = load_i32(a.block_indptr + 4 * r), load_i32(a.block_indptr + 4 * (r + 1))
        for i in range(begin + thread(), stop, THREADS):
            at = load_i32(a.block_indices + 4 * i) * a.block
            mark_range(words, max(first, at) - first, min(end, at + a.block) - first)
        s = quotient(r * a.other_n_row, a.n_row)  # rows of a query block are divided evenly
        begin, stop = load_i32(a.other_indptr + 4 * s), load_i32(a.other_indptr + 4 * (s + 1))
        for i in range(begin + thread(), stop, THREADS):
            j = load_i32(a.other_indices + 4 * i)
            mark_range(words, max(first, j) - first, min(end, j + 1) - first)

    return marked(mark)
