"""Attention over a Selection of pages, with a running maximum (flash attention's recurrence).

Milakov and Gimelshein 2018 (arXiv 1805.02867), Alg. 3; Dao et al. 2022 (arXiv 2205.14135), Alg. 1.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.intrinsic import load_f32, load_i32, load_i64, store_f32
from tamis.jit_kernels.cpu.tile import add_scaled_half, dot_half
from tamis.jit_kernels.ops import STEP
from tamis.jit_kernels.types import PAGE

LOWEST = np.float32(-1e30)  # below every score; finite, so that differences stay finite
ZERO = np.float32(0)


def _run_of(head_dim: int, group: int) -> Any:
    """Attention of one token's `group` heads to up to PAGE neighbouring keys, added to `state`.

    state: f32 sums [group, head_dim], scores [group, PAGE], maxima [group], normalisers [group].
    """
    sums_size = 4 * group * head_dim
    maxima = sums_size + 4 * group * PAGE

    @njit(error_model="numpy")
    def attend_run(state, q, k, v, n, scale, bias):
        for g in range(group):
            scores, head = state + sums_size + 4 * PAGE * g, q + 4 * head_dim * g
            sums, m_at = state + 4 * head_dim * g, state + maxima + 4 * g
            l_at = m_at + 4 * group
            top = load_f32(m_at)
            old = top
            for j in range(n):
                score = dot_half(head, k + 2 * head_dim * j, head_dim) * scale + bias
                store_f32(scores + 4 * j, score)
                top = max(top, score)
            if top > old:
                shrink = np.exp(old - top)
                store_f32(l_at, load_f32(l_at) * shrink)
                for i in range(head_dim):
                    store_f32(sums + 4 * i, load_f32(sums + 4 * i) * shrink)
                store_f32(m_at, top)
            total = load_f32(l_at)
            for j in range(n):
                weight = np.exp(load_f32(scores + 4 * j) - top)
                total += weight
                add_scaled_half(sums, weight, v + 2 * head_dim * j, head_dim)
            store_f32(l_at, total)

    return attend_run


def attend(head_dim: int, group: int, q_block: int) -> Any:
    """Kernel of ATTEND: threads take rows and parts of rows in turn."""
    run = _run_of(head_dim, group)
    sums_size = 4 * group * head_dim
    maxima = sums_size + 4 * group * PAGE
    state_size = 4 * group * (head_dim + PAGE + 2) + 256

    @njit(error_model="numpy")
    def clear(state):
        for i in range(group * head_dim):
            store_f32(state + 4 * i, ZERO)
        for g in range(group):
            store_f32(state + maxima + 4 * g, LOWEST)
            store_f32(state + maxima + 4 * group + 4 * g, ZERO)

    @njit(error_model="numpy")
    def finish(state, out, lse, stride):
        """Write sums and lse of the heads, or sums, maximum and normaliser of a part."""
        for g in range(group):
            m = load_f32(state + maxima + 4 * g)
            total = load_f32(state + maxima + 4 * group + 4 * g)
            sums, at = state + 4 * head_dim * g, out + stride * g
            factor = np.float32(1)
            if stride == 4 * head_dim:
                factor = np.float32(1) / total if total > ZERO else ZERO
                if lse != 0:
                    store_f32(lse + 4 * g, m + np.float32(math.log(total)) if total > ZERO else m)
            else:
                store_f32(at + 4 * head_dim, m)
                store_f32(at + 4 * head_dim + 4, total)
            for i in range(head_dim):
                store_f32(at + 4 * i, load_f32(sums + 4 * i) * factor)

    def kernel(
        tid, n_thread, step, q, k_pages, v_pages, k_table, v_table, indptr, indices, log_weight,
        block, n_row, heads_per_kv, n_head_kv, window, n_split, partial, out, lse, scratch, scale_f,
    ):  # fmt: skip
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        n_head, state = n_row * group, scratch + tid * state_size
        n_item = (n_tok + q_block - 1) // q_block * n_row * n_split
        for item in range(tid, n_item, n_thread):
            part, row = item % n_split, item // n_split
            head, first_tok = row % n_row * group, row // n_row * q_block
            h = head // heads_per_kv
            begin, end = load_i32(indptr + 4 * row), load_i32(indptr + 4 * row + 4)
            first = begin + (end - begin) * part // n_split
            last = begin + (end - begin) * (part + 1) // n_split
            for t in range(first_tok, min(n_tok, first_tok + q_block)):
                clear(state)
                low = max(0, pos + t - window + 1) if window != 0 else 0
                query = n_head * t + head
                for s in range(first, last):
                    j = load_i32(indices + 4 * s) * block
                    stop = min(j + block, pos + t + 1)
                    j = max(j, low)
                    bias = load_f32(log_weight + 4 * s) if log_weight != 0 else ZERO
                    while j < stop:
                        page, line = j // PAGE, j % PAGE
                        n = min(stop - j, PAGE - line)
                        k_row = (load_i32(k_table + 4 * page) * n_head_kv + h) * PAGE + line
                        v_row = (load_i32(v_table + 4 * page) * n_head_kv + h) * PAGE + line
                        run(
                            state, q + 4 * head_dim * query, k_pages + 2 * head_dim * k_row,
                            v_pages + 2 * head_dim * v_row, n, scale_f, bias,
                        )  # fmt: skip
                        j += n
                if n_split == 1:
                    at = lse + 4 * query if lse != 0 else 0
                    finish(state, out + 4 * head_dim * query, at, 4 * head_dim)
                else:
                    size = 4 * (head_dim + 2)
                    finish(state, partial + size * (query * n_split + part), 0, size * n_split)

    return kernel


def attend_merge(head_dim: int) -> Any:
    """Kernel of ATTEND_MERGE: threads take heads in turn."""
    size = 4 * (head_dim + 2)

    def kernel(tid, n_thread, step, partial, out, lse, n_head, n_split):
        for query in range(tid, load_i64(step + STEP.n_tok) * n_head, n_thread):
            parts, at = partial + size * n_split * query, out + 4 * head_dim * query
            top = LOWEST
            for p in range(n_split):
                top = max(top, load_f32(parts + size * p + 4 * head_dim))
            total = ZERO
            for i in range(head_dim):
                store_f32(at + 4 * i, ZERO)
            for p in range(n_split):
                part = parts + size * p
                weight = np.exp(load_f32(part + 4 * head_dim) - top)
                total += weight * load_f32(part + 4 * head_dim + 4)
                for i in range(head_dim):
                    store_f32(at + 4 * i, load_f32(at + 4 * i) + weight * load_f32(part + 4 * i))
            factor = np.float32(1) / total if total > ZERO else ZERO
            for i in range(head_dim):
                store_f32(at + 4 * i, load_f32(at + 4 * i) * factor)
            if lse != 0:
                log = np.float32(math.log(total)) if total > ZERO else ZERO
                store_f32(lse + 4 * query, top + log)

    return kernel
