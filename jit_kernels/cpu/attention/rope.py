"""RoPE angles of a chunk, RoPE with the append to the KV cache, learned position embeddings."""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.kv.kv_rows import row_at, rows_of_type
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    store_f32,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    fma,
    load_f,
    load_f32x8,
    load_f32x16,
    rotated_pairs,
    splat_f,
    store_f,
    store_f32x16,
)
from tamis.jit_kernels.cpu.linear.norm import normalise


def rope_table() -> Any:
    """Kernel of ROPE_TABLE; angles in float64, so that long contexts keep their precision."""

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            for i in range(a.n_half):
                angle = (pos + t) * load_f64(a.inv_freq + 8 * i)
                at = 4 * (a.n_half * t + i)
                store_f32(a.cos + at, np.float32(math.cos(angle)) * a.scale)
                store_f32(a.sin + at, np.float32(math.sin(angle)) * a.scale)

    return kernel


@njit(error_model="numpy")
def rotate_pair(a, b, cos, sin):
    """Rotate the pair of floats at a and b by an angle, its cosine at cos, its sine at sin."""
    x, y, c, s = load_f32(a), load_f32(b), load_f32(cos), load_f32(sin)
    store_f32(a, x * c - y * s)
    store_f32(b, x * s + y * c)


@njit(error_model="numpy")
def rotate_halves(head, cos, sin, n_half):
    """Rotate the pairs (i, i + n_half)."""
    other, whole = head + 4 * n_half, n_half // LANES * LANES
    minus = splat_f(-1.0)
    for i in range(0, 4 * whole, 4 * LANES):
        x, y, c, s = load_f(head + i), load_f(other + i), load_f(cos + i), load_f(sin + i)
        store_f(head + i, fma(x, c, minus * y * s))
        store_f(other + i, fma(x, s, y * c))
    for i in range(4 * whole, 4 * n_half, 4):
        rotate_pair(head + i, other + i, cos + i, sin + i)


@njit(error_model="numpy")
def rotate_adjacent(head, cos, sin, n_half):
    """Rotate the pairs (2i, 2i + 1)."""
    whole = n_half // 8 * 8
    for i in range(0, whole, 8):
        at = head + 8 * i
        pairs = load_f32x16(at)
        store_f32x16(at, rotated_pairs(pairs, load_f32x8(cos + 4 * i), load_f32x8(sin + 4 * i)))
    for i in range(whole, n_half):
        rotate_pair(head + 8 * i, head + 8 * i + 4, cos + 4 * i, sin + 4 * i)


def rope_heads(head_dim: int, neox: int, order: str) -> Any:
    """Kernel of ROPE_HEADS: threads stride over heads."""
    rotate, norm_first = rotate_halves if neox else rotate_adjacent, order == "norm"

    def kernel(tid, n_thread, a):
        for item in range(tid, load_i64(a.step + STEP.n_tok) * a.n_head, n_thread):
            t, head = item // a.n_head, a.x + 4 * head_dim * item
            norm = a.norm + 4 * a.norm_step * (item % a.n_head)
            if a.norm != 0 and norm_first:
                normalise(head, norm, head, head_dim, a.eps, 0)
            rotate(head, a.cos + 4 * a.n_half * t, a.sin + 4 * a.n_half * t, a.n_half)
            if a.norm != 0 and not norm_first:
                normalise(head, norm, head, head_dim, a.eps, 0)

    return kernel


def place_heads() -> Any:
    """Kernel of PLACE_HEADS: threads stride over heads."""

    def kernel(tid, n_thread, a):
        for item in range(tid, load_i64(a.step + STEP.n_tok) * a.n_y, n_thread):
            t, source = item // a.n_y, load_i32(a.source + 4 * (item % a.n_y))
            n = min(a.x_dim, a.y_dim) if source >= 0 else 0
            head, out = a.x + 4 * a.x_dim * (a.n_x * t + source), a.y + 4 * a.y_dim * item
            for i in range(a.y_dim):
                store_f32(out + 4 * i, load_f32(head + 4 * i) if i < n else np.float32(0))

    return kernel


def add_positions() -> Any:
    """Kernel of ADD_POSITIONS: each thread takes whole rows."""

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            row, own = a.x + 4 * a.n * t, a.table + 4 * a.stride * (pos + t)
            for i in range(a.n):
                store_f32(row + 4 * i, load_f32(row + 4 * i) + load_f32(own + 4 * i))

    return kernel


def scale_by_position() -> Any:
    """Kernel of SCALE_BY_POSITION: each thread takes whole rows."""

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            steps = math.floor((pos + t + a.offset) / a.length)
            scale = np.float32(1.0 + a.scale * math.log(1.0 + steps))
            for at in range(a.x + 4 * a.n * t, a.x + 4 * a.n * (t + 1), 4):
                store_f32(at, load_f32(at) * scale)

    return kernel


def rope_append(head_dim: int, neox: int, type_k: str, type_v: str) -> Any:
    """Kernel of ROPE_APPEND: threads stride over heads, those of q, k and v alike."""
    rotate = rotate_halves if neox else rotate_adjacent
    keep_k, keep_v = (rows_of_type(type, head_dim).write for type in (type_k, type_v))

    def kernel(tid, n_thread, a):
        n_tok, pos, n_row = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos), 4 * head_dim
        n_item = a.n_head + 2 * a.n_head_kv
        for item in range(tid, n_tok * n_item, n_thread):
            t, h = item // n_item, item % n_item
            kv = (h - a.n_head) % a.n_head_kv
            head, norm = a.q + n_row * (a.n_head * t + h), a.q_norm
            if h >= a.n_head + a.n_head_kv:
                head = a.v + n_row * (a.n_head_kv * t + kv)
            elif h >= a.n_head:
                head, norm = a.k + n_row * (a.n_head_kv * t + kv), a.k_norm
            if h < a.n_head + a.n_head_kv:
                if norm != 0:
                    normalise(head, norm, head, head_dim, a.eps, 0)
                rotate(head, a.cos + 4 * a.n_half * t, a.sin + 4 * a.n_half * t, a.n_half)
            if h >= a.n_head + a.n_head_kv:
                keep_v(head, a.v_pages, row_at(a.v_table, a.n_head_kv, kv, pos + t))
            elif h >= a.n_head:
                keep_k(head, a.k_pages, row_at(a.k_table, a.n_head_kv, kv, pos + t))

    return kernel
