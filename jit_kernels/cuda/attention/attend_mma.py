"""Attention of blocks of 16 query tokens on matrix units (Dao et al. 2023, arXiv 2307.08691).

A block of threads takes 16 tokens of up to eight heads, a row of a Selection or part of one. Slices
of KEYS rows of K and V at any positions are copied to shared memory while the previous slice is
multiplied; each warp has one head's 16 tokens and a share of every slice's keys. Queries and
weights are float16, sums float32. A slice's list holds the positions, biases and addresses of its
keys.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E, finishing, key_of, part_of
from tamis.jit_kernels.cuda.attention.tile_attend import Tile, tile_of
from tamis.jit_kernels.cuda.kv.kv_rows import pieces_of, row_bytes, storing_pieces
from tamis.jit_kernels.cuda.lang.grid import THREADS, WARPS, Launch, lane, sync_block, thread, warp
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32, load_i32, load_i64
from tamis.jit_kernels.cuda.lang.ptx import (
    copy_async,
    copy_commit,
    copy_wait,
    load_shared_i32,
    load_shared_i64,
    shared_address,
    store_shared_f32,
    store_shared_i32,
    store_shared_i64,
)
from tamis.jit_kernels.cuda.lang.scratch import heads_of

KEYS = 64  # of a slice
FAR = 1 << 30  # the position of a missing key: after every query
POSITION, BIAS, K_ADDRESS, V_ADDRESS, LIST = 0, 4 * KEYS, 8 * KEYS, 16 * KEYS, 24 * KEYS
N_LIST = 3

wait_for_copies = copy_wait(0)


class Layout(NamedTuple):
    """Bytes in shared memory: a row, a slice of K and V, the offset of the lists, all of it."""

    row: int
    slice: int
    lists: int
    size: int


def layout_of(head_dim: int) -> Layout:
    """The layout.

    Row strides are 16 bytes off a multiple of 128, so that eight rows do not conflict.
    """
    row = 2 * head_dim + 16
    slice_ = 2 * KEYS * row
    return Layout(row, slice_, 2 * slice_, 2 * slice_ + N_LIST * LIST)


def _listing(head_dim: int, kv_types: tuple[str, str]) -> Any:
    """The function that lists the slice of keys from p on, one a thread 0 .. KEYS - 1."""
    k_bytes, v_bytes = (row_bytes(type, head_dim) for type in kv_types)
    always = kv_types != ("f16", "f16")  # rows of bytes are always read, even if they are not used

    @device
    def note(at, keys, pages, p):
        if thread() >= KEYS:
            return
        k_pages, v_pages, k_table, v_table, n_head_kv, h, log_weight = pages
        j, s = key_of(p + thread(), keys)
        page, line = max(j, 0) // PAGE, max(j, 0) % PAGE
        k_row = (load_i32(k_table + 4 * page) * n_head_kv + h) * PAGE + line
        v_row = (load_i32(v_table + 4 * page) * n_head_kv + h) * PAGE + line
        if always:
            k_row, v_row = max(k_row, 0), max(v_row, 0)
        bias = load_f32(log_weight + 4 * s) if log_weight != 0 and j >= 0 else float32(0)
        i = thread()
        store_shared_i32(uint32(at + POSITION + 4 * i), j if j >= 0 else FAR)
        store_shared_f32(uint32(at + BIAS + 4 * i), bias * float32(LOG2_E))
        store_shared_i64(uint32(at + K_ADDRESS + 8 * i), k_pages + k_bytes * k_row)
        store_shared_i64(uint32(at + V_ADDRESS + 8 * i), v_pages + v_bytes * v_row)

    return note


def _fetcher(head_dim: int, type: str, row: int) -> Any:
    """The function that fetches a list's keys, or values, to rows `row` bytes apart.

    addresses: of the listed rows. Float16 rows are copied asynchronously; missing keys are zeros.
    """
    pieces = head_dim // 8
    assert THREADS == 4 * KEYS

    @device
    def start_copy(to, at, addresses):
        for i in range(thread(), KEYS * pieces, THREADS):
            key, piece = i // pieces, i % pieces
            size = 16 if load_shared_i32(uint32(at + POSITION + 4 * key)) != FAR else 0
            source = load_shared_i64(uint32(addresses + 8 * key))
            copy_async(uint32(to + row * key + 16 * piece), source + 16 * piece, uint32(size))

    if type == "f16":
        return start_copy
    load, halves = pieces_of(type, head_dim)
    store = storing_pieces(head_dim // 32, 128)

    @device
    def decode(to, at, addresses):
        # Of eight threads that write together, four have a key and four the fourth after it, to use
        # all banks.
        t = thread() % 4
        key = thread() // 32 * 8 + thread() // 8 % 4 + thread() // 4 % 2 * 4
        live = load_shared_i32(uint32(at + POSITION + 4 * key)) != FAR
        loaded = load(load_shared_i64(uint32(addresses + 8 * key)), 8 * t, uint32(live))
        first = to + row * key + 16 * t
        store(halves(loaded, 8 * t), uint32(first), uint32(first + 64))

    return decode


def _copying(head_dim: int, row: int, kv_types: tuple[str, str]) -> Any:
    """The function that copies a list's K and V (float16: asynchronously)."""
    fetch_k, fetch_v = (_fetcher(head_dim, type, row) for type in kv_types)

    @device
    def copy(to, at):
        fetch_k(to, at, at + K_ADDRESS)
        fetch_v(to + KEYS * row, at, at + V_ADDRESS)
        copy_commit()

    return copy


def _shares(heads: int) -> tuple[int, int]:
    """How many warps share a head's keys, and how many keys of a slice each has."""
    n_share = 1
    while 2 * n_share * heads <= WARPS and KEYS // n_share > 16:
        n_share *= 2
    return n_share, KEYS // n_share


def _adding(layout: Layout, tile: Tile, n_keys: int) -> Any:
    """The function that accumulates a warp's share of a slice: row_max, row_sum, sums."""
    row_bytes, half = layout.row, KEYS * layout.row
    score, mask, highest, weights = tile.score, tile.mask, tile.highest, tile.weights
    row_sums, weigh, scaled = tile.row_sums, tile.weigh, tile.scaled
    exp2_of, plus, times = tile.exp2_of, tile.plus, tile.times

    @device
    def add(state, q, at, list_, first, limits):
        row_max, row_sum, sums = state
        # Registers of load_matrices: see tile_attend.
        k_lane = at + row_bytes * (first + lane() % 8 + lane() // 16 * 8) + lane() // 8 % 2 * 16
        v_lane = at + half + row_bytes * (first + lane() % 16) + lane() // 16 * 16
        entry = list_ + 4 * (first + 2 * (lane() % 4))
        s = score(q, uint32(k_lane))
        s = mask(s, uint32(entry + POSITION), uint32(entry + BIAS), limits)
        new = highest(s, row_max)
        alpha = exp2_of(row_max, new)
        w = weights(s, new)
        row_sum = plus(times(row_sum, alpha), row_sums(w))
        return new, row_sum, weigh(scaled(sums, alpha), w, uint32(v_lane))

    return add


def attend_many(head_dim: int, group: int, q_block: int, kv_types: tuple[str, str]) -> Launch:
    """The kernel of ATTEND for rows of q_block = 16 query tokens: blocks stride over rows."""
    assert q_block == 16
    heads = heads_of(group)  # of an item
    n_pass = group // heads
    layout, (n_share, n_keys) = layout_of(head_dim), _shares(heads)
    tile = tile_of(head_dim, n_keys, layout.row)
    note, copy = _listing(head_dim, kv_types), _copying(head_dim, layout.row, kv_types)
    add = _adding(layout, tile, n_keys)
    load_q, store, store_two, over_quad = tile.load_q, tile.store, tile.store_two, tile.over_quad
    lowest, none, zero = tile.lowest, tile.none, tile.zero
    size = 4 * head_dim + 8
    finish = finishing(head_dim, heads, q_block, n_share)
    slice_bytes, list_at = layout.slice, layout.lists
    assert n_share * heads * q_block * size <= list_at

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        shared, n_head = shared_address(cuda.shared.array(0, uint8)), a.n_row * group
        n_item = (n_tok + q_block - 1) // q_block * a.n_row * n_pass * a.n_split
        for nth in range(tid, n_item, n_thread):
            item = n_item - 1 - nth  # the longest rows first
            split, pass_ = (item % a.n_split, a.n_split), item // a.n_split % n_pass
            row = item // a.n_split // n_pass
            head, tok = row % a.n_row * group + heads * pass_, row // a.n_row * q_block
            n_live = min(n_tok - tok, q_block)
            high = pos + a.stride * (tok + n_live - 1)
            low = max(0, pos + a.stride * tok - a.window + 1) if a.window != 0 else 0
            blocks = (low // a.block, high // a.block + 1)
            begin, end = part_of(a.indptr + 4 * row, a.indices, blocks, split)
            keys = begin, (end - begin) * a.block, a.indices, a.block, low, high
            pages = (a.k_pages, a.v_pages, a.k_table, a.v_table, a.n_head_kv,
                     head // a.heads_per_kv, a.log_weight)  # fmt: skip
            share, mine = warp() // heads, warp() % heads
            # This lane's rows of the tile are tokens lane / 4 and 8 more.
            early = pos + a.stride * (tok + lane() // 4)
            limits = early, a.window if a.window != 0 else FAR, 8 * a.stride
            query = n_head * tok + head
            at_q = (load_i64(a.step + STEP.row) + a.stride * tok) * n_head + head + mine
            at = a.q + 4 * head_dim * at_q + 8 * (lane() % 4)
            apart = 4 * head_dim * n_head * a.stride
            rows = (
                at + apart * min(lane() // 4, n_live - 1),
                at + apart * min(lane() // 4 + 8, n_live - 1),
            )
            values = load_q(rows[0], rows[1], a.scale * float32(LOG2_E))
            state = lowest(), none(), zero()
            n_slice = ((end - begin) * a.block + KEYS - 1) // KEYS
            lists = shared + list_at
            note(lists, keys, pages, 0)
            note(lists + LIST, keys, pages, KEYS)
            sync_block()
            copy(shared, lists)
            for i in range(n_slice):
                wait_for_copies()
                sync_block()
                copy(shared + (i + 1) % 2 * slice_bytes, lists + (i + 1) % N_LIST * LIST)
                note(lists + (i + 2) % N_LIST * LIST, keys, pages, (i + 2) * KEYS)
                if share < n_share:
                    there, list_ = shared + i % 2 * slice_bytes, lists + i % N_LIST * LIST
                    state = add(state, values, there, list_, share * n_keys, limits)
            wait_for_copies()
            sync_block()
            if share < n_share:
                row_max, row_sum, sums = state
                to = shared + size * ((share * heads + mine) * q_block + lane() // 4)
                store(sums, uint32(to + 8 * (lane() % 4)))
                row_sum = over_quad(row_sum)
                if lane() % 4 == 0:
                    store_two(row_max, uint32(to + 4 * head_dim))
                    store_two(row_sum, uint32(to + 4 * head_dim + 4))
            sync_block()
            finish(a, shared, n_live, query, n_head, (*split, a.n_split), 0)
            sync_block()  # before the next item's copies overwrite what is read here

    return Launch(kernel, blocks=1 if head_dim > 64 else 2, shared=layout.size)
