"""Attention of one query token per row: every key and value is read once, directly to registers.

A warp multiplies 16 keys at any positions with up to eight heads on tensor cores (tile_few.py) and
keeps a running maximum and sum (Dao et al. 2022, arXiv 2205.14135, Alg. 1). The block merges its
warps; the last block to finish a row merges the row's split-KV parts. Weights are relative to 2^-14
of the largest, so that small ones keep all their bits in float16.
"""

from typing import Any

from numba import cuda, float32, int32, int64, uint8, uint32

from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.attention.attend_epilogue import (
    LOG2_E,
    LOWEST,
    MASKED,
    entries_of,
    finishing,
    joining,
    key_of,
    share_of,
)
from tamis.jit_kernels.cuda.attention.tile_bytes import scoring_of, weighing_of
from tamis.jit_kernels.cuda.attention.tile_few import KEYS
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    WARPS,
    Launch,
    is_last,
    lane,
    look_ahead,
    step_of,
    sync_block,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_i32,
    quotient,
    remainder,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    ballot,
    exp2,
    keep,
    shared_address,
    shuffle,
    shuffle_i32,
    shuffle_xor,
    store_shared_f32,
)
from tamis.jit_kernels.cuda.lang.scratch import COUNTERS, FEW_ROW, heads_of

F16 = ("f16", "f16")
UP = 14.0  # powers of two by which weights are scaled up
STRIDE = WARPS * KEYS  # keys that a block of threads processes at a time


@device
def find(keys, pages, p):
    """The addresses of key p's K row and V row (-1: no such key), and its score's bias."""
    k_table, v_table, n_head_kv, h, log_weight = pages
    j, s = key_of(p, keys)
    if j < 0:
        return int32(-1), int32(-1), float32(MASKED)
    page, line = j // PAGE, j % PAGE
    k_row = (load_i32(k_table + 4 * page) * n_head_kv + h) * PAGE + line
    v_row = (load_i32(v_table + 4 * page) * n_head_kv + h) * PAGE + line
    bias = load_f32(log_weight + 4 * s) * float32(LOG2_E) if log_weight != 0 else float32(0)
    return int32(k_row), int32(v_row), bias


@device
def find_some(keys, pages, p):
    """The addresses of find, with the newest key in place of none: then reads are finite."""
    k_table, v_table, n_head_kv, h, log_weight = pages
    j, s = key_of(p, keys)
    here, bias = j if j >= 0 else keys[5], float32(0 if j >= 0 else MASKED)
    if j >= 0 and log_weight != 0:
        bias = load_f32(log_weight + 4 * s) * float32(LOG2_E)
    k_row, v_row = key_row(k_table, n_head_kv, h, here), key_row(v_table, n_head_kv, h, here)
    return int32(k_row), int32(v_row), bias


@device
def n_part_of(n, block, n_split, out):
    """How many split-KV parts a row of n entries has: at most one for every STRIDE keys.

    out 0: always n_split, as another kernel merges them.
    """
    return n_split if out == 0 else min(n_split, max(1, quotient(n * block + STRIDE - 1, STRIDE)))


@device
def most_parts(high, a):
    """The most split-KV parts of a row whose queries see keys up to position high."""
    if a.out == 0:
        return a.n_split
    return min(a.n_split, quotient(high + a.block + STRIDE - 1, STRIDE))


@device
def over_quad(x):
    """The sum over the four lanes of a query."""
    x += shuffle_xor(x, 1)
    return x + shuffle_xor(x, 2)


@device
def highest(scores, row_max):
    """The maximum of a query's scores and of row_max, over its four lanes."""
    row_max = max(max(max(scores[0], scores[1]), max(scores[2], scores[3])), row_max)
    row_max = max(row_max, shuffle_xor(row_max, 1))
    return max(row_max, shuffle_xor(row_max, 2))


@device
def weights_of(scores, row_max):
    """2^(score - row_max)."""
    return (
        exp2(scores[0] - row_max),
        exp2(scores[1] - row_max),
        exp2(scores[2] - row_max),
        exp2(scores[3] - row_max),
    )


def _scaling_where_needed(scaled: Any) -> Any:
    """Wrap `scaled`: skips the rescaling where no query of the warp has a new maximum."""

    @device
    def scale(sums, alpha):
        if ballot(uint32(alpha != float32(1))) != uint32(0):
            return scaled(sums, alpha)
        return sums

    return scale


def _adding(head_dim: int, kv_types: tuple[str, str]) -> tuple[Any, Any]:
    """Functions load and add: accumulate 16 keys into row_max, row_sum and sums.

    Lane i has `found` key i. The K fragment of a lane (g, t) has keys g and g + 8, the V fragment
    keys 2t, 2t + 1, 2t + 8 and 2t + 9.
    """
    scoring, weighing = scoring_of(head_dim, kv_types[0]), weighing_of(head_dim, kv_types[1])
    k_bytes, v_bytes = (row_bytes(type, head_dim) for type in kv_types)
    all_there = kv_types != F16  # see find_some
    load_k, score = scoring.load_key, scoring.score
    load_v, weigh = weighing.load_value, weighing.weigh
    scaled = _scaling_where_needed(weighing.scaled) if all_there else weighing.scaled

    @device
    def load_key(pages, n_piece, k_row, i):
        row, live = shuffle_i32(k_row, i), uint32(n_piece)
        at = pages + k_bytes * (uint32(row) if all_there else max(row, 0))
        return load_k(at, 8 * (lane() % 4), live if all_there or row >= 0 else uint32(0))

    @device
    def load_value(pages, n_piece, v_row, i):
        row, live = shuffle_i32(v_row, i), uint32(n_piece)
        at = pages + v_bytes * (uint32(row) if all_there else max(row, 0))
        return load_v(at, 8 * (lane() // 4), live if all_there or row >= 0 else uint32(0))

    @device
    def load(at, found):
        k_at, v_at, n_k, n_v = at
        g, t = lane() // 4, 2 * (lane() % 4)
        keys = load_key(k_at, n_k, found[0], g), load_key(k_at, n_k, found[0], g + 8)
        values = (
            load_value(v_at, n_v, found[1], t), load_value(v_at, n_v, found[1], t + 1),
            load_value(v_at, n_v, found[1], t + 8), load_value(v_at, n_v, found[1], t + 9),
        )  # fmt: skip
        biases = (
            shuffle(found[2], t), shuffle(found[2], t + 1), shuffle(found[2], t + 8),
            shuffle(found[2], t + 9),
        )  # fmt: skip
        return keys, values, biases

    @device
    def add(state, q, loaded):
        (row_max, row_sum, sums), (keys, v, bias) = state, loaded
        s = score(q, keys[0], keys[1])
        s = s[0] + bias[0], s[1] + bias[1], s[2] + bias[2], s[3] + bias[3]
        new = highest(s, row_max)
        alpha = exp2(row_max - new)
        w = weights_of(s, new - float32(UP))
        row_sum = row_sum * alpha + ((w[0] + w[1]) + (w[2] + w[3]))
        return new, row_sum, weigh(scaled(sums, alpha), w, v[0], v[1], v[2], v[3])

    return load, add


def attend_few(head_dim: int, group: int, kv_types: tuple[str, str], packs: bool = False) -> Launch:
    """The kernel of ATTEND for rows of one query token: blocks stride over parts of rows.

    packs: the kernel of ATTEND_PACK instead.
    """
    assert head_dim % 16 == 0
    heads = heads_of(group)  # of an item
    size, n_pass = head_dim + 2, group // heads
    scoring, weighing = scoring_of(head_dim, kv_types[0]), weighing_of(head_dim, kv_types[1])
    read_q, load_q, tail = scoring.read_q, scoring.load_q, scoring.n_piece - 1
    store, zero = weighing.store, weighing.zero
    load, add = _adding(head_dim, kv_types)
    all_there, whole = kv_types != F16, head_dim % 64 == 0
    look = find_some if all_there else find
    ahead = "f16" not in kv_types and head_dim <= 128  # loaded pieces have room twice
    finish, join = finishing(head_dim, heads, 1, WARPS, packs), joining(head_dim, packs)

    @device
    def place_of(item, n_row, n_split):
        """Decode a work item: its split-KV part, row, token and first head."""
        part, pass_ = remainder(item, n_split), quotient(item, n_split)
        row, pass_ = pass_ // n_pass, pass_ % n_pass
        return part, row, quotient(row, n_row), remainder(row, n_row) * group + heads * pass_

    @device
    def seen_by(pos, stride, tok, window):
        """The first and the last position that a token's queries may read."""
        high = pos + stride * tok
        return max(0, high - window + 1) if window != 0 else 0, high

    @device
    def span_of(indptr, indices, block, seen, part, n_split, out):
        """A part's entries of a row's Selection, and how many parts the row has."""
        blocks = quotient(seen[0], block), quotient(seen[1], block) + 1
        begin, end = entries_of(indptr, indices, blocks)
        n_part = n_part_of(end - begin, block, n_split, out)
        if part >= n_part:
            return end, end, n_part
        begin, end = share_of(begin, end, (part, n_part))
        return begin, end, n_part

    def start(tid, n_thread, a):
        """The prologue: looks up a block's first keys, unless the previous kernel writes them."""
        n_tok, pos, _ = step_of(a.step)
        most = most_parts(pos + a.stride * (n_tok - 1), a)
        if a.early == 0 or tid >= n_tok * a.n_row * n_pass * most:
            return 0, 0, 0, int32(0), int32(0), float32(0)
        part, row, tok, head = place_of(tid, a.n_row, most)
        seen = seen_by(pos, a.stride, tok, a.window)
        begin, end, n_part = span_of(
            a.indptr + 4 * row, a.indices, a.block, seen, part, a.n_split, a.out
        )
        keys = begin, (end - begin) * a.block, a.indices, a.block, *seen
        pages = a.k_table, a.v_table, a.n_head_kv, quotient(head, a.heads_per_kv), a.log_weight
        k_row, v_row, bias = look(keys, pages, KEYS * warp() + lane() % KEYS)
        return keep(begin), keep(end), keep(n_part), int32(keep(k_row)), int32(keep(v_row)), bias

    @device
    def work(tid, n_thread, a, packed, early, handed):
        n_tok, pos, skip = step_of(a.step)
        shared = shared_address(cuda.shared.array(0, uint8))
        n_head, g, t = a.n_row * group, lane() // 4, lane() % 4
        # A lane's pieces of a key, of a value and of a query's sums, and the position of the first.
        n_k = (head_dim - 8 * t + 31) // 32
        n_v, n_sum = (head_dim - 8 * g + 63) // 64, (head_dim - 16 * t + 63) // 64
        if all_there:  # then rows have a multiple of 32 elements
            n_k, n_v = int64(head_dim // 32), int64(head_dim // 64) if whole else n_v
        at = a.k_pages, a.v_pages, max(n_k, 0), max(n_v, 0)
        item, most = tid - n_thread, most_parts(pos + a.stride * (n_tok - 1), a)
        while item + n_thread < n_tok * a.n_row * n_pass * most:  # a range divides by its step
            item += n_thread
            part, row, tok, head = place_of(item, a.n_row, most)
            seen, query = seen_by(pos, a.stride, tok, a.window), n_head * tok + head
            n = head_dim * n_head
            at_row = packed + FEW_ROW.size * (n >> 2) * tok if packed != 0 else 0
            packed_row = at_row, n, n_head * tok
            at_q = (skip + a.stride * tok) * n_head + head
            mine = a.q + 4 * head_dim * (at_q + min(g, heads - 1))
            last = mine + 4 * min(8 * t + 32 * tail, head_dim - 8)
            x = read_q(mine + 32 * t, last)  # in flight while the keys are looked up
            looked_up = early != 0 and item == tid
            if looked_up:
                begin, end, n_part = handed[0], handed[1], handed[2]
            else:
                begin, end, n_part = span_of(
                    a.indptr + 4 * row, a.indices, a.block, seen, part, a.n_split, a.out
                )
            if part >= n_part:
                continue
            keys = begin, (end - begin) * a.block, a.indices, a.block, *seen
            pages = a.k_table, a.v_table, a.n_head_kv, quotient(head, a.heads_per_kv), a.log_weight
            state = float32(LOWEST), float32(0), zero()
            first = KEYS * warp() + lane() % KEYS
            found = handed[3], handed[4], handed[5]
            if not looked_up:
                found = look(keys, pages, first)
            values = load_q(x, a.scale * float32(LOG2_E))
            if ahead:
                loaded = load(at, found)
                found = look(keys, pages, first + STRIDE)
                for _ in range(KEYS * warp(), (end - begin) * a.block, 2 * STRIDE):
                    other, first = load(at, found), first + 2 * STRIDE
                    found = look(keys, pages, first)
                    state = add(state, values, loaded)
                    loaded = load(at, found)
                    found = look(keys, pages, first + STRIDE)
                    state = add(state, values, other)
            else:
                for start in range(KEYS * warp(), (end - begin) * a.block, STRIDE):
                    loaded = load(at, found)
                    found = look(keys, pages, start + STRIDE + lane() % KEYS)
                    state = add(state, values, loaded)
            row_max, row_sum, sums = state
            row_sum = over_quad(row_sum)
            to = shared + 4 * size * (heads * warp() + g)
            if g < heads:
                store(sums, uint32(to + 64 * t), uint32(max(n_sum, 0)))
                if t == 0:
                    store_shared_f32(uint32(to + 4 * head_dim), row_max - float32(UP))
                    store_shared_f32(uint32(to + 4 * head_dim + 4), row_sum)
            sync_block()
            finish(a, shared, 1, query, n_head, (part, n_part, a.n_split), packed_row)
            if n_part > 1 and a.out != 0:
                # A row of one query has a counter: n_tok is 1, heads are few.
                counter = a.scratch - COUNTERS + 4 * quotient(item, most)
                if is_last(counter, n_part):
                    join(query, heads, a.partial, (n_part, a.n_split), a.out, a.lse, packed_row)
            sync_block()  # before the next item's results overwrite what is read here

    n_byte = 4 * WARPS * heads * size
    if packs:

        def pack(tid, n_thread, a, handed):
            work(tid, n_thread, a, a.packed, a.early, handed)

        return Launch(pack, shared=n_byte, start=start, hands_on=True)

    def kernel(tid, n_thread, a):
        work(tid, n_thread, a, 0, 0, (0, 0, 0, int32(0), int32(0), float32(0)))

    return Launch(kernel, shared=n_byte, start=look_ahead)
