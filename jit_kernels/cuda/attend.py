"""Attention over a Selection of pages.

See attend_few.py (decode), attend_group.py (prompts on Hopper) and attend_many.py (prompts).
"""

import math

from numba import cuda, float32

from tamis.jit_kernels.cuda.attend_ends import LOG2_E, LOWEST
from tamis.jit_kernels.cuda.attend_few import attend_few
from tamis.jit_kernels.cuda.attend_group import attend_group
from tamis.jit_kernels.cuda.attend_many import attend_many
from tamis.jit_kernels.cuda.grid import THREADS, Launch, block_max, block_sum, sync_block, thread
from tamis.jit_kernels.cuda.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.ptx import exp2
from tamis.jit_kernels.cuda.target import current
from tamis.jit_kernels.ops import STEP


def attend(head_dim: int, group: int, q_block: int, type_k: str, type_v: str) -> list[Launch]:
    """The kernel of ATTEND, of float16 keys and values."""
    assert type_k == type_v == "f16"
    if q_block == 1:
        return [attend_few(head_dim, group)]
    # Sums of longer heads do not fit in a warpgroup's registers.
    in_groups = current().has_warpgroups and head_dim <= 128
    return [(attend_group if in_groups else attend_many)(head_dim, group, q_block)]


def attend_merge(head_dim: int) -> list[Launch]:
    """Kernel of ATTEND_MERGE: blocks take heads in turn, their threads elements and parts."""
    size, n_group = 4 * head_dim + 8, max(1, THREADS // head_dim)
    assert head_dim <= THREADS

    def kernel(tid, n_thread, step, partial, out, lse, n_head, n_split):
        sums = cuda.shared.array(THREADS, float32)
        d, group = thread() % head_dim, thread() // head_dim
        query = tid - n_thread
        while query + n_thread < load_i64(step + STEP.n_tok) * n_head:
            query += n_thread
            parts, top = partial + size * n_split * query, float32(LOWEST)
            for p in range(thread(), n_split, THREADS):
                top = max(top, load_f32(parts + size * p + 4 * head_dim))
            top, total, value = block_max(top), float32(0), float32(0)
            for p in range(group, n_split if group < n_group else 0, n_group):
                part = parts + size * p
                weight = exp2((load_f32(part + 4 * head_dim) - top) * float32(LOG2_E))
                total += weight * load_f32(part + 4 * head_dim + 4) if d == 0 else 0
                value += weight * load_f32(part + 4 * d)
            total = block_sum(total)
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

    return [Launch(kernel)]
