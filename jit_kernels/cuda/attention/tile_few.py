"""A warp's products of up to eight queries with 16 keys on tensor cores, at 22 bits.

Rows g of the queries' matrix are float16 parts of query g, rows g + 8 its residual: together 22
bits. With g = lane / 4 and t = lane % 4 (see mma_f16), a lane has pieces of eight elements of keys
in their order in memory: the order of a sum over elements is arbitrary, so they need not be moved.
Everything is unrolled while IR is built. For an 8-bit or 4-bit KV cache see tile_bytes.py.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cuda.kv.kv_rows import loading_halves
from tamis.jit_kernels.cuda.lang.intrinsic import (
    FLOAT,
    HALF,
    I32,
    I64,
    float32,
    floats,
    int64,
    op,
    packed,
    uint32,
    void,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    HIGH_HALVES,
    LOW_HALVES,
    MMA_F16,
    STORE_SHARED_IF,
    emit,
)

KEYS = 16
FOUR = types.UniTuple(float32, 4)


def parts(b: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Split two float32: a word of their float16 parts, a word of the residuals."""
    rest = [b.fsub(x, b.fpext(b.fptrunc(x, HALF), FLOAT)) for x in (low, high)]
    return packed(b, low, high), packed(b, *rest)


class Scoring(NamedTuple):
    """Functions of rows of n elements. A lane has elements 8t .. 8t + 7 of every 32."""

    read_q: Any  # (address, address of the last piece) -> float32: the lane's pieces of query g
    load_q: Any  # (these, scale) -> queries
    load_key: Any  # (row's address, 8t, m) -> the lane's first m pieces of a key, in flight
    score: Any  # (queries, key g, key g + 8) -> g . keys 2t, 2t + 1, 2t + 8, 2t + 9
    n_piece: int


def scoring_of(n: int) -> Scoring:
    """The functions for rows of n float16, n a multiple of 8."""
    n_piece = -(-n // 32)
    q_kind, k_kind = types.UniTuple(uint32, 8 * n_piece), types.UniTuple(uint32, 4 * n_piece)

    x_kind = types.UniTuple(float32, 8 * n_piece)

    @op(x_kind, int64, int64)
    def read_q(b, address, last):
        found: list[Any] = []
        for i in range(n_piece):
            at = last if i == n_piece - 1 else b.add(address, ir.Constant(I64, 128 * i))
            found += floats(b, at, 8)
        return found

    @op(q_kind, x_kind, float32)
    def load_q(b, x, scale):
        found: list[Any] = []
        for i in range(0, len(x), 2):
            found += parts(b, b.fmul(x[i], scale), b.fmul(x[i + 1], scale))
        return found

    @op(FOUR, q_kind, k_kind, k_kind)
    def score(b, q, first, second):
        found: list[Any] = []
        for key in (first, second):
            # two sums, which do not wait for each other
            sums = [[ir.Constant(FLOAT, 0.0)] * 4 for _ in range(2)]
            for i in range(2 * n_piece):
                part, two = q[4 * i : 4 * i + 4], key[2 * i : 2 * i + 2]
                sums[i % 2] = emit(b, MMA_F16, [*part, *two, *sums[i % 2]])
            x = [b.fadd(*pair) for pair in zip(*sums, strict=True)]
            found += [b.fadd(x[0], x[2]), b.fadd(x[1], x[3])]
        return found

    return Scoring(read_q, load_q, loading_halves(n_piece, 32), score, n_piece)


class Weighing(NamedTuple):
    """Functions of values of n elements. A lane has elements 8g .. 8g + 7 of every 64."""

    load_value: Any  # (row's address, 8g, m) -> the lane's first m pieces of a value
    weigh: Any  # (sums, weights of values 2t, 2t + 1, 2t + 8, 2t + 9, these) -> sums
    scaled: Any  # (sums, factor of query g) -> sums
    store: Any  # (sums, address, m): query g's, of pieces before the m-th, to shared memory
    zero: Any  # () -> sums of zeros
    n_piece: int


def weighing_of(n: int) -> Weighing:
    """The functions for values of n float16, n a multiple of 16."""
    n_piece = -(-n // 64)
    v_kind, kind = types.UniTuple(uint32, 4 * n_piece), types.UniTuple(float32, 32 * n_piece)

    @op(kind, kind, FOUR, v_kind, v_kind, v_kind, v_kind)
    def weigh(b, sums, w, *values):
        found, part = [], [*parts(b, w[0], w[1]), *parts(b, w[2], w[3])]
        for i in range(8 * n_piece):
            halves = HIGH_HALVES if i % 2 else LOW_HALVES
            v = [x[i // 2] for x in values]
            two = emit(b, halves, v[:2]) + emit(b, halves, v[2:])
            found += emit(b, MMA_F16, [*part, *two, *sums[4 * i : 4 * i + 4]])
        return found

    @op(kind, kind, float32)
    def scaled(b, sums, factor):
        return [b.fmul(x, factor) for x in sums]

    @op(void, kind, uint32, uint32)
    def store(b, sums, address, m):
        for i in range(8 * n_piece):
            live = b.zext(b.icmp_unsigned(">", m, ir.Constant(I32, i // 8)), I32)
            x = sums[4 * i : 4 * i + 4]
            for j in range(2):
                at = b.add(address, ir.Constant(I32, 4 * (i // 8 * 64 + 8 * j + i % 8)))
                emit(b, STORE_SHARED_IF, [at, b.fadd(x[j], x[j + 2]), live])

    zero = op(kind)(lambda b: [ir.Constant(FLOAT, 0.0)] * len(kind))
    return Weighing(loading_halves(n_piece, 64), weigh, scaled, store, zero, n_piece)
