"""Attention over a Selection of pages.

See attend_decode.py (decode), attend_wgmma.py (prompts on Hopper) and attend_mma.py (prompts).
"""

from numba import int64

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.attention.attend_decode import attend_few
from tamis.jit_kernels.cuda.attention.attend_epilogue import joining
from tamis.jit_kernels.cuda.attention.attend_mma import attend_many
from tamis.jit_kernels.cuda.attention.attend_wgmma import attend_group
from tamis.jit_kernels.cuda.attention.score_mod import plain
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch
from tamis.jit_kernels.cuda.lang.intrinsic import load_i64
from tamis.jit_kernels.cuda.lang.scratch import LONGEST_HEAD
from tamis.jit_kernels.cuda.lang.target import current


def attend(head_dim: int, group: int, q_block: int, type_k: str, type_v: str) -> list[Launch]:
    """The kernel of ATTEND."""
    kv_types = type_k, type_v
    if head_dim > LONGEST_HEAD:
        return plain(head_dim, group, q_block, kv_types, modified=False)
    if q_block == 1:
        return [attend_few(head_dim, group, kv_types)]
    # Sums of longer heads do not fit in a warpgroup's registers.
    in_groups = current().has_warpgroups and head_dim <= 128
    return [(attend_group if in_groups else attend_many)(head_dim, group, q_block, kv_types)]


def attend_pack(head_dim: int, group: int, type_k: str, type_v: str) -> list[Launch]:
    """The kernel of ATTEND_PACK."""
    return [attend_few(head_dim, group, (type_k, type_v), packs=True)]


def attend_merge(head_dim: int, q_block: int) -> list[Launch]:
    """Kernel of ATTEND_MERGE: blocks stride over neighbouring heads.

    None where a row is one query: attend_few has merged its parts.
    """
    if q_block == 1:
        return []
    join, at_once = joining(head_dim), max(1, 2 * THREADS // head_dim)

    def kernel(tid, n_thread, a):
        n_query, query = load_i64(a.step + STEP.n_tok) * a.n_head, at_once * int64(tid)
        while query < n_query:  # a range divides by its step
            here = min(at_once, n_query - query)
            join(query, here, a.partial, (a.n_split, a.n_split), a.out, a.lse, 0)
            query += at_once * n_thread

    return [Launch(kernel)]
