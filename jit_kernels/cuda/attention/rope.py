"""RoPE angles of a chunk, RoPE with the append to the KV cache, learned position embeddings."""

import math
from typing import Any

from numba import cuda, float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.kv.kv_rows import keeping, key_row, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    look_ahead,
    step_of,
    thread,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    quotient,
    remainder,
    store_f32,
)


def rope_table() -> list[Launch]:
    """Kernel of ROPE_TABLE; angles in float64, so that long contexts keep their precision."""

    def kernel(tid, n_thread, a):
        pos, n = load_i64(a.step + STEP.pos), load_i64(a.step + STEP.n_tok) * a.n_half
        for i in range(tid * THREADS + thread(), n, n_thread * THREADS):
            angle = (pos + i // a.n_half) * load_f64(a.inv_freq + 8 * (i % a.n_half))
            store_f32(a.cos + 4 * i, float32(math.cos(angle)) * a.scale)
            store_f32(a.sin + 4 * i, float32(math.sin(angle)) * a.scale)

    return [Launch(kernel)]


@device
def norm_head(head, norm, head_dim, eps):
    """RMS-norm a head in place, by one warp."""
    squares = float32(0)
    for i in range(lane(), head_dim, WARP):
        squares += load_f32(head + 4 * i) * load_f32(head + 4 * i)
    scale = float32(1) / math.sqrt(warp_sum(squares) / float32(head_dim) + eps)
    for i in range(lane(), head_dim, WARP):
        store_f32(head + 4 * i, load_f32(head + 4 * i) * scale * load_f32(norm + 4 * i))


def rotating(neox: int) -> Any:
    """The function rotate(head, cos, sin, n_half) of a warp."""

    @device
    def rotate(head, cos, sin, n_half):
        for i in range(lane(), n_half, WARP):
            a = head + 4 * i if neox else head + 8 * i
            b = a + 4 * n_half if neox else a + 4
            x, y = load_f32(a), load_f32(b)
            c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
            store_f32(a, x * c - y * s)
            store_f32(b, x * s + y * c)

    return rotate


def rope_heads(head_dim: int, neox: int, order: str) -> list[Launch]:
    """Kernel of ROPE_HEADS: warps stride over heads."""
    rotate, norm_first = rotating(neox), order == "norm"

    def kernel(tid, n_thread, a):
        n_item = load_i64(a.step + STEP.n_tok) * a.n_head
        for item in range(tid * WARPS + warp(), n_item, n_thread * WARPS):
            t, head = quotient(item, a.n_head), a.x + 4 * head_dim * item
            norm = a.norm + 4 * a.norm_step * remainder(item, a.n_head)
            if a.norm != 0 and norm_first:
                norm_head(head, norm, head_dim, a.eps)
                cuda.syncwarp()
            rotate(head, a.cos + 4 * a.n_half * t, a.sin + 4 * a.n_half * t, a.n_half)
            if a.norm != 0 and not norm_first:
                cuda.syncwarp()
                norm_head(head, norm, head_dim, a.eps)

    return [Launch(kernel)]


def place_heads() -> list[Launch]:
    """Kernel of PLACE_HEADS: warps stride over heads."""

    def kernel(tid, n_thread, a):
        n_item = load_i64(a.step + STEP.n_tok) * a.n_y
        for item in range(tid * WARPS + warp(), n_item, n_thread * WARPS):
            t, source = quotient(item, a.n_y), load_i32(a.source + 4 * remainder(item, a.n_y))
            n = min(a.x_dim, a.y_dim) if source >= 0 else 0
            head, out = a.x + 4 * a.x_dim * (a.n_x * t + source), a.y + 4 * a.y_dim * item
            for i in range(lane(), a.y_dim, WARP):
                store_f32(out + 4 * i, load_f32(head + 4 * i) if i < n else float32(0))

    return [Launch(kernel)]


def add_positions() -> list[Launch]:
    """Kernel of ADD_POSITIONS: threads share the elements of all rows."""

    def kernel(tid, n_thread, a):
        total, pos = load_i64(a.step + STEP.n_tok) * a.n, load_i64(a.step + STEP.pos)
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            own = load_f32(a.table + 4 * (a.stride * (pos + i // a.n) + i % a.n))
            store_f32(a.x + 4 * i, load_f32(a.x + 4 * i) + own)

    return [Launch(kernel)]


def scale_by_position() -> list[Launch]:
    """Kernel of SCALE_BY_POSITION: threads share the elements of all rows."""

    def kernel(tid, n_thread, a):
        total, pos = load_i64(a.step + STEP.n_tok) * a.n, load_i64(a.step + STEP.pos)
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            steps = math.floor(float32(pos + i // a.n + a.offset) / float32(a.length))
            scale = float32(1) + a.scale * math.log(float32(1) + float32(steps))
            store_f32(a.x + 4 * i, load_f32(a.x + 4 * i) * scale)

    return [Launch(kernel)]


def rope_append(head_dim: int, neox: int, type_k: str, type_v: str) -> list[Launch]:
    """Kernel of ROPE_APPEND: warps stride over heads, those of q, k and v alike."""
    rotate = rotating(neox)
    k_bytes, v_bytes = row_bytes(type_k, head_dim), row_bytes(type_v, head_dim)
    keep_k, keep_v = keeping(type_k, head_dim), keeping(type_v, head_dim)

    def kernel(tid, n_thread, a):
        n_tok, pos, _ = step_of(a.step)
        n_item, n_row = a.n_head + 2 * a.n_head_kv, 4 * head_dim
        for item in range(tid * WARPS + warp(), n_tok * n_item, n_thread * WARPS):
            t, h = quotient(item, n_item), remainder(item, n_item)
            kv = h - a.n_head if h < a.n_head + a.n_head_kv else h - a.n_head - a.n_head_kv
            head, norm = a.q + n_row * (a.n_head * t + h), a.q_norm
            if h >= a.n_head + a.n_head_kv:
                head = a.v + n_row * (a.n_head_kv * t + kv)
            elif h >= a.n_head:
                head, norm = a.k + n_row * (a.n_head_kv * t + kv), a.k_norm
            if h < a.n_head + a.n_head_kv:
                if norm != 0:
                    norm_head(head, norm, head_dim, a.eps)
                    cuda.syncwarp()
                rotate(head, a.cos + 4 * a.n_half * t, a.sin + 4 * a.n_half * t, a.n_half)
                cuda.syncwarp()
            if h >= a.n_head + a.n_head_kv:
                keep_v(head, a.v_pages + v_bytes * key_row(a.v_table, a.n_head_kv, kv, pos + t))
            elif h >= a.n_head:
                keep_k(head, a.k_pages + k_bytes * key_row(a.k_table, a.n_head_kv, kv, pos + t))

    return [Launch(kernel, start=look_ahead)]
