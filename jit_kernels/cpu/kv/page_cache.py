"""Ops of a page cache over a backing store: allocate, write back, mark, evict, fetch."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import (
    KV_OLD,
    KV_RANKS,
    KV_READERS,
    KV_STATE,
    READS_SELECTION,
    STEP,
)
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cpu.lang.intrinsic import load_i32, load_i64, store_i32, store_i64


@njit
def copy_bytes(source, to, first, end):
    """Copy bytes first .. end - 1, rounded outwards to multiples of 16."""
    for i in range(first // 16 * 16, (end + 15) // 16 * 16, 8):
        store_i64(to + i, load_i64(source + i))


def kv_allocate() -> Any:
    """Kernel of KV_ALLOCATE: threads stride over layers."""

    @njit
    def allocated(maps, layer, page, sizes):
        """Assign a frame to a page that has none; returns whether that was needed."""
        (table, ring, owner, used), (n_layer, n_page, n_ring) = maps, sizes
        slot = layer * n_ring + page % n_ring
        entries = table + 4 * n_page * layer
        before, was = load_i32(ring + 4 * slot), load_i32(entries + 4 * page)
        if was == slot:
            return False
        if before >= 0 and load_i32(entries + 4 * before) == slot:
            store_i32(entries + 4 * before, -1)
        if was >= 0:
            at = 4 * (was - n_layer * n_ring)
            store_i32(owner + at, -1)
            store_i32(used + at, -KV_OLD)
        store_i32(ring + 4 * slot, page)
        store_i32(entries + 4 * page, slot)
        return True

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        if tid == 0:
            store_i64(a.state + KV_STATE.n_pass, load_i64(a.state + KV_STATE.n_pass) + 1)
        first, lines = pos // PAGE, pos % PAGE
        maps, sizes = (a.table, a.ring, a.owner, a.used), (a.n_layer, a.n_page, a.n_ring)
        for layer in range(tid, a.n_layer, n_thread):
            new = allocated(maps, layer, first, sizes)
            for page in range(first + 1, (pos + n_tok - 1) // PAGE + 1):
                allocated(maps, layer, page, sizes)
            if not new or lines == 0:
                continue
            stored, slot = layer * a.n_page + first, layer * a.n_ring + first % a.n_ring
            for h in range(a.n_head_kv):
                source, to = PAGE * (a.n_head_kv * stored + h), PAGE * (a.n_head_kv * slot + h)
                k_from, k_to = a.k_store + a.k_bytes * source, a.k_frames + a.k_bytes * to
                copy_bytes(k_from, k_to, 0, a.k_bytes * lines)
                v_from, v_to = a.v_store + a.v_bytes * source, a.v_frames + a.v_bytes * to
                copy_bytes(v_from, v_to, 0, a.v_bytes * lines)

    return kernel


def kv_write_back() -> Any:
    """Kernel of KV_WRITE_BACK: threads stride over layers."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        for layer in range(tid, a.n_layer, n_thread):
            for page in range(pos // PAGE, (pos + n_tok - 1) // PAGE + 1):
                first, end = max(0, pos - PAGE * page), min(PAGE, pos + n_tok - PAGE * page)
                stored, slot = layer * a.n_page + page, layer * a.n_ring + page % a.n_ring
                for h in range(a.n_head_kv):
                    to, source = PAGE * (a.n_head_kv * stored + h), PAGE * (a.n_head_kv * slot + h)
                    k_from, k_to = a.k_frames + a.k_bytes * source, a.k_store + a.k_bytes * to
                    copy_bytes(k_from, k_to, a.k_bytes * first, a.k_bytes * end)
                    v_from, v_to = a.v_frames + a.v_bytes * source, a.v_store + a.v_bytes * to
                    copy_bytes(v_from, v_to, a.v_bytes * first, a.v_bytes * end)

    return kernel


def kv_mark() -> Any:
    """Kernel of KV_MARK: threads stride over entries of the Selection."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        if n_tok == 0:
            return
        last = pos + a.stride * (n_tok - 1)
        low = max(0, pos - a.window + 1) if a.window != 0 else 0
        serial, n_rows = (
            load_i64(a.state + KV_STATE.serial),
            (n_tok + a.q_block - 1) // a.q_block * a.n_row,
        )
        for i in range(load_i32(a.indptr) + tid, load_i32(a.indptr + 4 * n_rows), n_thread):
            first = a.block * load_i32(a.indices + 4 * i)
            first, end = max(first, low), min(last, first + a.block - 1)
            for page in range(first // PAGE, end // PAGE + 1 if first <= end else 0):
                store_i32(a.marks + 4 * page, serial)

    return kernel


@njit
def rank_of(used, now, n_layer):
    """The eviction rank of a frame: the largest is evicted first, rank 0 never."""
    age = (now - used) & 0xFFFFFFFF
    if age == 0:
        return 0
    return min(age if age >= n_layer else n_layer - age, KV_RANKS - 1)


@njit
def take_frames(maps, sizes, n, now):
    """Assign frames to the n missing pages of a layer, evicting others."""
    table, owner, used, missing, counts = maps
    layer, n_layer, n_page, n_first, n_cache = sizes
    for r in range(KV_RANKS):
        store_i32(counts + 4 * r, 0)
    for i in range(n_cache):
        at = counts + 4 * rank_of(load_i32(used + 4 * i), now, n_layer)
        store_i32(at, load_i32(at) + 1)
    rank, left = KV_RANKS - 1, n
    while left > load_i32(counts + 4 * rank):
        left -= load_i32(counts + 4 * rank)
        rank -= 1
    done = 0
    for i in range(n_cache):
        found = rank_of(load_i32(used + 4 * i), now, n_layer)
        if found < rank or (found == rank and left == 0):
            continue
        left -= found == rank
        before, page = load_i32(owner + 4 * i), load_i32(missing + 4 * done)
        if before >= 0:
            store_i32(table + 4 * before, -1)
        store_i32(owner + 4 * i, n_page * layer + page)
        store_i32(used + 4 * i, now)
        store_i32(table + 4 * (n_page * layer + page), n_first + i)
        done += 1


def kv_evict(reader: str) -> Any:
    """Kernel of KV_EVICT, by one thread."""
    reads = KV_READERS[reader]
    marked, spans = reads is READS_SELECTION, njit(reads.spans)
    before, every = 8 * reads.first, 8 * reads.every

    @njit
    def bounds(found, n_found):
        """The least and the largest of the first n_found int64s; 0, 0 if there are none."""
        low = high = load_i64(found + before) if n_found > 0 else 0
        for i in range(1, n_found):
            value = load_i64(found + before + every * i)
            low, high = min(low, value), max(high, value)
        return low, high

    @njit
    def needed(marks, serial, ranges, page):
        if marked:
            return (load_i32(marks + 4 * page) - serial) & 0xFFFFFFFF == 0
        low, high, other, end = ranges
        first, last = PAGE * page, PAGE * page + PAGE
        return (low < last and first < high) or (other < last and first < end)

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        serial = load_i64(a.state + KV_STATE.serial)
        now = load_i64(a.state + KV_STATE.n_pass) * a.n_layer + a.layer
        low, high = bounds(a.found, a.n_found)
        ranges, hits, n = spans(low, high, a.block, a.x, a.y, n_tok, pos), 0, 0
        for page in range((pos + n_tok - 1) // PAGE + 1):
            if not needed(a.marks, serial, ranges, page):
                continue
            frame = load_i32(a.table + 4 * (a.n_page * a.layer + page))
            if frame < 0:
                store_i32(a.missing + 4 * n, page)
                n += 1
                continue
            hits += 1
            if frame >= a.n_first:
                store_i32(a.used + 4 * (frame - a.n_first), now)
        if n > 0:
            maps = a.table, a.owner, a.used, a.missing, a.counts
            take_frames(maps, (a.layer, a.n_layer, a.n_page, a.n_first, a.n_cache), n, now)
        store_i64(a.state + KV_STATE.serial, serial + 1)
        store_i64(a.state + KV_STATE.n_missing, n)
        store_i64(a.state + KV_STATE.n_hit, load_i64(a.state + KV_STATE.n_hit) + hits)
        store_i64(a.state + KV_STATE.n_miss, load_i64(a.state + KV_STATE.n_miss) + n)

    return kernel


def kv_fetch() -> Any:
    """Kernel of KV_FETCH: threads stride over pages."""

    def kernel(tid, n_thread, a):
        k_size, v_size = PAGE * a.n_head_kv * a.k_bytes, PAGE * a.n_head_kv * a.v_bytes
        for i in range(tid, load_i64(a.state + KV_STATE.n_missing), n_thread):
            stored = a.n_page * a.layer + load_i32(a.missing + 4 * i)
            frame = load_i32(a.table + 4 * stored)
            copy_bytes(a.k_store + k_size * stored, a.k_frames + k_size * frame, 0, k_size)
            copy_bytes(a.v_store + v_size * stored, a.v_frames + v_size * frame, 0, v_size)

    return kernel
