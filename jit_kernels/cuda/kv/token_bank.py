"""Ops of the token bank: begin a pass, look units up, fetch them from the host's memory.

A block owns a KV head's slots while it looks units up. Missing units are read over the link once,
in pieces of 16 bytes a lane, directly to where attention reads them.
"""

from typing import Any

from numba import cuda, int32, int64

from tamis.jit_kernels.contract.ops import BANK_GROUP, BANK_STATE, KV_OLD, STEP
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.lang.grid import (
    WARP,
    WARPS,
    Launch,
    lane,
    look_ahead,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_i32,
    load_i64,
    load_u128,
    quotient,
    remainder,
    store_i32,
    store_i64,
    store_u128,
)
from tamis.jit_kernels.cuda.lang.ptx import add_i64, exchange_i32

MANY = 1024  # threads that look units up
TAKEN = -2  # marks a unit for which a thread is finding a slot


def bank_begin() -> list[Launch]:
    """Kernel of BANK_BEGIN, a single block: only after a truncation are there units to drop."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        end = load_i64(a.state + BANK_STATE.n_written)
        for i in range(thread(), a.n_layer * a.n_head_kv if pos < end else 0, MANY):
            slots, h = a.slots + 4 * a.n_unit * i, remainder(i, a.n_head_kv)
            for u in range(quotient(pos, a.unit), quotient(end - 1, a.unit) + 1):
                slot = load_i32(slots + 4 * u)
                if slot >= 0:
                    store_i32(slots + 4 * u, -1)
                    store_i32(a.owner + 4 * (a.n_slot * h + slot), -1)
                    store_i32(a.used + 4 * (a.n_slot * h + slot), -KV_OLD)
        sync_block()  # all threads have read what is now written
        if thread() == 0:
            store_i64(a.state + BANK_STATE.n_written, pos + n_tok)
            store_i64(a.row_step + STEP.n_tok, n_tok)
            store_i64(a.row_step + STEP.pos, (a.n_slot - 1) * a.unit + remainder(pos, a.unit))

    return [Launch(kernel, threads=MANY)]


@device
def rank_of(used, now, n_layer):
    """The eviction rank of a slot: the largest is evicted first, rank 0 never."""
    age = (now - used) & 0xFFFFFFFF
    rank = age if age >= n_layer else n_layer - age
    return rank if age != 0 else 0


@device
def take_slot(maps, sizes, h, unit, now, counts):
    """Assign a slot of head h to a unit of a layer, evicting another one. counts[0]: the hand."""
    slots, owner, used = maps
    layer, n_layer, n_head_kv, n_unit, n_slot = sizes
    own, stamps = owner + 4 * n_slot * h, used + 4 * n_slot * h
    n_group, slot = quotient(n_slot - 1, BANK_GROUP), int64(-1)
    while slot < 0:
        first = BANK_GROUP * remainder(cuda.atomic.add(counts, 0, 1), n_group)  # type: ignore[call-arg]
        best, at = int64(0), int64(0)
        for i in range(BANK_GROUP):
            rank = rank_of(load_i32(stamps + 4 * (first + i)), now, n_layer)
            if rank > best:
                best, at = rank, first + i
        # Another thread may try the same group: the first one to stamp the slot gets it.
        if best > 0 and int64(exchange_i32(stamps + 4 * at, int32(now))) != int64(int32(now)):
            slot = at
    before = load_i32(own + 4 * slot)
    if before >= 0:
        its_layer, its_unit = quotient(before, n_unit), remainder(before, n_unit)
        store_i32(slots + 4 * (n_unit * (its_layer * n_head_kv + h) + its_unit), -1)
    store_i32(own + 4 * slot, n_unit * layer + unit)
    store_i32(slots + 4 * (n_unit * (layer * n_head_kv + h) + unit), slot)


def bank_lookup() -> list[Launch]:
    """Kernel of BANK_LOOKUP: blocks stride over KV heads.

    The assignment of slots is not deterministic.
    """

    def kernel(tid, n_thread, a):
        counts = cuda.shared.array(4, int32)  # the hand, missing units, and units that were found
        pos, now = load_i64(a.step + STEP.pos), load_i64(a.state + BANK_STATE.serial)
        newest, top = quotient(pos, a.unit), a.n_slot - 1
        maps, sizes = (
            (a.slots, a.owner, a.used),
            (a.layer, a.n_layer, a.n_head_kv, a.n_unit, a.n_slot),
        )
        rows = quotient(a.n_row, a.n_head_kv)
        for h in range(tid, a.n_head_kv, n_thread):
            slots = a.slots + 4 * a.n_unit * (a.layer * a.n_head_kv + h)
            stamps, missing = a.used + 4 * a.n_slot * h, a.missing + 4 * a.n_unit * h
            if thread() < 3:
                counts[thread()] = int32(load_i64(a.hands + 8 * h) if thread() == 0 else 0)
            first = load_i32(a.indptr + 4 * rows * h)
            last, hits = load_i32(a.indptr + 4 * rows * (h + 1)), int32(0)
            sync_block()
            for i in range(first + thread(), last, MANY):
                start = load_i32(a.indices + 4 * i) * a.block
                unit = quotient(start, a.unit)
                slot = load_i32(slots + 4 * unit) if unit < newest else top
                if slot >= 0:
                    row = slot * a.unit + start - unit * a.unit
                    store_i32(a.rows + 4 * i, quotient(row, a.block))
                if slot >= 0 and slot != top:
                    before = exchange_i32(stamps + 4 * slot, int32(now))
                    hits += int32(1 if before != int32(now) else 0)
                elif slot < 0 and exchange_i32(slots + 4 * unit, int32(TAKEN)) == int32(-1):
                    to: Any = cuda.atomic.add(counts, 1, 1)  # type: ignore[call-arg]
                    store_i32(missing + 4 * to, unit)
            if hits > 0:
                cuda.atomic.add(counts, 2, hits)  # type: ignore[call-arg]
            sync_block()
            n = int64(counts[1])
            if n > 0:
                for i in range(thread(), n, MANY):
                    take_slot(maps, sizes, h, load_i32(missing + 4 * i), now, counts)
                sync_block()
                for i in range(first + thread(), last, MANY):
                    start = load_i32(a.indices + 4 * i) * a.block
                    unit = quotient(start, a.unit)
                    slot = load_i32(slots + 4 * unit) if unit < newest else top
                    row = slot * a.unit + start - unit * a.unit
                    store_i32(a.rows + 4 * i, quotient(row, a.block))
            if thread() == 0:
                n_group = quotient(a.n_slot - 1, BANK_GROUP)
                store_i64(a.hands + 8 * h, remainder(int64(counts[0]), n_group))
                store_i64(a.n_missing + 8 * h, n)
                add_i64(a.state + BANK_STATE.n_miss, n)
                add_i64(a.state + BANK_STATE.n_hit, int64(counts[2]))
            sync_block()  # before the next head's counts

    return [Launch(kernel, threads=MANY, start=look_ahead)]


@device
def line_at(n_head_kv, h, line):
    """The row of position `line` of head h in pages that are in order."""
    return (line // PAGE * n_head_kv + h) * PAGE + line % PAGE


@device
def copy_part(source, to, n, whole):
    """Copy n bytes, rounded up to what a lane takes; a warp's work. whole: bytes of a unit."""
    if whole % 16 == 0:  # then units begin at multiples of 16
        for i in range(lane(), (n + 15) // 16, WARP):
            store_u128(to + 16 * i, load_u128(source + 16 * i))
    else:
        for i in range(lane(), (n + 3) // 4, WARP):
            store_i32(to + 4 * i, load_i32(source + 4 * i))


def bank_fetch() -> list[Launch]:
    """Kernel of BANK_FETCH: warps stride over units' rows of K and V."""

    def kernel(tid, n_thread, a):
        pos, n_head_kv = load_i64(a.step + STEP.pos), a.n_head_kv
        home = a.n_page * n_head_kv * PAGE * a.layer
        newest = quotient(pos, a.unit) * a.unit
        for h in range(remainder(tid, n_head_kv), n_head_kv, n_thread):
            # Blocks of threads share a head's units; other heads have other blocks.
            n_block = max(1, quotient(n_thread + n_head_kv - 1 - h, n_head_kv))
            item, n_warp = quotient(tid, n_head_kv) + n_block * warp(), n_block * WARPS
            slots = a.slots + 4 * a.n_unit * (a.layer * n_head_kv + h)
            n = load_i64(a.n_missing + 8 * h)
            while item < 2 * (n + 1):
                if item >= 2 * n:
                    slot, n_line = a.n_slot - 1, pos - newest + 1
                    frame = load_i32(a.table + 4 * (newest // PAGE))
                    row = (frame * n_head_kv + h) * PAGE + newest % PAGE
                    keys, values = a.k_frames, a.v_frames
                else:
                    unit = load_i32(a.missing + 4 * (a.n_unit * h + item // 2))
                    slot, n_line = load_i32(slots + 4 * unit), a.unit
                    row = home + line_at(n_head_kv, h, unit * a.unit)
                    keys, values = a.k_store, a.v_store
                to = line_at(n_head_kv, h, slot * a.unit)
                if item % 2 == 0:
                    size = a.k_bytes
                    copy_part(keys + size * row, a.k_bank + size * to, size * n_line, size * a.unit)
                else:
                    size = a.v_bytes
                    copy_part(
                        values + size * row, a.v_bank + size * to, size * n_line, size * a.unit
                    )
                item += n_warp
        if tid == 0 and thread() == 0:
            store_i64(a.state + BANK_STATE.serial, load_i64(a.state + BANK_STATE.serial) + 1)

    return [Launch(kernel, start=look_ahead)]
