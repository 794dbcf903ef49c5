"""Attention of blocks of 16 query tokens by warpgroups (Shah et al. 2024, arXiv 2407.08608).

Eight warps each have 16 tokens of one head: the heads of a row of a Selection (eight or fewer of
many) and, if these are few, of the next blocks of queries, too. Four more warps copy slices of K
and V to shared memory, each to its own stage: the union of the rows' selections (key_slices.py).
Each slice has a list of positions and biases for each row, and states whether a row has all of it,
some or nothing. Queries and weights are float16, sums float32. While one warpgroup does its
softmax, the other multiplies.
"""

import math
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.attention.attend_epilogue import LN_2, LOG2_E, part_of
from tamis.jit_kernels.cuda.attention.attend_mma import FAR
from tamis.jit_kernels.cuda.attention.key_slices import (
    END,
    ENTRIES,
    K_ROWS,
    NOTHING,
    SOME,
    V_ROWS,
    WHOLE,
    Keys,
    listing,
    size_of_list,
)
from tamis.jit_kernels.cuda.attention.tile_attend import tile_of
from tamis.jit_kernels.cuda.attention.tile_group import (
    PART,
    SLICE,
    parts_of,
    place,
    scoring,
    storing,
    weighing,
)
from tamis.jit_kernels.cuda.kv.kv_rows import pieces_of, row_bytes, storing_pieces
from tamis.jit_kernels.cuda.lang.grid import WARP, WARPS, Launch, lane, sync_block, thread, warp
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_i64,
    store_f32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    barrier_arrive,
    barrier_arrive_copied,
    barrier_ended,
    barrier_init,
    copy_async,
    fence_async,
    load_shared_i32,
    shared_address,
    sync_warpgroup,
)
from tamis.jit_kernels.cuda.lang.scratch import heads_of

STAGES = 4  # slices in shared memory


class Layout(NamedTuple):
    """Bytes in shared memory: of a slice and its list; offsets of queries, lists and barriers."""

    slice: int
    list: int
    queries: int
    lists: int
    full: int
    free: int
    size: int


def layout_of(head_dim: int, n_block: int) -> Layout:
    """The layout for n_block blocks of queries."""
    slice_, list_ = 2 * parts_of(head_dim) * PART, size_of_list(n_block)
    lists = STAGES * slice_ + 2 * parts_of(head_dim) * PART
    full = lists + STAGES * list_
    free = full + 8 * STAGES
    return Layout(slice_, list_, STAGES * slice_, lists, full, free, free + 8 * STAGES + 1024)


@device
def wait_for(barrier, phase):
    """Wait for the phase of a barrier that the n-th use of its stage completes."""
    while barrier_ended(uint32(barrier), uint32(phase & 1)) == 0:
        pass


def _starting(head_dim: int, kv_types: tuple[str, str]) -> Any:
    """The function that starts the copies of a list's rows of float16; a warp's work.

    Eight lanes copy a row, part by part; missing rows are zeros.
    """
    n_part = parts_of(head_dim)
    half, pieces = n_part * PART, head_dim // 8
    of_keys, of_values = (type == "f16" for type in kv_types)

    @device
    def start(to, list_, k_pages, v_pages):
        line, piece = lane() // 8, lane() % 8
        even, odd = to + place(line, piece), to + place(line + 4, piece) - 512
        k_pages, v_pages = k_pages + 16 * piece, v_pages + 16 * piece
        for i in range(SLICE // 4):
            at = list_ + 4 * (4 * i + line)
            k_row = load_shared_i32(uint32(at + K_ROWS))
            v_row = load_shared_i32(uint32(at + V_ROWS))
            key = k_pages + 2 * head_dim * int64(max(k_row, 0))
            value = v_pages + 2 * head_dim * int64(max(v_row, 0))
            here = (odd if i % 2 else even) + 512 * i
            for part in range(n_part):
                live = k_row >= 0 and 8 * part + piece < pieces
                size, there = uint32(16 if live else 0), here + PART * part
                if of_keys:
                    copy_async(uint32(there), key + (128 * part if live else 0), size)
                if of_values:
                    copy_async(uint32(there + half), value + (128 * part if live else 0), size)

    return start


def _decoding(head_dim: int, type: str) -> tuple[Any, Any]:
    """The functions that read half of a list's rows of a quantised type and write them to a slice.

    A warp's work: four lanes take a row, each of them four rows at once. Of eight lanes that write
    together, four have a row and four the fourth after it: their pieces lie in all banks.
    """
    size, n_piece = row_bytes(type, head_dim), head_dim // 32
    load, halves = pieces_of(type, head_dim)
    store = storing_pieces(n_piece, PART)

    @device
    def line_of(half):
        return SLICE // 2 * half + lane() // 8 + lane() // 4 % 2 * 4

    @device
    def read_row(rows, pages, line):
        row = load_shared_i32(uint32(rows + 4 * line))
        return load(pages + size * int64(max(row, 0)), 8 * (lane() % 4), uint32(row >= 0))

    @device
    def write_row(loaded, to, line):
        t = lane() % 4
        store(halves(loaded, 8 * t), uint32(to + place(line, t)), uint32(to + place(line, t + 4)))

    @device
    def read(rows, pages, half):
        line = line_of(half)
        one, two = read_row(rows, pages, line), read_row(rows, pages, line + 8)
        return one, two, read_row(rows, pages, line + 16), read_row(rows, pages, line + 24)

    @device
    def write(loaded, to, half):
        line = line_of(half)
        write_row(loaded[0], to, line)
        write_row(loaded[1], to, line + 8)
        write_row(loaded[2], to, line + 16)
        write_row(loaded[3], to, line + 24)

    return read, write


def _copying(head_dim: int, kv_types: tuple[str, str]) -> Any:
    """The function that copies a list's K and V (float16: asynchronously), by one warp.

    While one half of the rows of a quantised type is written, the next is in flight.
    """
    half, start = parts_of(head_dim) * PART, _starting(head_dim, kv_types)
    if kv_types == ("f16", "f16"):
        return start
    if "f16" in kv_types:
        of_keys = kv_types[1] == "f16"
        own, first_row, far = (
            (kv_types[0], K_ROWS, 0) if of_keys else (kv_types[1], V_ROWS, half)
        )  # fmt: skip
        read, write = _decoding(head_dim, own)

        @device
        def copy_one(to, list_, k_pages, v_pages):
            start(to, list_, k_pages, v_pages)
            rows, pages = list_ + first_row, k_pages if of_keys else v_pages
            early, late = read(rows, pages, 0), read(rows, pages, 1)
            write(early, to + far, 0)
            write(late, to + far, 1)
            fence_async()

        return copy_one
    (read_k, write_k), (read_v, write_v) = (_decoding(head_dim, type) for type in kv_types)

    @device
    def copy(to, list_, k_pages, v_pages):
        keys, more_keys = (
            read_k(list_ + K_ROWS, k_pages, 0), read_k(list_ + K_ROWS, k_pages, 1),
        )  # fmt: skip
        write_k(keys, to, 0)
        values = read_v(list_ + V_ROWS, v_pages, 0)
        write_k(more_keys, to, 1)
        more_values = read_v(list_ + V_ROWS, v_pages, 1)
        write_v(values, to + half, 0)
        write_v(more_values, to + half, 1)
        fence_async()

    return copy


def _adding(head_dim: int, tile: Any) -> Any:
    """The function that accumulates a slice into a warp's row_max, row_sum and sums."""
    score, weigh, half = scoring(head_dim), weighing(head_dim), parts_of(head_dim) * PART
    mask, highest, weights, row_sums = tile.mask, tile.highest, tile.weights, tile.row_sums
    scaled, exp2_of, plus, times = tile.scaled, tile.exp2_of, tile.plus, tile.times

    @device
    def add(state, q, at, entries, kind, limits):
        row_max, row_sum, sums = state
        s = score(q, at)
        if kind != WHOLE:
            s = mask(s, uint32(entries), uint32(entries + 4 * SLICE), limits)
        new = highest(s, row_max)
        alpha = exp2_of(row_max, new)
        w = weights(s, new)
        row_sum = plus(times(row_sum, alpha), row_sums(w))
        return new, row_sum, weigh(scaled(sums, alpha), w, at + half)

    return add


def _writing(head_dim: int, tile: Any) -> Any:
    """The function that writes a lane's n rows to out; first: index of the first one there."""
    write, scaled, over_quad = tile.write, tile.scaled, tile.over_quad

    @device
    def put(a, state, first, n, apart, split):
        (row_max, row_sum, sums), (part, n_split), t = state, split, lane() % 4
        row_sum = over_quad(row_sum)
        if n_split > 1:
            row = 4 * (head_dim + 2)
            to = a.partial + row * (first * n_split + part)
            write(sums, to + 8 * t, to + row * apart * n_split + 8 * t, uint32(n))
        else:
            one = float32(1) / row_sum[0] if row_sum[0] > 0 else float32(0)
            other = float32(1) / row_sum[1] if row_sum[1] > 0 else float32(0)
            to = a.out + 4 * head_dim * first + 8 * t
            write(scaled(sums, (one, other)), to, to + 4 * head_dim * apart, uint32(n))
        for i in range(n if t == 0 else 0):
            to, whole = first + i * apart, row_sum[1] if i else row_sum[0]
            high = (row_max[1] if i else row_max[0]) * float32(LN_2)
            if n_split > 1:
                there = a.partial + 4 * (head_dim + 2) * (to * n_split + part) + 4 * head_dim
                store_f32(there, high)
                store_f32(there + 4, whole)
            elif a.lse != 0:
                store_f32(a.lse + 4 * to, high + math.log(whole) if whole > 0 else high)

    return put


def _taking(heads: int, layout: Layout, add: Any, tile: Any) -> Any:
    """The function take: a consumer warp's attention over the slices that producers copy."""
    n_block, lowest, none, zero = WARPS // heads, tile.lowest, tile.none, tile.zero
    lists, full, free = layout.lists, layout.full, layout.free
    slice_bytes, list_bytes = layout.slice, layout.list

    @device
    def take(shared, use, q, limits):
        """Attend to all slices of a row; return the number of stages used."""
        state, kind = (lowest(), none(), zero()), int32(SOME)
        mine = min(warp() // heads, n_block - 1)
        first = min(warp() // 4 * 4 // heads, n_block - 1)
        last = min((warp() // 4 * 4 + 3) // heads, n_block - 1)
        while kind != END:
            stage = use % STAGES
            wait_for(shared + full + 8 * stage, use // STAGES)
            fence_async()
            list_, needed = shared + lists + list_bytes * stage, int32(NOTHING)
            kind = load_shared_i32(uint32(list_ + 4 * mine))
            for b in range(first, last + 1):
                needed |= load_shared_i32(uint32(list_ + 4 * b))
            if needed != NOTHING and kind != END:
                entries = list_ + ENTRIES + 8 * SLICE * mine + 8 * (lane() % 4)
                state = add(state, q, shared + slice_bytes * stage, entries, kind, limits)
            barrier_arrive(uint32(shared + free + 8 * stage))
            use += 1
        return state, use

    return take


def attend_group(head_dim: int, group: int, q_block: int, kv_types: tuple[str, str]) -> Launch:
    """The kernel of ATTEND for rows of q_block = 16 query tokens: blocks stride over rows."""
    assert q_block == 16
    heads = heads_of(group)  # of an item
    n_pass = group // heads
    n_block = WARPS // heads  # of queries
    layout, tile = layout_of(head_dim, n_block), tile_of(head_dim, SLICE, 0)
    (walk, note), copy = listing(n_block), _copying(head_dim, kv_types)
    put, take = (
        _writing(head_dim, tile), _taking(heads, layout, _adding(head_dim, tile), tile),
    )  # fmt: skip
    load_q = tile.load_q
    store_q, tile_bytes = storing(head_dim), parts_of(head_dim) * PART
    lists, full, free = layout.lists, layout.full, layout.free
    slice_bytes, list_bytes = layout.slice, layout.list

    @device
    def tokens(pair, b, n_tok):
        """The b-th block of queries: its first token and number of tokens."""
        tok = q_block * (pair * n_block + b)
        return tok, max(0, min(n_tok - tok, q_block))

    @device
    def fetch(shared, use, place_, rows, pages, range_):
        """The producer: lists and copies the keys that a row's blocks of queries selected.

        Returns the stages used.
        """
        (pair, h, n_row, split), (indptr, indices, block, log_weight) = place_, rows
        (k_pages, v_pages, k_table, v_table, n_head_kv, h_kv) = pages
        n_tok, pos, stride, window = range_
        tok, n_live = tokens(pair, lane() // (WARP // n_block), n_tok)
        early, late = pos + stride * tok, pos + stride * (tok + n_live - 1)
        low = max(0, early - window + 1) if window != 0 else 0
        at, end = int64(0), int64(0)
        if n_live > 0:
            row = tok // q_block * n_row + h
            at, end = part_of(indptr + 4 * row, indices, (low // block, late // block + 1), split)
        seen = max(0, late - window + 1) if window != 0 else 0, early
        first, _ = tokens(pair, 0, n_tok)
        lowest_seen = max(0, pos + stride * first - window + 1) if window != 0 else 0
        last = pos + stride * (min(n_tok, first + q_block * n_block) - 1)
        keys = Keys(lowest_seen, last, block, k_table, v_table, n_head_kv, h_kv, log_weight)
        left, used, n = walk(indices, at, end), int64(0), int64(1)
        while n > 0:
            stage = use % STAGES
            owned = stage == warp() - WARPS
            if owned and use >= STAGES:
                wait_for(shared + free + 8 * stage, use // STAGES - 1)
            list_ = shared + lists + list_bytes * stage
            left, used, n = note(list_, left, used, indices, seen, keys, owned)
            if owned:
                if n > 0:
                    copy(shared + slice_bytes * stage, list_, k_pages, v_pages)
                barrier_arrive_copied(uint32(shared + full + 8 * stage))
                barrier_arrive(uint32(shared + full + 8 * stage))
            use += 1
        return use

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        # Warpgroups see rows by their address: a slice begins at a multiple of 1024.
        shared = (int64(shared_address(cuda.shared.array(0, uint8))) + 1023) & ~1023
        if thread() < STAGES:
            barrier_init(uint32(shared + full + 8 * thread()), uint32(2 * WARP))
            barrier_init(uint32(shared + free + 8 * thread()), uint32(WARPS * WARP))
        sync_block()
        n_head, use = a.n_row * group, int64(0)
        n_pair = (n_tok + q_block * n_block - 1) // (q_block * n_block)
        n_item = n_pair * a.n_row * n_pass * a.n_split
        for nth in range(tid, n_item, n_thread):
            item = n_item - 1 - nth  # the longest rows first
            split, pass_ = (item % a.n_split, a.n_split), item // a.n_split % n_pass
            row = item // a.n_split // n_pass
            h, pair = row % a.n_row, row // a.n_row
            if warp() >= WARPS:
                pages = (a.k_pages, a.v_pages, a.k_table, a.v_table, a.n_head_kv,
                         h * group // a.heads_per_kv)  # fmt: skip
                selection = a.indptr, a.indices, a.block, a.log_weight
                seen = n_tok, pos, a.stride, a.window
                use = fetch(shared, use, (pair, h, a.n_row, split), selection, pages, seen)
                continue
            # This lane's rows are tokens lane / 4 and lane / 4 + 8 of a head.
            tok, n_live = tokens(pair, min(warp() // heads, n_block - 1), n_tok)
            head, mine = h * group + heads * pass_ + warp() % heads, lane() // 4
            # A row without a token reads token 0's.
            first = a.stride * tok if n_live > 0 else 0 * tok
            at_q = (load_i64(a.step + STEP.row) + first) * n_head + head
            at = a.q + 4 * head_dim * at_q + 8 * (lane() % 4)
            apart = 4 * head_dim * n_head * a.stride
            newest = max(n_live - 1, 0)
            values = load_q(
                at + apart * min(mine, newest),
                at + apart * min(mine + 8, newest),
                a.scale * float32(LOG2_E),
            )
            limits = pos + a.stride * (tok + mine), a.window if a.window != 0 else FAR, 8 * a.stride
            queries = shared + layout.queries + tile_bytes * (warp() // 4)
            sync_warpgroup(uint32(warp() // 4))  # all warps have read the previous ones
            at = uint32(queries + 2048 * (warp() % 4))
            store_q(values, at, uint32(mine), uint32(lane() % 4))
            fence_async()
            sync_warpgroup(uint32(warp() // 4))
            state, use = take(shared, use, queries, limits)
            n = min(2, max(0, (n_live - mine + 7) // 8)) if warp() < heads * n_block else 0
            first = n_head * (tok + mine) + head
            put(a, state, first, n, 8 * n_head, split)

    return Launch(kernel, shared=layout.size, threads=WARP * (WARPS + STAGES))
