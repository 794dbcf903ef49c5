"""Attention over a Selection of pages.

See attend_few.py (decode), attend_group.py (prompts on Hopper) and attend_many.py (prompts).
"""

import math

from llvmlite import ir
from numba import cuda, float32

from tamis.jit_kernels.cuda.attend_ends import LOG2_E, LOWEST
from tamis.jit_kernels.cuda.attend_few import attend_few
from tamis.jit_kernels.cuda.attend_group import attend_group
from tamis.jit_kernels.cuda.attend_many import attend_many
from tamis.jit_kernels.cuda.grid import (
    THREADS,
    WARP,
    Launch,
    lane,
    sync_block,
    thread,
    warp_max,
    warp_sum,
)
from tamis.jit_kernels.cuda.intrinsic import (
    F8,
    I32,
    I64,
    device,
    int64,
    load_f32,
    load_i64,
    op,
    store_f32,
)
from tamis.jit_kernels.cuda.ptx import LOAD_F32_IF, emit, exp2
from tamis.jit_kernels.cuda.target import current
from tamis.jit_kernels.ops import STEP


def attend(head_dim: int, group: int, q_block: int, type_k: str, type_v: str) -> list[Launch]:
    """The kernel of ATTEND."""
    kv_types = type_k, type_v
    if q_block == 1:
        return [attend_few(head_dim, group, kv_types)]
    # Sums of longer heads do not fit in a warpgroup's registers.
    in_groups = current().has_warpgroups and head_dim <= 128
    return [(attend_group if in_groups else attend_many)(head_dim, group, q_block, kv_types)]


@op(F8, int64, int64, int64, float32)
def eight(b, p, apart, n, otherwise):
    """Eight float32 that lie `apart` bytes apart, all on their way at once; n of them are there."""
    found = []
    for i in range(8):
        index = ir.Constant(I64, i)
        live = b.zext(b.icmp_signed(">", n, index), I32)
        found += emit(b, LOAD_F32_IF, [b.add(p, b.mul(apart, index)), live, otherwise])
    return found


@device
def highest(x):
    """The maximum of eight."""
    return max(max(max(x[0], x[1]), max(x[2], x[3])), max(max(x[4], x[5]), max(x[6], x[7])))


@device
def weighed(x, highs, top):
    """The sum of eight, each relative to its maximum, relative to `top`."""
    total = float32(0)
    for i in range(8):
        total += x[i] * exp2((highs[i] - top) * float32(LOG2_E))
    return total


def attend_merge(head_dim: int, q_block: int) -> list[Launch]:
    """Kernel of ATTEND_MERGE: blocks take heads in turn, their threads elements and parts.

    None where a row is one query: attend_few has joined its parts.
    """
    if q_block == 1:
        return []
    size, n_group = 4 * head_dim + 8, max(1, THREADS // head_dim)
    assert head_dim <= THREADS

    @device
    def whole(parts, n_split):
        """The parts' maximum and total, which each warp finds for itself."""
        top, total = float32(LOWEST), float32(0)
        for p in range(lane(), n_split, WARP):
            high = load_f32(parts + size * p + 4 * head_dim)
            most = max(top, high)
            total *= exp2((top - most) * float32(LOG2_E))
            total += load_f32(parts + size * p + 4 * head_dim + 4) * exp2(
                (high - most) * float32(LOG2_E)
            )
            top = most
        most = warp_max(top)
        return most, warp_sum(total * exp2((top - most) * float32(LOG2_E)))

    def kernel(tid, n_thread, step, partial, out, lse, n_head, n_split):
        sums = cuda.shared.array(THREADS, float32)
        d, group = thread() % head_dim, thread() // head_dim
        n_query, query = load_i64(step + STEP.n_tok) * n_head, int64(tid)
        while query < n_query:
            parts = partial + size * n_split * query
            own, value = float32(LOWEST), float32(0)
            for p in range(group, n_split if group < n_group else 0, 8 * n_group):
                part, n = parts + size * p, (n_split - p + n_group - 1) // n_group
                highs = eight(part + 4 * head_dim, size * n_group, n, float32(LOWEST))
                values = eight(part + 4 * d, size * n_group, n, float32(0))
                most = max(own, highest(highs))
                value *= exp2((own - most) * float32(LOG2_E))
                value += weighed(values, highs, most)
                own = most
            top, total = whole(parts, n_split)
            value *= exp2((own - top) * float32(LOG2_E))
            sums[thread()] = value
            sync_block()
            if group == 0:
                for g in range(1, n_group):
                    value += sums[g * head_dim + d]
                to = out + 4 * (head_dim * query + d)
                store_f32(to, value / total if total > 0 else 0)
                if lse != 0 and d == 0:
                    store_f32(lse + 4 * query, top + math.log(total) if total > 0 else top)
            sync_block()
            query += n_thread

    return [Launch(kernel)]
