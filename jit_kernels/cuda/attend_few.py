"""Attention of one query token a row: every key and value is read once.

A key's head_dim elements lie in a few neighbouring lanes, eight each, so a warp has several keys at
a time; each such group of lanes keeps maxima and sums of its own (Dao et al. 2022, arXiv
2205.14135, Alg. 1), which are joined at the end.
"""

from typing import Any

from numba import cuda, float32, uint8, uint32

from tamis.jit_kernels.cuda.attend_ends import LOG2_E, LOWEST, MASKED, finishing, key_of, part_of
from tamis.jit_kernels.cuda.grid import WARP, WARPS, Launch, lane, sync_block, warp
from tamis.jit_kernels.cuda.intrinsic import device, halves_f32, load_f32, load_i32, load_i64
from tamis.jit_kernels.cuda.ptx import load_if, shared_address
from tamis.jit_kernels.cuda.tile import heads_of, lanes_of, load_heads, splat, store_runs
from tamis.jit_kernels.ops import STEP
from tamis.jit_kernels.types import PAGE


def key_lanes(head_dim: int) -> int:
    """Lanes that share a key, a power of two: eight elements each."""
    assert head_dim % 8 == 0
    assert head_dim <= 8 * WARP
    return 1 << (head_dim // 8 - 1).bit_length()


def _finding(lanes: int) -> Any:
    """The function that finds key p: its row of the pages, its value's row, the score's bias."""

    @device
    def find(keys, pages, p):
        k_table, v_table, n_head_kv, h, log_weight = pages
        j, s = key_of(p, keys)
        if j < 0:
            return -1, 0, float32(MASKED)
        page, line = j // PAGE, j % PAGE
        k_row = (load_i32(k_table + 4 * page) * n_head_kv + h) * PAGE + line
        v_row = (load_i32(v_table + 4 * page) * n_head_kv + h) * PAGE + line
        bias = load_f32(log_weight + 4 * s) * float32(LOG2_E) if log_weight != 0 else float32(0)
        return k_row, v_row, bias

    @device
    def find_four(keys, pages, p):
        apart = WARPS * WARP // lanes
        a, b = find(keys, pages, p), find(keys, pages, p + apart)
        c, d = find(keys, pages, p + 2 * apart), find(keys, pages, p + 3 * apart)
        return a, b, c, d

    return find_four


def _adding(head_dim: int, group: int, lanes: int) -> tuple[Any, Any]:
    """Load and add: four keys of a group of lanes, taken into its maxima, totals and sums."""
    maximum, exp2_of, plus, times, _ = lanes_of(group)
    scores, weighed, scaled = heads_of(group, lanes)
    same = splat(group)

    @device
    def load_one(k_piece, v_piece, row):
        k_row, v_row, _ = row
        live = uint32(k_row >= 0 and lane() % lanes * 8 < head_dim)
        k = load_if(k_piece + 2 * head_dim * k_row, live)
        return k, load_if(v_piece + 2 * head_dim * v_row, live)

    @device
    def load(k_piece, v_piece, rows):
        a, b = load_one(k_piece, v_piece, rows[0]), load_one(k_piece, v_piece, rows[1])
        c, d = load_one(k_piece, v_piece, rows[2]), load_one(k_piece, v_piece, rows[3])
        return a, b, c, d

    @device
    def add(state, q, rows, loaded):
        top, total, sums = state
        a = plus(scores(q, halves_f32(loaded[0][0])), same(rows[0][2]))
        b = plus(scores(q, halves_f32(loaded[1][0])), same(rows[1][2]))
        c = plus(scores(q, halves_f32(loaded[2][0])), same(rows[2][2]))
        d = plus(scores(q, halves_f32(loaded[3][0])), same(rows[3][2]))
        new = maximum(maximum(maximum(a, b), maximum(c, d)), top)
        fade = exp2_of(top, new)
        a, b, c, d = exp2_of(a, new), exp2_of(b, new), exp2_of(c, new), exp2_of(d, new)
        total = plus(times(total, fade), plus(plus(a, b), plus(c, d)))
        sums = weighed(scaled(sums, fade), a, halves_f32(loaded[0][1]))
        sums = weighed(sums, b, halves_f32(loaded[1][1]))
        sums = weighed(sums, c, halves_f32(loaded[2][1]))
        return new, total, weighed(sums, d, halves_f32(loaded[3][1]))

    return load, add


def _joining(group: int, lanes: int) -> Any:
    """The function that joins the states of a warp's groups of lanes, in every lane."""
    maximum, exp2_of, plus, times, exchanged = lanes_of(group)
    _, _, plus_all, _, exchanged_all = lanes_of(8 * group)
    _, _, scaled = heads_of(group, lanes)

    @device
    def join(state):
        top, total, sums = state
        for i in range(5):
            mask = uint32(16 >> i)
            if mask >= lanes:
                other = exchanged(top, mask)
                new = maximum(top, other)
                mine, theirs = exp2_of(top, new), exp2_of(other, new)
                there = times(exchanged(total, mask), theirs)
                total = plus(times(total, mine), there)
                sums = plus_all(scaled(sums, mine), scaled(exchanged_all(sums, mask), theirs))
                top = new
        return top, total, sums

    return join


def attend_few(head_dim: int, group: int) -> Launch:
    """The kernel of ATTEND for rows of one query token: blocks take parts of rows in turn."""
    lanes, size = key_lanes(head_dim), head_dim + 2
    find, join = _finding(lanes), _joining(group, lanes)
    load, add = _adding(head_dim, group, lanes)
    load_q, same, same_all = load_heads(group), splat(group), splat(8 * group)
    store_sums, store_one = store_runs(8 * group, 8, 4 * size), store_runs(group, 1, 4 * size)
    finish, at_once = finishing(head_dim, group, 1, WARPS), WARPS * WARP // lanes

    def kernel(
        tid, n_thread, step, q, k_pages, v_pages, k_table, v_table, indptr, indices, log_weight,
        block, n_row, heads_per_kv, n_head_kv, window, n_split, stride, partial, out, lse, scratch,
        scale_f,
    ):  # fmt: skip
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        shared = shared_address(cuda.shared.array(0, uint8))
        n_head, piece = n_row * group, lane() % lanes
        for item in range(tid, n_tok * n_row * n_split, n_thread):
            split, row = (item % n_split, n_split), item // n_split
            head, high = row % n_row * group, pos + stride * (row // n_row)
            low = max(0, high - window + 1) if window != 0 else 0
            blocks = (low // block, high // block + 1)
            begin, end = part_of(indptr + 4 * row, indices, blocks, split)
            query = n_head * (row // n_row) + head
            at_q = (load_i64(step + STEP.row) + stride * (row // n_row)) * n_head + head
            mine = q + 4 * (head_dim * at_q + min(8 * piece, head_dim - 8))
            values = load_q(mine, 4 * head_dim, scale_f * float32(LOG2_E))
            keys = begin, (end - begin) * block, indices, block, low, high
            h = head // heads_per_kv
            pages = k_table, v_table, n_head_kv, h, log_weight
            k_piece, v_piece = k_pages + 16 * piece, v_pages + 16 * piece
            state = same(float32(LOWEST)), same(float32(0)), same_all(float32(0))
            first = warp() * (WARP // lanes) + lane() // lanes
            # Four keys are taken in while the next four are on their way, and rows of more found.
            rows, ahead = find(keys, pages, first), find(keys, pages, first + 4 * at_once)
            loaded = load(k_piece, v_piece, rows)
            for start in range(first, first + (end - begin) * block, 4 * at_once):
                coming = load(k_piece, v_piece, ahead)
                more = find(keys, pages, start + 8 * at_once)
                state = add(state, values, rows, loaded)
                rows, ahead, loaded = ahead, more, coming
            top, total, sums = join(state)
            at = shared + 4 * size * group * warp()
            if lane() < lanes and 8 * piece < head_dim:
                store_sums(sums, uint32(at + 32 * piece))
            if lane() == 0:
                store_one(top, uint32(at + 4 * head_dim))
                store_one(total, uint32(at + 4 * head_dim + 4))
            sync_block()
            finish(shared, 1, query, n_head, partial, split, out, lse)
            sync_block()  # before the next item's results overwrite what is read here

    return Launch(kernel, shared=4 * WARPS * group * size)
