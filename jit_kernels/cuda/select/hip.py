"""Ops of HiP: the paper's tree search for the best blocks, and the Selection made of them."""

from typing import Any

from numba import cuda, float32, int32, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, staging
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    block_before,
    lane,
    sync_block,
    thread,
    warp,
    warp_through,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_i32,
    load_i64,
    quotient,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cuda.lang.ptx import load_shared, shared_address, shuffle_i32
from tamis.jit_kernels.cuda.lang.radix_topk import write_best, write_range
from tamis.jit_kernels.cuda.select.common import LOWEST, key_row
from tamis.jit_kernels.cuda.select.marks import add_up


@device
def start_chunks(chunks, n_sink, n, count):
    """Write `count` equal parts of n blocks after the sinks: first and end of each.

    Ends are rounded to the nearest block (the paper's footnote 1).
    """
    for j in range(thread(), count, THREADS):
        store_i32(chunks + 8 * j, n_sink + (2 * j * n + count) // (2 * count))
        store_i32(chunks + 8 * j + 4, n_sink + (2 * (j + 1) * n + count) // (2 * count))


@device
def halve(chunks, branches, n_chunk, parts):
    """Split every chunk (first, end) in the middle, and return how many branches there are."""
    count = int32(0)
    for start in range(0, n_chunk, THREADS):
        j = start + thread()
        at = chunks + 8 * min(j, n_chunk - 1)
        first, end = load_i32(at), load_i32(at + 4)
        middle, n = (first + end) // 2, int32(0)
        if j < n_chunk:
            n = int32(2 if middle > first else 1)  # a chunk of one block is its only branch
        before, total = block_before(n, parts)
        to = branches + 8 * (count + before)
        if n > 0:
            store_i32(to, first)
            store_i32(to + 8 * n - 4, end)
        if n == 2:
            store_i32(to + 4, middle)
            store_i32(to + 8, middle)
        count += total
    return count


@device
def copy_chunks(branches, picked, chunks, n_chunk):
    """Copy the branches whose numbers are picked."""
    for j in range(thread(), n_chunk, THREADS):
        at = branches + 8 * load_i32(picked + 4 * j)
        store_i32(chunks + 8 * j, load_i32(at))
        store_i32(chunks + 8 * j + 4, load_i32(at + 4))


def _rating(head_dim: int, group: int) -> Any:
    """The function (shared, heads, rows, scores, more) that scores branches; a block's work.

    A branch's score is the best q . k of its centre block, or with `more` what it was if that is
    larger. rows: the pages of a KV head; the branches, how many there are, keys of each, positions
    of a block, positions between keys.
    """

    @device
    def key_of(rows, i):
        (k_pages, k_table, n_head_kv, h), (branches, n_branch, n_key, block, stride) = rows
        b = quotient(i, n_key)
        at = branches + 8 * min(b, n_branch - 1)
        centre = (load_i32(at) + load_i32(at + 4) - 1) // 2
        j = centre * block + stride * (i - n_key * b)
        row = key_row(k_table, n_head_kv, h, j if b < n_branch else 0)
        return k_pages + 2 * head_dim * row if b < n_branch else 0

    stage = staging(head_dim, group, key_of)

    @device
    def rate(shared, heads, rows, scores, more):
        _, n_branch, n_key, _, _ = rows[1]
        for start in range(0, n_branch * n_key, SPAN):
            stage(shared, heads, group, rows, start)
            end = min(start + SPAN, n_branch * n_key)
            last = quotient(end - 1, n_key)
            for b in range(quotient(start, n_key) + thread(), last + 1, THREADS):
                begun = more or b * n_key < start
                best = load_f32(scores + 4 * b) if begun else float32(LOWEST)
                for i in range(max(start, b * n_key), min(end, (b + 1) * n_key)):
                    for g in range(group):
                        product = load_shared(uint32(shared + ROW * g + 4 * (i - start)))
                        best = max(best, product)
                store_f32(scores + 4 * b, best)
            sync_block()  # before the next span's products overwrite what is read here

    return rate


def hip_estimate(head_dim: int, group: int) -> list[Launch]:
    """Kernel of HIP_ESTIMATE: blocks stride over rows of masks."""
    rate = _rating(head_dim, group)

    def kernel(tid, n_thread, a):
        parts = cuda.shared.array(WARPS, int32)
        shared = shared_address(cuda.shared.array(0, uint8))
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n_key = (a.block + a.stride - 1) // a.stride
        n_item = (n_tok + a.mask_block - 1) // a.mask_block * a.n_row
        apart = 4 * head_dim * group * a.n_row * a.q_stride  # bytes from a query to the next
        for item in range(tid, n_item, n_thread):
            oldest, r = item // a.n_row * a.mask_block, item % a.n_row
            n = max(0, (pos + oldest + 1 - a.n_local) // a.block - a.n_sink)
            count = min(n, a.n_chunk)
            n_query = (min(a.mask_block, n_tok - oldest) + a.q_stride - 1) // a.q_stride
            pages = a.k_pages, a.k_table, a.n_head_kv, r * group // a.heads_per_kv
            heads = a.q + 4 * head_dim * group * (oldest * a.n_row + r)
            chosen = a.mask + 4 * (1 + a.n_chunk) * item
            chunks = a.tree + 32 * a.n_chunk * item
            branches, scores = chunks + 8 * a.n_chunk, chunks + 24 * a.n_chunk
            start_chunks(chunks, a.n_sink, n, count)
            sync_block()
            longest = (n + count - 1) // count if count > 0 else 0
            while longest > 1:  # then there are n_chunk chunks, and at least as many branches
                n_branch = halve(chunks, branches, a.n_chunk, parts)
                sync_block()
                if n_branch > a.n_chunk:
                    rows = pages, (branches, n_branch, n_key, a.block, a.stride)
                    for i in range(n_query):
                        rate(shared, heads + apart * i, rows, scores, i > 0)
                    write_best(scores, 0, n_branch, a.n_chunk, chosen + 4)
                else:
                    write_range(chosen + 4, 0, a.n_chunk)
                sync_block()
                copy_chunks(branches, chosen + 4, chunks, a.n_chunk)
                sync_block()
                longest = (longest + 1) // 2
            for j in range(thread(), count, THREADS):
                store_i32(chosen + 4 * (1 + j), load_i32(chunks + 8 * j))
            if thread() == 0:
                store_i32(chosen, count)
            sync_block()  # before the next row's chunks overwrite what is read here

    return [Launch(kernel, shared=ROW * group)]


@device
def row_at(step, mask, row, sizes):
    """A row's entries: the sinks, its blocks from there to `high`, and positions up to `end`."""
    n_row, n_chunk, block, n_sink, n_local, mask_block, q_block = sizes
    n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
    first = row // n_row * q_block
    made = first // mask_block  # the mask, which was made for its first query
    high = max(0, pos + made * mask_block + 1 - n_local) // block
    end = (pos + min(n_tok, first + q_block) + block - 1) // block
    chosen = mask + 4 * (1 + n_chunk) * (made * n_row + row % n_row)
    return chosen, min(n_sink, high), high, end


@device
def around(chosen, j, sinks, high, n_near):
    """The first entry and the end of those that the j-th chosen block brings; they may be equal."""
    b = load_i32(chosen + 4 * (1 + j))
    first = max(sinks, b - n_near)
    if j > 0:
        first = max(first, load_i32(chosen + 4 * j) + n_near + 1)
    return first, min(high, b + n_near + 1)


@device
def part(row, first_j, n_near):
    """A thread's entries of the chosen blocks from first_j on, one a thread."""
    chosen, sinks, high, _ = row
    j = first_j + thread()
    if j >= load_i32(chosen):
        return 0, 0
    first, end = around(chosen, j, sinks, high, n_near)
    return first, max(0, end - first)


def hip_select() -> list[Launch]:
    """Kernels of HIP_SELECT: rows' sizes, their sums, their entries; blocks stride over rows.

    Of few rows, which the warps of a block count themselves, one launch.
    """

    @device
    def size_of(a, r, sizes):
        """The number of a row's entries, which a warp counts."""
        row, mine = row_at(a.step, a.mask, r, sizes), 0
        chosen, sinks, high, end = row
        n = load_i32(chosen)
        # Blocks ascend: where the first and the last one count and bring no others, all do.
        first = load_i32(chosen + 4) if n > 0 else sinks
        last = load_i32(chosen + 4 * n) if n > 0 else high - 1
        if a.n_near == 0 and first >= sinks and last < high:
            return sinks + n + end - high
        for j in range(lane(), n, WARP):
            first, last = around(chosen, j, sinks, high, a.n_near)
            mine += max(0, last - first)
        through = warp_through(int32(mine))
        return sinks + shuffle_i32(int32(through), WARP - 1) + end - high

    @device
    def write_row(a, r, sizes, begin, parts):
        row, out = row_at(a.step, a.mask, r, sizes), a.indices + 4 * begin
        write_range(out, 0, row[1])
        out += 4 * row[1]
        for first_j in range(0, load_i32(row[0]), THREADS):
            first, n = part(row, first_j, a.n_near)
            before, total = block_before(int32(n), parts)
            for i in range(n):
                store_i32(out + 4 * (before + i), first + i)
            out += 4 * total
        write_range(out, row[2], row[3])

    def whole(tid, n_thread, a):
        parts, begin = cuda.shared.array(WARPS, int32), cuda.shared.array(1, int32)
        before = cuda.shared.array(WARPS, int32)
        n_rows = (load_i64(a.step + STEP.n_tok) + a.q_block - 1) // a.q_block * a.n_row
        sizes = a.n_row, a.n_chunk, a.block, a.n_sink, a.n_local, a.mask_block, a.q_block
        for r in range(tid, n_rows, n_thread):
            mine, own = 0, 0
            for i in range(warp(), r + 1, WARPS):
                own = size_of(a, i, sizes)
                mine += own
            if lane() == 0:
                before[warp()] = mine
            sync_block()
            end = 0
            for w in range(WARPS):
                end += before[w]
            if lane() == 0 and r % WARPS == warp():  # whose last row this one was
                store_i32(a.indptr + 4 * (r + 1), end)
                begin[0] = end - own
                if r == 0:
                    store_i32(a.indptr, 0)
            sync_block()
            write_row(a, r, sizes, begin[0], parts)
            sync_block()  # before the next row's sums overwrite what is read here

    def count(tid, n_thread, a):
        parts = cuda.shared.array(WARPS, int32)
        n_rows = (load_i64(a.step + STEP.n_tok) + a.q_block - 1) // a.q_block * a.n_row
        sizes = a.n_row, a.n_chunk, a.block, a.n_sink, a.n_local, a.mask_block, a.q_block
        for r in range(tid, n_rows, n_thread):
            row, mine = row_at(a.step, a.mask, r, sizes), 0
            for first_j in range(0, load_i32(row[0]), THREADS):
                mine += part(row, first_j, a.n_near)[1]
            _, total = block_before(int32(mine), parts)
            if thread() == 0:
                store_i32(a.indptr + 4 * (r + 1), row[1] + total + row[3] - row[2])

    def write(tid, n_thread, a):
        parts = cuda.shared.array(WARPS, int32)
        n_rows = (load_i64(a.step + STEP.n_tok) + a.q_block - 1) // a.q_block * a.n_row
        sizes = a.n_row, a.n_chunk, a.block, a.n_sink, a.n_local, a.mask_block, a.q_block
        for r in range(tid, n_rows, n_thread):
            write_row(a, r, sizes, load_i32(a.indptr + 4 * r), parts)

    return [
        Launch(whole, rows="few"),
        *(Launch(kernel, rows="some many") for kernel in (count, add_up, write)),
    ]
