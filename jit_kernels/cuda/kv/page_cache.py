"""Ops of a page cache over a backing store: allocate, write back, mark, evict, fetch.

The store is host memory that the GPU reads and writes over its link: 16 bytes a thread, many
in flight. A graph writes and reads it, so it is never loaded as a constant.
"""

from typing import Any

from numba import cuda, int32, uint32

from tamis.jit_kernels.contract.ops import (
    KV_OLD,
    KV_RANKS,
    KV_READERS,
    KV_STATE,
    READS_SELECTION,
    STEP,
)
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    int64,
    load_i32,
    load_i64,
    load_u128,
    quotient,
    remainder,
    store_i32,
    store_i64,
    store_u128,
)
from tamis.jit_kernels.cuda.lang.ptx import count_bits, equal_lanes

PIECE = 4 * 16 * THREADS  # bytes that a block fetches at once
TAKERS = KV_RANKS  # threads of KV_EVICT, one a rank


@device
def lines_of(size, first, end):
    """Lines first .. end - 1 of `size` bytes: the first byte, and how many 16-byte units."""
    begin = size * first // 16
    return 16 * begin, (size * end + 15) // 16 - begin


@device
def allocate(maps, sizes, layer, page):
    """Assign a frame to a page that will be written."""
    (table, ring, owner, used), (n_layer, n_page, n_ring) = maps, sizes
    slot = layer * n_ring + remainder(page, n_ring)
    entries = table + 4 * n_page * layer
    before, was = load_i32(ring + 4 * slot), load_i32(entries + 4 * page)
    if was != slot:
        if before >= 0 and load_i32(entries + 4 * before) == slot:
            store_i32(entries + 4 * before, -1)
        if was >= 0:
            at = 4 * (was - n_layer * n_ring)
            store_i32(owner + at, -1)
            store_i32(used + at, -KV_OLD)
        store_i32(ring + 4 * slot, page)
        store_i32(entries + 4 * page, slot)


@device
def copy_lines(source, to, n_head_kv, size, end):
    """Copy lines 0 .. end - 1 of all heads of a page; a block's work."""
    _, n = lines_of(size, 0, end)
    for i in range(thread(), n_head_kv * n, THREADS):
        at = PAGE * size * quotient(i, n) + 16 * remainder(i, n)
        store_u128(to + at, load_u128(source + at))


def kv_allocate() -> list[Launch]:
    """Kernel of KV_ALLOCATE: blocks stride over layers, their threads pages."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        first, lines = pos // PAGE, pos % PAGE
        maps, sizes = (a.table, a.ring, a.owner, a.used), (a.n_layer, a.n_page, a.n_ring)
        for layer in range(tid, a.n_layer, n_thread):
            slot, stored = layer * a.n_ring + remainder(first, a.n_ring), layer * a.n_page + first
            new = load_i32(a.table + 4 * stored) != slot
            sync_block()  # all threads have read it
            for page in range(first + thread(), (pos + n_tok - 1) // PAGE + 1, THREADS):
                allocate(maps, sizes, layer, page)
            if new and lines > 0:
                k_size, v_size = PAGE * a.n_head_kv * a.k_bytes, PAGE * a.n_head_kv * a.v_bytes
                k_from, k_to = a.k_store + k_size * stored, a.k_frames + k_size * slot
                copy_lines(k_from, k_to, a.n_head_kv, a.k_bytes, lines)
                v_from, v_to = a.v_store + v_size * stored, a.v_frames + v_size * slot
                copy_lines(v_from, v_to, a.n_head_kv, a.v_bytes, lines)
        if tid == 0 and thread() == 0:
            store_i64(a.state + KV_STATE.n_pass, load_i64(a.state + KV_STATE.n_pass) + 1)

    return [Launch(kernel)]


def kv_write_back() -> list[Launch]:
    """Kernel of KV_WRITE_BACK: warps stride over heads of keys and of values of pages."""

    @device
    def keep(frames, stored, size, slot, to, first, end):
        begin, n = lines_of(size, first, end)
        source, to = frames + PAGE * size * slot + begin, stored + PAGE * size * to + begin
        for i in range(lane(), n, WARP):
            store_u128(to + 16 * i, load_u128(source + 16 * i))

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        low = pos // PAGE
        n_new = (pos + n_tok - 1) // PAGE + 1 - low
        item, n_item = int64(tid * WARPS + warp()), a.n_layer * n_new * a.n_head_kv * 2
        while item < n_item:  # a range divides by its step
            at, h = quotient(item // 2, a.n_head_kv), remainder(item // 2, a.n_head_kv)
            layer, page = quotient(at, n_new), low + remainder(at, n_new)
            first, end = max(0, pos - PAGE * page), min(PAGE, pos + n_tok - PAGE * page)
            slot = a.n_head_kv * (layer * a.n_ring + remainder(page, a.n_ring)) + h
            to = a.n_head_kv * (layer * a.n_page + page) + h
            if item % 2 == 0:
                keep(a.k_frames, a.k_store, a.k_bytes, slot, to, first, end)
            else:
                keep(a.v_frames, a.v_store, a.v_bytes, slot, to, first, end)
            item += n_thread * WARPS

    return [Launch(kernel)]


def kv_mark() -> list[Launch]:
    """Kernel of KV_MARK: threads stride over entries of the Selection."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        last = pos + a.stride * (n_tok - 1)
        low = max(0, pos - a.window + 1) if a.window != 0 else 0
        serial = load_i64(a.state + KV_STATE.serial)
        n_rows = quotient(n_tok + a.q_block - 1, a.q_block) * a.n_row
        i, n = load_i32(a.indptr), load_i32(a.indptr + 4 * n_rows) if n_tok > 0 else 0
        i += tid * THREADS + thread()
        while i < n:  # a range divides by its step
            first = a.block * load_i32(a.indices + 4 * i)
            first, end = max(first, low), min(last, first + a.block - 1)
            page = first // PAGE
            while first <= end and page <= end // PAGE:
                store_i32(a.marks + 4 * page, serial)
                page += 1
            i += n_thread * THREADS

    return [Launch(kernel, blocks=2)]


@device
def rank_of(used, now, n_layer):
    """The eviction rank of a frame: the largest is evicted first, rank 0 never."""
    age = (now - int64(used)) & 0xFFFFFFFF
    rank = min(age if age >= n_layer else n_layer - age, KV_RANKS - 1)
    return rank if age != 0 else 0


@device
def count_ranks(used, now, n_layer, n_cache, ranks):
    """Make ranks[r] the number of frames of rank r or more; a block's work."""
    ranks[thread()] = 0
    sync_block()
    n_quad, q, before = n_cache // 4, int64(thread()), (uint32(1) << lane()) - uint32(1)
    for _ in range((n_quad + TAKERS - 1) // TAKERS):
        for x in load_u128(used + 16 * min(q, n_quad - 1)):
            rank = rank_of(x, now, n_layer) if q < n_quad else 0
            # Neighbours are often equal: one lane counts for all of them.
            alike = equal_lanes(uint32(rank))
            if rank > 0 and alike & before == 0:
                cuda.atomic.add(ranks, rank, int32(count_bits(alike)))  # type: ignore[call-arg]
        q += TAKERS
    sync_block()
    total = ranks[thread()]
    for i in range(10):
        other = thread() + (1 << i)
        more = ranks[other] if other < TAKERS else 0
        sync_block()
        total += more
        ranks[thread()] = total
        sync_block()


@device
def take_frames(maps, sizes, n, now, ranks, counts):
    """Assign frames to the n missing pages of a layer, evicting others; by one block.

    ranks, counts: shared arrays of TAKERS and of 4 int32.
    """
    table, owner, used, missing = maps
    layer, n_layer, n_page, n_first, n_cache = sizes
    count_ranks(used, now, n_layer, n_cache, ranks)
    above = ranks[thread() + 1] if thread() + 1 < TAKERS else 0
    if thread() == 0:
        counts[0], counts[1] = 0, 0
    if thread() > 0 and above < n and n <= ranks[thread()]:
        counts[2], counts[3] = thread(), above
    sync_block()
    bar, above, left = counts[2], counts[3], n - counts[3]
    for q in range(thread(), n_cache // 4, TAKERS):
        i = 4 * q
        for x in load_u128(used + 16 * q):
            rank, to = rank_of(x, now, n_layer), n
            if rank > bar:
                to = cuda.atomic.add(counts, 0, 1)  # type: ignore[call-arg]
            elif rank == bar and counts[1] < left:
                to = above + cuda.atomic.add(counts, 1, 1)  # type: ignore[call-arg]
            if to < n:
                before, page = load_i32(owner + 4 * i), load_i32(missing + 4 * to)
                if before >= 0:
                    store_i32(table + 4 * before, -1)
                store_i32(owner + 4 * i, n_page * layer + page)
                store_i32(used + 4 * i, now)
                store_i32(table + 4 * (n_page * layer + page), n_first + i)
            i += 1


def kv_evict(reader: str) -> list[Launch]:
    """Kernel of KV_EVICT, a single thread block; the assignment of frames is not deterministic."""
    reads = KV_READERS[reader]
    marked, spans = reads is READS_SELECTION, device(reads.spans)
    before, every = 8 * reads.first, 8 * reads.every

    @device
    def bounds(found, n_found):
        """The least and the largest of the first n_found int64s; 0, 0 if there are none."""
        low = high = load_i64(found + before) if n_found > 0 else int64(0)
        for i in range(1, n_found):
            value = load_i64(found + before + every * i)
            low, high = min(low, value), max(high, value)
        return low, high

    @device
    def needed(marks, serial, ranges, page):
        if marked:
            return load_i32(marks + 4 * page) == int32(serial)
        low, high, other, end = ranges
        first, last = PAGE * page, PAGE * page + PAGE
        return (low < last and first < high) or (other < last and first < end)

    def kernel(tid, n_thread, a):
        ranks, seen = cuda.shared.array(TAKERS, int32), cuda.shared.array(4, int32)
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        serial = load_i64(a.state + KV_STATE.serial)
        now = load_i64(a.state + KV_STATE.n_pass) * a.n_layer + a.layer
        low, high = bounds(a.found, a.n_found)
        ranges, hits = spans(low, high, a.block, a.x, a.y, n_tok, pos), int32(0)
        if thread() < 2:
            seen[thread()] = 0
        sync_block()
        for page in range(thread(), (pos + n_tok - 1) // PAGE + 1, TAKERS):
            frame = load_i32(a.table + 4 * (a.n_page * a.layer + page))
            if not needed(a.marks, serial, ranges, page):
                continue
            if frame < 0:
                to: Any = cuda.atomic.add(seen, 0, 1)  # type: ignore[call-arg]
                store_i32(a.missing + 4 * to, page)
            else:
                hits += int32(1)
                if frame >= a.n_first:
                    store_i32(a.used + 4 * (frame - a.n_first), now)
        if hits > 0:
            cuda.atomic.add(seen, 1, hits)  # type: ignore[call-arg]
        sync_block()
        n, n_hit = int64(seen[0]), int64(seen[1])
        if n > 0:
            sync_block()  # all threads have read these
            sizes = a.layer, a.n_layer, a.n_page, a.n_first, a.n_cache
            take_frames((a.table, a.owner, a.used, a.missing), sizes, n, now, ranks, seen)
        if thread() == 0:
            store_i64(a.state + KV_STATE.serial, serial + 1)
            store_i64(a.state + KV_STATE.n_missing, n)
            store_i64(a.state + KV_STATE.n_hit, load_i64(a.state + KV_STATE.n_hit) + n_hit)
            store_i64(a.state + KV_STATE.n_miss, load_i64(a.state + KV_STATE.n_miss) + n)

    return [Launch(kernel, threads=TAKERS)]


def kv_fetch() -> list[Launch]:
    """Kernel of KV_FETCH: blocks stride over pieces of pages."""

    @device
    def fetch(source, to, first, size):
        a = first + 16 * thread()
        b, c, d = a + 16 * THREADS, a + 32 * THREADS, a + 48 * THREADS
        last = size - 16
        w, x = load_u128(source + min(a, last)), load_u128(source + min(b, last))
        y, z = load_u128(source + min(c, last)), load_u128(source + min(d, last))
        if a <= last:
            store_u128(to + a, w)
        if b <= last:
            store_u128(to + b, x)
        if c <= last:
            store_u128(to + c, y)
        if d <= last:
            store_u128(to + d, z)

    def kernel(tid, n_thread, a):
        k_size, v_size = PAGE * a.n_head_kv * a.k_bytes, PAGE * a.n_head_kv * a.v_bytes
        n_k = (k_size + PIECE - 1) // PIECE
        n_piece = n_k + (v_size + PIECE - 1) // PIECE
        item, n_item = int64(tid), load_i64(a.state + KV_STATE.n_missing) * n_piece
        while item < n_item:  # a range divides by its step
            piece = remainder(item, n_piece)
            stored = a.n_page * a.layer + load_i32(a.missing + 4 * quotient(item, n_piece))
            frame = load_i32(a.table + 4 * stored)
            if piece < n_k:
                fetch(
                    a.k_store + k_size * stored, a.k_frames + k_size * frame, PIECE * piece, k_size
                )
            else:
                first = PIECE * (piece - n_k)
                fetch(a.v_store + v_size * stored, a.v_frames + v_size * frame, first, v_size)
            item += n_thread

    return [Launch(kernel)]
