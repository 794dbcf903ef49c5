"""Attention over a Selection of pages: see attend_few.py (decode) and attend_many.py (prefill)."""

import math

from numba import float32

from tamis.jit_kernels.cuda.attend_ends import LOG2_E, LOWEST
from tamis.jit_kernels.cuda.attend_few import attend_few
from tamis.jit_kernels.cuda.attend_many import attend_many
from tamis.jit_kernels.cuda.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.intrinsic import device, load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.ptx import exp2
from tamis.jit_kernels.ops import STEP


def attend(head_dim: int, group: int, q_block: int) -> list[Launch]:
    """The kernel of ATTEND."""
    if q_block == 1:
        return [attend_few(head_dim, group)]
    return [attend_many(head_dim, group, q_block)]


@device
def weight_of(top, highest):
    """What a part with the maximum `top` weighs against one with `highest`."""
    return exp2((top - highest) * float32(LOG2_E))


def attend_merge(head_dim: int) -> list[Launch]:
    """Kernel of ATTEND_MERGE: threads take the elements of all heads in turn."""
    size = 4 * head_dim + 8

    def kernel(tid, n_thread, step, partial, out, lse, n_head, n_split):
        n = load_i64(step + STEP.n_tok) * n_head * head_dim
        for i in range(tid * THREADS + thread(), n, n_thread * THREADS):
            query, d = i // head_dim, i % head_dim
            parts, top = partial + size * n_split * query, float32(LOWEST)
            for p in range(n_split):
                top = max(top, load_f32(parts + size * p + 4 * head_dim))
            total, value = float32(0), float32(0)
            for p in range(n_split):
                part = parts + size * p
                weight = weight_of(load_f32(part + 4 * head_dim), top)
                total += weight * load_f32(part + 4 * head_dim + 4)
                value += weight * load_f32(part + 4 * d)
            store_f32(out + 4 * i, value / total if total > 0 else 0)
            if lse != 0 and d == 0:
                store_f32(lse + 4 * query, top + math.log(total) if total > 0 else top)

    return [Launch(kernel)]
