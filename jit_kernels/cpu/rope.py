"""Rotary positions: the table of a chunk's angles, and the turning of heads by it."""

import math
from typing import Any

import numpy as np

from tamis.jit_kernels.cpu.intrinsic import load_f32, load_f64, load_i64, store_f32
from tamis.jit_kernels.ops import STEP


def rope_table() -> Any:
    """Kernel of ROPE_TABLE; angles in float64, so that long contexts keep their precision."""

    def kernel(tid, n_thread, step, inv_freq, cos, sin, n_half, scale_f):
        pos = load_i64(step + STEP.pos)
        for t in range(tid, load_i64(step + STEP.n_tok), n_thread):
            for i in range(n_half):
                angle = (pos + t) * load_f64(inv_freq + 8 * i)
                at = 4 * (n_half * t + i)
                store_f32(cos + at, np.float32(math.cos(angle)) * scale_f)
                store_f32(sin + at, np.float32(math.sin(angle)) * scale_f)

    return kernel


def rope(neox: int) -> Any:
    """Kernel of ROPE: each thread turns whole tokens."""

    def kernel(tid, n_thread, step, x, cos, sin, n_head, head_dim, n_half):
        for t in range(tid, load_i64(step + STEP.n_tok), n_thread):
            for h in range(n_head):
                head = x + 4 * head_dim * (n_head * t + h)
                for i in range(n_half):
                    c, s = (
                        load_f32(cos + 4 * (n_half * t + i)),
                        load_f32(sin + 4 * (n_half * t + i)),
                    )
                    a = head + (4 * i if neox else 8 * i)
                    b = a + (4 * n_half if neox else 4)
                    xa, xb = load_f32(a), load_f32(b)
                    store_f32(a, xa * c - xb * s)
                    store_f32(b, xa * s + xb * c)

    return kernel
