"""Attention with modified scores: soft cap, ALiBi, or queries that see later positions."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.attention.attend import ScoreMod, attending
from tamis.jit_kernels.cpu.attention.attend_batch import BATCH, SCORE_ROW, Layout
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    load_f,
    load_i,
    splat_f,
    splat_i,
    store_f,
    to_f32,
    vabs,
)
from tamis.jit_kernels.cpu.linear.activation import tanh


@njit
def needed_of(a, head):
    """A ScoreMod's parameters: (cap, address of slopes from `head` on), positions ahead."""
    return (a.cap, a.slopes + 4 * head if a.slopes != 0 else 0), a.ahead


def score_mod_of(at: Layout, group: int) -> ScoreMod:
    """The ScoreMod of ATTEND_SCORE_MOD."""

    @njit(error_model="numpy")
    def modify(state, batch, n_q, n, pos, stride, needed):
        cap, slopes = needed
        caps = splat_f(cap)
        inverse = splat_f(np.float32(1) / cap if cap != np.float32(0) else np.float32(0))
        for r in range(n_q):
            query = splat_i(pos + r // group * stride)
            slope = splat_f(load_f32(slopes + 4 * (r % group)) if slopes != 0 else np.float32(0))
            for j in range(0, n, LANES):
                score = state + at.scores + SCORE_ROW * r + 4 * j
                x = load_f(score)
                if cap != np.float32(0):
                    x = caps * tanh(x * inverse)
                if slopes != 0:
                    position = load_i(batch + BATCH.position + 4 * j)
                    x = x - slope * vabs(to_f32(position - query))
                store_f(score, x)

    return ScoreMod(needed_of, modify)


def attend_score_mod(head_dim: int, group: int, q_block: int, type_k: str, type_v: str) -> Any:
    """Kernel of ATTEND_SCORE_MOD: threads share rows."""
    return attending(head_dim, group, q_block, (type_k, type_v), score_mod_of)
