"""Slices of keys for attend_group: a union of the selections of some blocks of queries.

A slice has SLICE keys. A warp walks through the entries of all its blocks of queries at once. An
equal share of its lanes has a block's next entries, one each, while as many later ones are in
flight. Entries beyond the last one of some block are held back, as that block may have more of
them. Of the others, equal ones are one block of keys: those of the lowest lanes (`leads`) are the
batch, whose positions slices take in the order of the lanes. So keys are not in order, which
attention does not need.
"""

from typing import Any, NamedTuple

from numba import float32, int32, int64, uint32

from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E
from tamis.jit_kernels.cuda.attention.attend_mma import FAR
from tamis.jit_kernels.cuda.attention.tile_group import SLICE
from tamis.jit_kernels.cuda.lang.grid import WARP, WARPS, lane
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32, load_i32, quotient
from tamis.jit_kernels.cuda.lang.ptx import (
    ballot,
    count_bits,
    equal_lanes,
    load_shared_i32,
    lowest_of_warp,
    shuffle,
    shuffle_i32,
    store_shared_f32,
    store_shared_i32,
    sync_warp,
)

# how much of a slice a block of queries has; END: there is no slice
NOTHING, SOME, WHOLE, END = 0, 1, 2, 3
BEYOND = (1 << 31) - 1  # no entry

# Bytes of a list: a word for each block of queries, rows of keys, rows of values (-1: none), then
# the positions and the biases of each block of queries.
K_ROWS = 4 * WARPS
V_ROWS = K_ROWS + 4 * SLICE
ENTRIES = V_ROWS + 4 * SLICE


class Walk(NamedTuple):
    """A lane's state in a walk: its entry of the batch, and prefetched later entries."""

    first: Any  # the first entry of its block of queries in the batch
    end: Any  # of the entries of its block
    held: Any  # one of them, BEYOND if there is none
    coming: Any  # a later one, in flight
    taken: Any  # the number of its block's entries in the batch
    same: Any  # lanes with the same entry, one bit each
    leads: Any


class Keys(NamedTuple):
    """Addresses of the keys, and the range of positions that a warp's queries see."""

    low: Any  # the first position that a query sees
    high: Any  # and the last
    block: Any  # positions of a block of keys
    k_table: Any
    v_table: Any
    n_head_kv: Any
    head: Any  # KV head
    log_weight: Any  # biases of entries; 0: none


def size_of_list(n_block: int) -> int:
    """Bytes of a slice's list."""
    return ENTRIES + 8 * SLICE * n_block


@device
def lowest_bit(bits):
    """The index of the lowest set bit."""
    return count_bits(uint32((bits & -bits) - 1))


@device
def nth_bit(bits, n):
    """The index of the n-th set bit, n from 0 on."""
    at, left = int64(0), int64(n)
    for step in (16, 8, 4, 2, 1):
        here = int64(count_bits(uint32((int64(bits) >> at) & ((1 << step) - 1))))
        if left >= here:
            left -= here
            at += step
    return at


def walking(n_block: int) -> tuple[Any, Any]:
    """The functions that start a walk and that advance it to the next batch."""
    share = WARP // n_block
    assert share * n_block == WARP
    own = (1 << share) - 1

    @device
    def entry(indices, at, end):
        return int32(load_i32(indices + 4 * at) if at < end else BEYOND)

    @device
    def walk(indices, at, end):
        mine = at + lane() % share
        held, coming = entry(indices, mine, end), entry(indices, mine + share, end)
        return Walk(at, end, held, coming, int64(0), uint32(0), uint32(0))

    @device
    def batch(left, indices):
        k, start = lane() % share + left.taken, lane() // share * share
        early = shuffle_i32(left.held, uint32(start + min(k, share - 1)))
        late = shuffle_i32(left.coming, uint32(start + max(k - share, 0)))
        first, held = left.first + left.taken, early if k < share else late
        coming = entry(indices, first + share + lane() % share, left.end)
        last = held if lane() % share == share - 1 else int32(BEYOND)
        here = held <= lowest_of_warp(last) and held != BEYOND
        same = equal_lanes(held)
        leads = ballot(uint32(here and lowest_bit(int64(same)) == lane()))
        taken = int64(count_bits(uint32((int64(ballot(uint32(here))) >> start) & own)))
        return Walk(first, left.end, held, coming, taken, same, leads)

    return walk, batch


def _writing(n_block: int) -> Any:
    """The function that appends positions used .. used + m - 1 of a batch to a slice at n.

    Row entries hold positions until `_finding` replaces them; -1 where none is seen.
    """
    share = WARP // n_block
    own = (1 << share) - 1

    @device
    def write(to, n, m, used, left, keys):
        block, log_weight, bias = keys.block, keys.log_weight, float32(0)
        if log_weight != 0 and lane() % share < left.taken:
            bias = load_f32(log_weight + 4 * (left.first + lane() % share)) * float32(LOG2_E)
        for i in range(0, m, WARP):
            p, live = used + min(i + lane(), m - 1), i + lane() < m
            r = quotient(p, block)
            lead = nth_bit(left.leads, r)
            j = int64(shuffle_i32(left.held, uint32(lead))) * block + p - r * block
            alike = int64(uint32(shuffle_i32(int32(left.same), uint32(lead))))
            seen, at = keys.low <= j and j <= keys.high, to + 4 * (n + i + lane())
            if live:
                store_shared_i32(uint32(at + K_ROWS), int32(j if seen else -1))
            for b in range(n_block):
                mine, weight = (alike >> (share * b)) & own, float32(0)
                if log_weight != 0:
                    weight = shuffle(bias, uint32(share * b + lowest_bit(mine) % share))
                if live:
                    there = at + ENTRIES + 8 * SLICE * b
                    store_shared_i32(uint32(there), int32(j if seen and mine != 0 else FAR))
                    store_shared_f32(uint32(there + 4 * SLICE), weight)

    return write


def _judging(n_block: int) -> Any:
    """The function that returns whether this lane's block of queries sees any, and all, of m keys.

    "All" means that each of its queries sees each of them; seen: first and last visible position.
    """
    share = WARP // n_block
    own = (1 << share) - 1

    @device
    def judge(m, used, left, block, seen):
        low, high, start = quotient(used, block), quotient(used + m - 1, block), lane() // share
        lead = int64(1) << lowest_bit(int64(left.same))
        rank = int64(count_bits(uint32(int64(left.leads) & (lead - 1))))
        taken = int64(left.leads) & lead != 0 and low <= rank and rank <= high
        oldest = int64(lowest_of_warp(left.held if taken else int32(BEYOND))) * block
        newest = int64(-lowest_of_warp(int32(-left.held if taken else 0))) * block + block - 1
        if low == high:
            oldest, newest = oldest + used - low * block, oldest + used + m - 1 - low * block
        n = int64(count_bits(uint32((int64(ballot(uint32(taken))) >> (share * start)) & own)))
        return n > 0, n == high - low + 1 and seen[0] <= oldest and newest <= seen[1]

    return judge


def _finding() -> Any:
    """The function that replaces a list's positions by the rows of the pages."""
    assert SLICE == 2 * WARP

    @device
    def rows_of(j, keys):
        page, line = max(j, 0) // PAGE, max(j, 0) % PAGE
        k_row = (load_i32(keys.k_table + 4 * page) * keys.n_head_kv + keys.head) * PAGE + line
        v_row = (load_i32(keys.v_table + 4 * page) * keys.n_head_kv + keys.head) * PAGE + line
        return int32(k_row if j >= 0 else -1), int32(v_row if j >= 0 else -1)

    @device
    def find(to, keys):
        early = to + K_ROWS + 4 * lane()
        late = early + 4 * WARP
        one = rows_of(int64(load_shared_i32(uint32(early))), keys)  # both are in flight at once
        two = rows_of(int64(load_shared_i32(uint32(late))), keys)
        store_shared_i32(uint32(early), one[0])
        store_shared_i32(uint32(early + V_ROWS - K_ROWS), one[1])
        store_shared_i32(uint32(late), two[0])
        store_shared_i32(uint32(late + V_ROWS - K_ROWS), two[1])

    return find


def listing(n_block: int) -> tuple[Any, Any]:
    """The functions that begin a walk of n_block blocks of queries, and that list its next slice.

    The latter lists the slice at `to` if it is `owned`; used: positions of the batch that were
    taken. It returns the rest, how much of its batch is used, and the number of keys. seen: see
    _judging.
    """
    share, (walk, batch) = WARP // n_block, walking(n_block)
    write, judge, find = _writing(n_block), _judging(n_block), _finding()

    @device
    def fill(to, n):
        """Mark the keys from the n-th on as missing."""
        for i in range(n + lane(), SLICE, WARP):
            store_shared_i32(uint32(to + K_ROWS + 4 * i), int32(-1))
            for b in range(n_block):
                there = to + ENTRIES + 8 * SLICE * b + 4 * i
                store_shared_i32(uint32(there), int32(FAR))
                store_shared_f32(uint32(there + 4 * SLICE), float32(0))

    @device
    def note(to, left, used, indices, seen, keys, owned):
        block, n, some, whole = keys.block, int64(0), False, keys.log_weight == 0
        while n < SLICE:
            size = count_bits(left.leads) * block
            if used == size:
                left, used = batch(left, indices), int64(0)
                size = count_bits(left.leads) * block
                if size == 0:
                    break
            m = min(SLICE - n, size - used)
            if owned:
                write(to, n, m, used, left, keys)
                any_, all_ = judge(m, used, left, block, seen)
                some, whole = some or any_, whole and all_
            n, used = n + m, used + m
        if owned:
            fill(to, n)
            kind = NOTHING if not some else (WHOLE if whole and n == SLICE else SOME)
            if lane() % share == 0:
                store_shared_i32(uint32(to + 4 * (lane() // share)), int32(kind if n > 0 else END))
            sync_warp()
            find(to, keys)
            sync_warp()
        return left, used, n

    return walk, note
