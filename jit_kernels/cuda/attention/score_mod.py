"""Attention with modified scores (soft cap, ALiBi, later positions) or with long heads.

A block has one query: a thread scores a key and then sums some elements of the values. Keys are
read once per query head, which is simple but not fast: few models have such scores or heads.
"""

import math

from numba import cuda, float32, int64

from tamis.jit_kernels.cuda.attention.attend_epilogue import (
    LOG2_E,
    LOWEST,
    MASKED,
    entries_of,
    key_of,
)
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, reading, reading_one, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    Launch,
    block_max,
    block_sum,
    step_of,
    sync_block,
    thread,
)
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32, load_f32x8, store_f32
from tamis.jit_kernels.cuda.lang.ptx import exp2
from tamis.jit_kernels.cuda.linear.activation import tanh


@device
def score_mod(x, cap, slopes, head, distance):
    """A score, capped and biased."""
    if cap != float32(0):
        x = cap * tanh(x / cap)
    if slopes != 0:
        x -= load_f32(slopes + 4 * head) * float32(abs(distance))
    return x


def attend_score_mod(
    head_dim: int, group: int, q_block: int, type_k: str, type_v: str
) -> list[Launch]:
    """Kernel of ATTEND_SCORE_MOD."""
    return plain(head_dim, group, q_block, (type_k, type_v), modified=True)


def plain(
    head_dim: int, group: int, q_block: int, kv_types: tuple[str, str], *, modified: bool
) -> list[Launch]:
    """Kernel of ATTEND_SCORE_MOD, or of ATTEND (modified=False); blocks stride over heads.

    Heads may have any length. There is no split-KV: part 0 of a row is all of it.
    """
    type_k, type_v = kv_types
    read_k, read_v = reading(type_k, head_dim), reading_one(type_v, head_dim)
    k_bytes, v_bytes = row_bytes(type_k, head_dim), row_bytes(type_v, head_dim)
    size = 4 * head_dim + 8

    def kernel(tid, n_thread, a):
        n_tok, pos, skip = step_of(a.step)
        weights = cuda.shared.array(THREADS, float32)
        values = cuda.shared.array(THREADS, int64)
        sums = cuda.shared.array(head_dim, float32)  # each thread's own elements
        n_head = a.n_row * group
        for item in range(tid, n_tok * n_head, n_thread):
            t, head = item // n_head, item % n_head
            p, h = pos + a.stride * t, head // a.heads_per_kv
            row = t // q_block * a.n_row + head // group
            low = max(0, p - a.window + 1) if a.window != 0 else 0
            high = p
            if modified:
                high = min(p + a.ahead, pos + n_tok - 1) if a.ahead > 0 else p
            blocks = low // a.block, high // a.block + 1
            begin, end = entries_of(a.indptr + 4 * row, a.indices, blocks)
            keys = begin, (end - begin) * a.block, a.indices, a.block, low, high
            query = a.q + 4 * head_dim * ((skip + a.stride * t) * n_head + head)
            row_max, row_sum = float32(LOWEST), float32(0)
            for d in range(thread(), head_dim, THREADS):
                sums[d] = float32(0)
            for first in range(0, keys[1], THREADS):
                j, s = key_of(first + thread(), keys)
                x, value = float32(MASKED), a.v_pages
                if j >= 0:
                    at, x = a.k_pages + k_bytes * key_row(a.k_table, a.n_head_kv, h, j), float32(0)
                    for d in range(0, head_dim, 8):
                        q, k = load_f32x8(query + 4 * d), read_k(at, d)
                        for e in range(8):
                            x += q[e] * k[e]
                    x *= a.scale
                    if modified:
                        x = score_mod(x, a.cap, a.slopes, head, p - j)
                    x += load_f32(a.log_weight + 4 * s) if a.log_weight != 0 else float32(0)
                    value = a.v_pages + v_bytes * key_row(a.v_table, a.n_head_kv, h, j)
                new = max(row_max, block_max(x))
                alpha = exp2((row_max - new) * float32(LOG2_E))
                w = exp2((x - new) * float32(LOG2_E)) if j >= 0 else float32(0)
                weights[thread()], values[thread()] = w, value
                row_sum, row_max = row_sum * alpha + block_sum(w), new
                for d in range(thread(), head_dim, THREADS):
                    y = sums[d] * alpha
                    for i in range(min(THREADS, keys[1] - first)):
                        if weights[i] > float32(0):
                            y += weights[i] * read_v(values[i], d)
                    sums[d] = y
                sync_block()  # before the next keys' weights overwrite what is read here
            if a.out != 0:
                for d in range(thread(), head_dim, THREADS):
                    y = sums[d] / row_sum if row_sum > 0 else float32(0)
                    store_f32(a.out + 4 * (head_dim * item + d), y)
            if a.lse != 0 and thread() == 0:
                lse = row_max + math.log(row_sum) if row_sum > 0 else row_max
                store_f32(a.lse + 4 * item, lse)
            if a.partial != 0 and a.n_split > 1:
                part = a.partial + size * a.n_split * item
                for i in range(thread(), (head_dim + 2) * a.n_split, THREADS):
                    d = i % (head_dim + 2)
                    y = float32(LOWEST) if d == head_dim else float32(0)
                    if i < head_dim:
                        y = sums[i]
                    elif i < head_dim + 2:
                        y = row_max if d == head_dim else row_sum
                    store_f32(part + 4 * i, y)

    return [Launch(kernel)]
