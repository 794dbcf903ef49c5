"""Double Sparsity's ops: selection of label channels, and scores of keys by these channels."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.attention.attend_batch import widest
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    load_u16,
    store_f32,
    store_i16,
)
from tamis.jit_kernels.cpu.lang.register_tiles import (
    add_products,
    broadcast_column,
    load_half_row,
    store_grid,
    zero_grid,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    load_f16x16,
    load_f32x16,
    store_f32x16,
    vabs,
    vmax,
    zero_f32x16,
)
from tamis.jit_kernels.cpu.select.column_sums import n_kept
from tamis.jit_kernels.cpu.select.common import LOWEST, SPAN, key_at, middle, write_best, write_ends


def label_channels(head_dim: int, heads: int) -> Any:
    """Kernel of LABEL_CHANNELS: threads stride over KV heads.

    A sum of |q_c k_c| over pairs is the product of two sums.
    """
    size = 4 * head_dim

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        n_query = n_kept(a.past_pos, a.n_past, pos)
        for h in range(tid, a.n_head_kv, n_thread):
            sums, out = a.work + size * h, a.channels + 4 * a.n_label * h
            for d in range(0, head_dim, 16):
                of_queries, of_keys = zero_f32x16(), zero_f32x16()
                for t in range(max(1, n_query)):
                    queries = a.q + size * heads * h
                    if n_query > 0:
                        queries = a.past + size * heads * (
                            a.n_head_kv * ((pos - 1 - t) % a.n_past) + h
                        )
                    for g in range(heads):
                        of_queries += vabs(load_f32x16(queries + size * g + 4 * d))
                for j in range(pos + 1):
                    key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
                    of_keys += vabs(load_f16x16(key + 2 * d))
                store_f32x16(sums + 4 * d, of_queries * of_keys)
            if a.n_label < head_dim:
                write_best(sums, 0, head_dim, a.n_label, out)
            else:
                write_ends(out, 0, a.n_label, 0, 0)

    return kernel


def label_keys(head_dim: int) -> Any:
    """Kernel of LABEL_KEYS: threads share the positions."""

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        first = 0 if a.fresh != 0 else pos
        n = pos + 1 - first
        begin, end = first + n * tid // n_thread, first + n * (tid + 1) // n_thread
        for h in range(a.n_head_kv):
            for c in range(a.n_label):
                channel, to = load_i32(a.channels + 4 * (a.n_label * h + c)), a.n_label * h + c
                for j in range(begin, end):
                    key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
                    store_i16(a.labels + 2 * (a.capacity * to + j), load_u16(key + 2 * channel))
        for head in range(tid, a.n_head, n_thread):
            own = a.channels + 4 * a.n_label * (head // (a.n_head // a.n_head_kv))
            for c in range(a.n_label):
                x = load_f32(a.q + 4 * (head_dim * head + load_i32(own + 4 * c)))
                store_f32(a.parts + 4 * (a.n_label * head + c), x)

    return kernel


def label_score(n_label: int, heads: int, group: int) -> Any:
    """Kernel of LABEL_SCORE: threads stride over spans of each KV head."""
    n_col = widest(heads, lambda n: SPAN // LANES % n == 0)
    width, part_row = n_col * LANES, 4 * n_label

    @njit(error_model="numpy")
    def score(queries, labels, column, to, stride):
        sums = zero_grid(heads, n_col)
        for c in range(n_label):
            parts = broadcast_column(queries + 4 * c, part_row, heads)
            sums = add_products(sums, parts, load_half_row(labels + column * c, n_col))
        store_grid(to, stride, sums)

    @njit(error_model="numpy")
    def finish(at, first, low, high, stride, tops):
        """Reduce the rows' heads, mask positions outside the middle, write the spans' maxima."""
        for r in range(0, heads, group):
            row = at + stride * r
            for i in range(0, 4 * SPAN, 64):
                best = load_f32x16(row + i)
                for g in range(1, group):
                    best = vmax(best, load_f32x16(row + stride * g + i))
                store_f32x16(row + i, best)
            if first < low or first + SPAN > high:
                for i in range(SPAN):
                    if first + i < low or first + i >= high:
                        store_f32(row + 4 * i, LOWEST)
            top = load_f32x16(row)
            for i in range(64, 4 * SPAN, 64):
                top = vmax(top, load_f32x16(row + i))
            store_f32x16(tops + stride // 16 * r, top)

    def kernel(tid, n_thread, a):
        low, high = middle(load_i64(a.step + STEP.pos), a.n_sink, a.n_local, 0)
        first, last, stride = low // SPAN, (high + SPAN - 1) // SPAN, 4 * a.capacity
        for h in range(a.n_head_kv):
            queries, own = a.parts + part_row * heads * h, a.labels + 2 * a.capacity * n_label * h
            rows, tops = a.scores + stride * heads * h, a.maxima + stride // 16 * heads * h
            for s in range(first + tid, last if high > low else first, n_thread):
                for j in range(SPAN * s, SPAN * (s + 1), width):
                    score(queries, own + 2 * j, 2 * a.capacity, rows + 4 * j, stride)
                finish(rows + 4 * SPAN * s, SPAN * s, low, high, stride, tops + 64 * s)

    return kernel
