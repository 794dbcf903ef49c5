"""Ops of the token bank: begin a pass, look units up, fetch them from a store or a file."""

from typing import Any

from llvmlite import ir
from numba import njit

from tamis.jit_kernels.contract.ops import (
    BANK_AHEAD,
    BANK_BUFFER,
    BANK_GROUP,
    BANK_STATE,
    KV_OLD,
    STEP,
)
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cpu.kv.checksum import summing
from tamis.jit_kernels.cpu.kv.page_cache import copy_bytes
from tamis.jit_kernels.cpu.lang.intrinsic import (
    I8,
    I32,
    I64,
    atomic_add,
    atomic_load,
    atomic_store,
    call,
    int64,
    load_i32,
    load_i64,
    load_u16,
    load_u32,
    lowest_bit,
    op,
    pointer,
    stack_bytes,
    store_i16,
    store_i32,
    store_i64,
)

WILLNEED = 3  # POSIX_FADV_WILLNEED
NOWAIT = 8  # RWF_NOWAIT
AT_ONCE = 32  # units that a thread takes at a time
GAP = 1 << 12  # bytes between two missing units: reading them takes less time than a call


@op(int64, int64, int64, int64, int64)
def pread(b, handle, to, n, at):
    """Read n bytes of a file from byte `at` on; returns how many were read, -1 on an error."""
    return call(b, "pread64", I64, [b.trunc(handle, I32), pointer(b, to, I8), n, at])


@op(int64, int64, int64, int64, int64)
def preadv(b, handle, piece, at, flags):
    """Read a piece (its address and its bytes) from byte `at` on; returns its bytes, or -1."""
    one = ir.Constant(I32, 1)
    values = [b.trunc(handle, I32), pointer(b, piece, I8), one, at, b.trunc(flags, I32)]
    return call(b, "preadv2", I64, values)


@op(int64, int64, int64, int64)
def will_need(b, handle, at, n):
    """Prefetch n bytes of a file from byte `at` on."""
    advice = ir.Constant(I32, WILLNEED)
    return b.sext(call(b, "posix_fadvise64", I32, [b.trunc(handle, I32), at, n, advice]), I64)


def bank_begin() -> Any:
    """Kernel of BANK_BEGIN, by one thread: only after a truncation are there units to drop."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        end = load_i64(a.state + BANK_STATE.n_written)
        for h in range(a.n_head_kv if pos < end else 0):
            for layer in range(a.n_layer):
                slots = a.slots + 4 * a.n_unit * (layer * a.n_head_kv + h)
                for u in range(pos // a.unit, (end - 1) // a.unit + 1):
                    slot = load_i32(slots + 4 * u)
                    if slot >= 0:
                        store_i32(slots + 4 * u, -1)
                        store_i32(a.owner + 4 * (a.n_slot * h + slot), -1)
                        store_i32(a.used + 4 * (a.n_slot * h + slot), -KV_OLD)
        store_i64(a.state + BANK_STATE.n_written, pos + n_tok)
        store_i64(a.row_step + STEP.n_tok, n_tok)
        store_i64(a.row_step + STEP.pos, (a.n_slot - 1) * a.unit + pos % a.unit)

    return kernel


@njit
def rank_of(used, now, n_layer):
    """The eviction rank of a slot: the largest is evicted first, rank 0 never."""
    age = (now - used) & 0xFFFFFFFF
    if age == 0:
        return 0
    return age if age >= n_layer else n_layer - age


@njit
def take_slot(maps, sizes, h, unit, now):
    """Assign a slot of head h to a unit of a layer, evicting another one; returns the slot."""
    slots, owner, used, hands = maps
    layer, n_layer, n_head_kv, n_unit, n_slot = sizes
    own, stamps = owner + 4 * n_slot * h, used + 4 * n_slot * h
    n_group, hand = (n_slot - 1) // BANK_GROUP, load_i64(hands + 8 * h)
    best, slot = 0, 0
    while best == 0:  # a call reads fewer units than there are slots
        for i in range(BANK_GROUP * hand, BANK_GROUP * (hand + 1)):
            rank = rank_of(load_i32(stamps + 4 * i), now, n_layer)
            if rank > best:
                best, slot = rank, i
        hand = hand + 1 if hand + 1 < n_group else 0
    store_i64(hands + 8 * h, hand)
    before = load_i32(own + 4 * slot)
    if before >= 0:
        its_layer, its_unit = before // n_unit, before % n_unit
        store_i32(slots + 4 * (n_unit * (its_layer * n_head_kv + h) + its_unit), -1)
    store_i32(own + 4 * slot, n_unit * layer + unit)
    store_i32(stamps + 4 * slot, now)
    store_i32(slots + 4 * (n_unit * (layer * n_head_kv + h) + unit), slot)
    return slot


@njit
def sort_units(units, n):
    """Sort the n units of several rows, each of which is sorted (Shell's method)."""
    gap = 1
    while 3 * gap < n:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, n):
            unit, to = load_i32(units + 4 * i), i
            while to >= gap and load_i32(units + 4 * (to - gap)) > unit:
                store_i32(units + 4 * to, load_i32(units + 4 * (to - gap)))
                to -= gap
            store_i32(units + 4 * to, unit)
        gap //= 3


def bank_lookup() -> Any:
    """Kernel of BANK_LOOKUP: threads stride over KV heads."""

    def kernel(tid, n_thread, a):
        pos, now = load_i64(a.step + STEP.pos), load_i64(a.state + BANK_STATE.serial)
        newest, top, unit_bits = pos // a.unit, a.n_slot - 1, lowest_bit(a.unit)
        block_bits = lowest_bit(a.block)  # both are powers of two: divisors of PAGE
        maps = a.slots, a.owner, a.used, a.hands
        sizes = a.layer, a.n_layer, a.n_head_kv, a.n_unit, a.n_slot
        rows = a.n_row // a.n_head_kv
        for h in range(tid, a.n_head_kv, n_thread):
            slots = a.slots + 4 * a.n_unit * (a.layer * a.n_head_kv + h)
            stamps, missing = a.used + 4 * a.n_slot * h, a.missing + 4 * a.n_unit * h
            n_missing, n_hit = 0, 0
            first = load_i32(a.indptr + 4 * rows * h)
            last = load_i32(a.indptr + 4 * rows * (h + 1))
            for i in range(first, last):  # first pass: before any is evicted
                unit = load_i32(a.indices + 4 * i) << block_bits >> unit_bits
                slot = load_i32(slots + 4 * unit) if unit < newest else -1
                if slot >= 0 and load_i32(stamps + 4 * slot) != now:
                    store_i32(stamps + 4 * slot, now)
                    n_hit += 1
            for i in range(first, last):
                start = load_i32(a.indices + 4 * i) << block_bits
                unit = start >> unit_bits
                slot = top if unit >= newest else load_i32(slots + 4 * unit)
                if slot < 0:
                    slot = take_slot(maps, sizes, h, unit, now)
                    store_i32(missing + 4 * n_missing, unit)
                    n_missing += 1
                row = (slot << unit_bits) + (start & (a.unit - 1))
                store_i32(a.rows + 4 * i, row >> block_bits)
            if rows > 1:
                sort_units(missing, n_missing)
            store_i64(a.n_missing + 8 * h, n_missing)
            atomic_add(a.state + BANK_STATE.n_hit, n_hit)
            atomic_add(a.state + BANK_STATE.n_miss, n_missing)

    return kernel


@njit
def line_at(n_head_kv, h, line):
    """The row of position `line` of head h in pages that are in order."""
    return (line // PAGE * n_head_kv + h) * PAGE + line % PAGE


@njit
def copy_unit(rows, frames, banks, sizes, n_line):
    """Copy the first n_line rows of a unit, of keys and of values, to the bank.

    rows: the index of the first row among keys, among values, and in the bank.
    """
    (k_row, v_row, to), (k, v), (k_bank, v_bank), (k_bytes, v_bytes) = rows, frames, banks, sizes
    copy_rows(k + k_bytes * k_row, k_bank + k_bytes * to, k_bytes * n_line)
    copy_rows(v + v_bytes * v_row, v_bank + v_bytes * to, v_bytes * n_line)


@njit
def copy_rows(source, to, n):
    """Copy n bytes, a multiple of 2."""
    if n % 16 == 0:
        copy_bytes(source, to, 0, n)
    else:
        for i in range(0, n, 2):
            store_i16(to + i, load_u16(source + i))


def bank_fetch() -> Any:
    """Kernel of BANK_FETCH: threads stride over the units of each head."""

    def kernel(tid, n_thread, a):
        pos, n_head_kv = load_i64(a.step + STEP.pos), a.n_head_kv
        banks, sizes = (a.k_bank, a.v_bank), (a.k_bytes, a.v_bytes)
        home = a.n_page * n_head_kv * PAGE * a.layer
        for h in range(n_head_kv):
            slots = a.slots + 4 * a.n_unit * (a.layer * n_head_kv + h)
            for i in range(tid, load_i64(a.n_missing + 8 * h), n_thread):
                unit = load_i32(a.missing + 4 * (a.n_unit * h + i))
                to = line_at(n_head_kv, h, load_i32(slots + 4 * unit) * a.unit)
                row = home + line_at(n_head_kv, h, unit * a.unit)
                copy_unit((row, row, to), (a.k_store, a.v_store), banks, sizes, a.unit)
        for h in range(tid, n_head_kv, n_thread):
            first, to = pos // a.unit * a.unit, line_at(n_head_kv, h, (a.n_slot - 1) * a.unit)
            frame = load_i32(a.table + 4 * (pos // PAGE))
            row = (frame * n_head_kv + h) * PAGE + first % PAGE
            copy_unit((row, row, to), (a.k_frames, a.v_frames), banks, sizes, pos - first + 1)
        if tid == 0:
            store_i64(a.state + BANK_STATE.serial, load_i64(a.state + BANK_STATE.serial) + 1)

    return kernel


@njit
def file_unit_of(shape, layer, h, position):
    """The number of the file's unit that contains a position of a head."""
    n_page, n_head_kv, file_unit = shape
    page = layer * n_page + position // PAGE
    return (page * n_head_kv + h) * (PAGE // file_unit) + position % PAGE // file_unit


@njit
def run_of(missing, units, i, last, size):
    """The run of file units from missing unit i on: their first and last, and the next i."""
    shape, layer, h, unit, dirty = units
    start = load_i32(missing + 4 * i) * unit
    first = file_unit_of(shape, layer, h, start)
    end = file_unit_of(shape, layer, h, start + unit - 1)
    i += 1
    while i < last:
        start = load_i32(missing + 4 * i) * unit
        if start < 0 or start >= dirty:
            break
        one = file_unit_of(shape, layer, h, start)
        if one < end or (one - end - 1) * size > GAP:
            break
        other = file_unit_of(shape, layer, h, start + unit - 1)
        if (other - first + 1) * size > BANK_BUFFER:
            break
        end = other
        i += 1
    return first, end, i


@njit
def read_bytes(handle, at, buffer, n):
    """Read n bytes; returns whether all were read."""
    done = 0
    while done < n:
        got = pread(handle, buffer + done, n - done, at + done)
        if got <= 0:
            return False
        done += got
    return True


@njit
def read_cached(handle, at, buffer, n):
    """Read n bytes if the system has cached them; returns whether all were read."""
    piece = stack_bytes(16)
    store_i64(piece, buffer)
    store_i64(piece + 8, n)
    return preadv(handle, piece, at, NOWAIT) == n


@njit
def read_ahead(a, row, side, dirty):
    """Prefetch the units of the next call's Selection that the bank lacks.

    row: of the Selection; side: the offset of keys, or of values, in the file, and bytes of one.
    """
    (start, n_byte), ahead, shape = side, a.ahead, (a.n_page, a.n_head_kv, a.file_unit)
    layer, block = load_i64(ahead + BANK_AHEAD.layer), load_i64(ahead + BANK_AHEAD.block)
    indptr, indices = load_i64(ahead + BANK_AHEAD.indptr), load_i64(ahead + BANK_AHEAD.indices)
    h = row * a.n_head_kv // load_i64(ahead + BANK_AHEAD.n_row)
    slots = a.slots + 4 * a.n_unit * (layer * a.n_head_kv + h)
    size, before, behind = a.file_unit * n_byte, 0, -1
    for i in range(load_i32(indptr + 4 * row), load_i32(indptr + 4 * (row + 1))):
        position = load_i32(indices + 4 * i) * block
        if position >= dirty or load_i32(slots + 4 * (position // a.unit)) >= 0:
            continue
        one = file_unit_of(shape, layer, h, position)
        if before <= one <= behind + 1 and behind >= 0:
            behind = max(behind, one)
            continue
        if behind >= 0:
            will_need(a.handle, start + before * size, (behind - before + 1) * size)
        before = behind = one
    if behind >= 0:
        will_need(a.handle, start + before * size, (behind - before + 1) * size)


def bank_read() -> Any:
    """Kernel of BANK_READ: threads stride over runs of the units of each head."""
    sum_of = summing()

    @njit
    def copy_read(side, asked, run, buffer):
        """Copy the missing units of a run from the buffer; returns whether all are intact."""
        _, _, sums, _, _, bank, row = side
        missing, slots, (shape, layer, h, unit, _) = asked
        n_head_kv, file_unit, (first, _, i, following) = shape[1], shape[2], run
        size, good, checked = file_unit * row, True, first
        while i < following:
            position = load_i32(missing + 4 * i) * unit
            one = file_unit_of(shape, layer, h, position)
            end = file_unit_of(shape, layer, h, position + unit - 1) + 1
            for n in range(max(one, checked), end):
                if sum_of(buffer + size * (n - first), size) != load_u32(sums + 4 * n):
                    good = False
            checked = end
            slot = load_i32(slots + 4 * (position // unit))
            to = bank + row * line_at(n_head_kv, h, slot * unit)
            source = buffer + size * (one - first) + row * (position % file_unit)
            copy_rows(source, to, row * unit)
            i += 1
        return good

    @njit
    def read_side(side, asked, run, wait, buffer, state):
        """Read and copy a run of keys, or of values; returns whether it was read."""
        handle, start, _, _, _, _, row = side
        (_, _, units), (first, end, _, _) = asked, run
        size = units[0][2] * row
        at, n = start + first * size, (end - first + 1) * size
        came = read_bytes(handle, at, buffer, n) if wait else read_cached(handle, at, buffer, n)
        good = copy_read(side, asked, run, buffer) if came else not wait
        if not good:
            atomic_add(state + BANK_STATE.n_bad, 1)
        if came:
            atomic_add(state + BANK_STATE.n_read, n)
        elif not wait:
            will_need(handle, at, n)
        return came

    @njit
    def copy_written(side, asked, i):
        """Copy missing unit i, of the page that is being written, from its frame to the bank."""
        _, _, _, frames, table, bank, row = side
        missing, slots, ((_, n_head_kv, _), _, h, unit, _) = asked
        position = load_i32(missing + 4 * i) * unit
        slot = load_i32(slots + 4 * (position // unit))
        to = bank + row * line_at(n_head_kv, h, slot * unit)
        frame = load_i32(table + 4 * (position // PAGE))
        source = (frame * n_head_kv + h) * PAGE + position % PAGE
        copy_rows(frames + row * source, to, row * unit)

    @njit
    def read_units(sides, asked, part, wait, buffer, state):
        """Read the missing units of a part, of both sides; returns whether all were read."""
        (keys, values), (missing, _, units), (i, last), all_came = sides, asked, part, True
        size, dirty = units[0][2] * max(keys[6], values[6]), units[4]
        while i < last:
            following, came = i + 1, True
            unit = load_i32(missing + 4 * i)
            if unit * units[3] >= dirty:
                copy_written(keys, asked, i)
                copy_written(values, asked, i)
            elif unit >= 0:
                first, end, following = run_of(missing, units, i, last, size)
                run = first, end, i, following
                came = read_side(keys, asked, run, wait, buffer, state)
                other = read_side(values, asked, run, wait, buffer, state)
                came = came and other
            for n in range(i, following if came else i):
                store_i32(missing + 4 * n, -1)
            all_came, i = all_came and came, following
        return all_came

    @njit
    def read_missing(a, tid, n_thread, sides, dirty, wait):
        """Read this thread's parts of the missing units; returns whether all were read."""
        shape, all_came, turn = (a.n_page, a.n_head_kv, a.file_unit), True, 0
        buffer = a.buffers + BANK_BUFFER * tid
        for h in range(a.n_head_kv):
            slots = a.slots + 4 * a.n_unit * (a.layer * a.n_head_kv + h)
            missing, n = a.missing + 4 * a.n_unit * h, load_i64(a.n_missing + 8 * h)
            asked = missing, slots, (shape, a.layer, h, a.unit, dirty)
            for first in range(0, n, AT_ONCE):
                part, turn = (first, min(n, first + AT_ONCE)), turn + 1
                if turn % n_thread == tid:
                    came = read_units(sides, asked, part, wait, buffer, a.state)
                    all_came = all_came and came
        return all_came

    def kernel(tid, n_thread, a):
        pos, n_head_kv = load_i64(a.step + STEP.pos), a.n_head_kv
        now, dirty = load_i64(a.state + BANK_STATE.serial), pos // PAGE * PAGE
        keys = a.handle, a.k_start, a.k_sums, a.k_frames, a.k_table, a.k_bank, a.k_bytes
        values = a.handle, a.v_start, a.v_sums, a.v_frames, a.v_table, a.v_bank, a.v_bytes
        cached = read_missing(a, tid, n_thread, (keys, values), dirty, False)
        if not cached:
            atomic_store(a.state + BANK_STATE.waited, now)
        if load_i64(a.ahead + BANK_AHEAD.indptr) != 0:
            lately = now - atomic_load(a.state + BANK_STATE.waited) <= a.n_layer
            n_row = load_i64(a.ahead + BANK_AHEAD.n_row)
            for i in range(tid, 2 * n_row if lately else 0, n_thread):
                side = (a.v_start, a.v_bytes) if i % 2 else (a.k_start, a.k_bytes)
                read_ahead(a, i // 2, side, dirty)
        if not cached:
            read_missing(a, tid, n_thread, (keys, values), dirty, True)
        for h in range(tid, n_head_kv, n_thread):
            first, to = pos // a.unit * a.unit, line_at(n_head_kv, h, (a.n_slot - 1) * a.unit)
            line, page = first % PAGE, 4 * (pos // PAGE)
            k_row = (load_i32(a.k_table + page) * n_head_kv + h) * PAGE + line
            v_row = (load_i32(a.v_table + page) * n_head_kv + h) * PAGE + line
            frames, banks = (a.k_frames, a.v_frames), (a.k_bank, a.v_bank)
            copy_unit((k_row, v_row, to), frames, banks, (a.k_bytes, a.v_bytes), pos - first + 1)
        if tid == 0:
            store_i64(a.state + BANK_STATE.serial, now + 1)

    return kernel
