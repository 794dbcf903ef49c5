"""Scores of a KV head's queries and a span of key rows, left in shared memory."""

from typing import Any

from numba import float32, uint32

from tamis.jit_kernels.cuda.attention.tile_bytes import scoring_of
from tamis.jit_kernels.cuda.attention.tile_few import KEYS
from tamis.jit_kernels.cuda.lang.grid import WARP, lane, sync_block, thread, warp
from tamis.jit_kernels.cuda.lang.intrinsic import device
from tamis.jit_kernels.cuda.lang.ptx import load_shared, store_shared_f32
from tamis.jit_kernels.cuda.lang.scratch import HEADS

SPAN = 256  # rows that a block multiplies at a time: one a thread
ROW = 4 * (SPAN + 8)  # bytes of a query's products; rows start eight banks apart


def staging(n: int, heads: int, row_of: Any, type: str = "f16") -> Any:
    """The function (shared, q, n_q, rows, start): products of n_q of f32 q [heads, n] with a span.

    row_of(rows, j): address of row j, n elements of a type of KV_TYPES, or 0 for zeros. It is run
    by a block.
    """
    scoring = scoring_of(n, type)
    read_q, load_q = scoring.read_q, scoring.load_q
    load_k, score = scoring.load_key, scoring.score
    always = type != "f16"  # a row of bytes is read in any case
    tail, n_pass = 4 * 32 * (scoring.n_piece - 1), -(-heads // HEADS)

    @device
    def load(rows, j, q):
        at, n_piece = row_of(rows, j), max(0, (n - 8 * (lane() % 4) + 31) // 32)
        m = uint32(n_piece if at != 0 else 0)
        if always and at == 0:  # a query is as long
            at = q
        return load_k(at, 8 * (lane() % 4), m)

    @device
    def stage(shared, q, n_q, rows, start):
        g, t = lane() // 4, lane() % 4
        for pass_ in range(n_pass):
            if HEADS * pass_ < n_q:
                own = q + 4 * n * min(HEADS * pass_ + g, n_q - 1)
                last = own + min(32 * t + tail, 4 * (n - 8))
                values = load_q(read_q(own + 32 * t, last), float32(1))
                for i in range(WARP * warp(), WARP * warp() + WARP, KEYS):
                    one, other = load(rows, start + i + g, q), load(rows, start + i + g + 8, q)
                    s = score(values, one, other)
                    to = uint32(shared + ROW * (HEADS * pass_ + g) + 4 * (i + 2 * t))
                    if HEADS * pass_ + g < heads:
                        store_shared_f32(to, s[0])
                        store_shared_f32(uint32(to + 4), s[1])
                        store_shared_f32(uint32(to + 32), s[2])
                        store_shared_f32(uint32(to + 36), s[3])
        sync_block()

    return stage


def joined(group: int) -> Any:
    """The function that returns a thread's key's best score over `group` queries from r on."""

    @device
    def best_of(shared, r):
        at = shared + ROW * r + 4 * thread()
        best = load_shared(uint32(at))
        for g in range(1, group):
            best = max(best, load_shared(uint32(at + ROW * g)))
        return best

    return best_of
