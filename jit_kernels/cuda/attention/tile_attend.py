"""A warp's tile of attention in registers: 16 query tokens of one head against n_keys keys.

Shapes are those of mma_f16: with g = lane / 4 and t = lane % 4 a lane has rows g and g + 8, and of
every 8 columns 2t and 2t + 1. Everything is unrolled while IR is built.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cuda.attention.attend_epilogue import LOWEST, MASKED
from tamis.jit_kernels.cuda.lang.intrinsic import (
    FLOAT,
    I32,
    float32,
    int64,
    op,
    packed,
    pair,
    put_pair,
    uint32,
    void,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    EXP2,
    LOAD_MATRICES,
    LOAD_MATRICES_TRANSPOSED,
    LOAD_SHARED_PAIR,
    MMA_F16,
    SHUFFLE_XOR,
    STORE_SHARED,
    emit,
)
from tamis.jit_kernels.cuda.lang.register_tiles import lanes_of

TWO = types.UniTuple(float32, 2)
LIMITS = types.UniTuple(int64, 3)


class Tile(NamedTuple):
    """The functions of a tile. TWO: two float32, one for each of a lane's two rows."""

    load_q: Any  # (row address, other row's, scale) -> queries, float16
    score: Any  # (queries, address) -> scores: keys at the lane's address of load_matrices
    mask: Any  # (scores, positions, biases, (first row's position, window, how much
    # later the second row is)) -> scores
    highest: Any  # (scores, TWO) -> TWO: of the rows of the whole tile
    weights: Any  # (scores, TWO) -> exp2(scores - of the row)
    row_sums: Any  # weights -> TWO, of this lane's columns
    weigh: Any  # (sums, weights, address) -> sums + weights @ values
    scaled: Any  # (sums, TWO) -> sums
    store: Any  # (sums, address): to shared memory, rows of head_dim + 2
    store_two: Any  # (TWO, address): likewise, a row's one number
    write: Any  # (sums, row address, other row's, how many of them there are): to device memory
    over_quad: Any  # TWO -> TWO summed over the four lanes of a row
    exp2_of: Any
    plus: Any
    times: Any
    lowest: Any  # () -> TWO
    none: Any  # () -> TWO of zeros
    zero: Any  # () -> sums of zeros


def _constant(kind: Any, value: float) -> Any:
    return op(kind)(lambda b: [ir.Constant(FLOAT, value)] * len(kind))


def _offset(b: Any, address: Any, n_bytes: int) -> Any:
    return b.add(address, ir.Constant(I32, n_bytes))


def _quad(b: Any, value: Any, combine: Any) -> Any:
    """Reduce a value over the four lanes of a row (a quad)."""
    for mask in (1, 2):
        value = combine(value, emit(b, SHUFFLE_XOR, [value, ir.Constant(I32, mask)])[0])
    return value


def _larger(b: Any) -> Any:
    return lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y)


def _scoring(head_dim: int, n_keys: int, row: int) -> tuple[Any, Any]:
    """The functions load_q and score: query fragments, and q @ K.T."""
    q_kind, s_kind = types.UniTuple(uint32, head_dim // 4), types.UniTuple(float32, n_keys // 2)

    @op(q_kind, int64, int64, float32)
    def load_q(b, first, second, scale):
        found = []
        for c in range(head_dim // 16):
            for column in (16 * c, 16 * c + 8):
                for address in (first, second):
                    low, high = pair(b, address, 4 * column)
                    found.append(packed(b, b.fmul(low, scale), b.fmul(high, scale)))
        return found

    @op(s_kind, q_kind, uint32)
    def score(b, q, address):
        found = []
        for key in range(0, n_keys, 16):
            left, right = ([ir.Constant(FLOAT, 0.0)] * 4 for _ in range(2))
            for c in range(head_dim // 16):
                at = _offset(b, address, key * row + 32 * c)
                k, part = emit(b, LOAD_MATRICES, [at]), q[4 * c : 4 * c + 4]
                left = emit(b, MMA_F16, [*part, *k[:2], *left])
                right = emit(b, MMA_F16, [*part, *k[2:], *right])
            found += left + right
        return found

    return load_q, score


def _softmax(n_keys: int) -> tuple[Any, Any, Any, Any]:
    """The functions mask, highest, weights and row_sums: the online softmax."""
    s_kind = types.UniTuple(float32, n_keys // 2)

    @op(s_kind, s_kind, uint32, uint32, LIMITS)
    def mask(b, s, positions, biases, limits):
        found = []
        newest = b.trunc(limits[0], I32)
        window = b.trunc(limits[1], I32)
        rows = [newest, b.add(newest, b.trunc(limits[2], I32))]
        for i in range(n_keys // 8):
            where = emit(b, LOAD_SHARED_PAIR, [_offset(b, positions, 32 * i)])
            bias = emit(b, LOAD_SHARED_PAIR, [_offset(b, biases, 32 * i)])
            for e in range(4):
                age = b.sub(rows[e // 2], where[e % 2])
                seen = b.icmp_unsigned("<", age, window)  # not after p, and not too old
                value = b.fadd(s[4 * i + e], b.bitcast(bias[e % 2], FLOAT))
                found.append(b.select(seen, value, ir.Constant(FLOAT, MASKED)))
        return found

    @op(TWO, s_kind, TWO)
    def highest(b, s, row_max):
        found, larger = list(row_max), _larger(b)
        for i, x in enumerate(s):
            found[i % 4 // 2] = larger(found[i % 4 // 2], x)
        return [_quad(b, x, larger) for x in found]

    @op(s_kind, s_kind, TWO)
    def weights(b, s, row_max):
        return [emit(b, EXP2, [b.fsub(x, row_max[i % 4 // 2])])[0] for i, x in enumerate(s)]

    @op(TWO, s_kind)
    def row_sums(b, w):
        found = [w[0], w[2]]
        for i, x in enumerate(w):
            if i not in (0, 2):
                found[i % 4 // 2] = b.fadd(found[i % 4 // 2], x)
        return found

    return mask, highest, weights, row_sums


def _weighing(head_dim: int, n_keys: int, row: int) -> tuple[Any, Any]:
    """The functions weigh (weights @ V) and scaled (sums * alpha)."""
    w_kind, sums_kind = types.UniTuple(float32, n_keys // 2), types.UniTuple(float32, head_dim // 2)

    @op(sums_kind, sums_kind, w_kind, uint32)
    def weigh(b, sums, w, address):
        found = list(sums)
        for key in range(0, n_keys, 16):
            at = key // 2
            part = [packed(b, w[at + i], w[at + i + 1]) for i in (0, 2, 4, 6)]
            for c in range(head_dim // 16):
                there = _offset(b, address, key * row + 32 * c)
                v = emit(b, LOAD_MATRICES_TRANSPOSED, [there])
                for j, two in ((8 * c, v[:2]), (8 * c + 4, v[2:])):
                    found[j : j + 4] = emit(b, MMA_F16, [*part, *two, *found[j : j + 4]])
        return found

    @op(sums_kind, sums_kind, TWO)
    def scaled(b, sums, f):
        return [b.fmul(x, f[i % 4 // 2]) for i, x in enumerate(sums)]

    return weigh, scaled


def _storing(head_dim: int) -> tuple[Any, Any, Any]:
    """The functions store, store_two and write, of results."""
    apart = 8 * (4 * head_dim + 8)  # bytes between a lane's two rows

    @op(void, types.UniTuple(float32, head_dim // 2), uint32)
    def store(b, sums, address):
        for i, value in enumerate(sums):
            at = i // 4 * 32 + i % 2 * 4 + i % 4 // 2 * apart
            emit(b, STORE_SHARED, [_offset(b, address, at), value])

    @op(void, TWO, uint32)
    def store_two(b, two, address):
        for i, value in enumerate(two):
            emit(b, STORE_SHARED, [_offset(b, address, i * apart), value])

    @op(void, types.UniTuple(float32, head_dim // 2), int64, int64, uint32)
    def write(b, sums, first, second, n):
        for half, address in enumerate((first, second)):
            with b.if_then(b.icmp_unsigned(">", n, ir.Constant(I32, half))):
                for c in range(head_dim // 8):
                    put_pair(b, address, 32 * c, sums[4 * c + 2 * half : 4 * c + 2 * half + 2])

    return store, store_two, write


def tile_of(head_dim: int, n_keys: int, row: int) -> Tile:
    """The functions for n_keys keys (a multiple of 16) in shared memory, rows `row` bytes apart."""
    assert head_dim % 16 == 0
    load_q, score = _scoring(head_dim, n_keys, row)
    mask, highest, weights, row_sums = _softmax(n_keys)
    weigh, scaled = _weighing(head_dim, n_keys, row)
    exp2_of, plus, times = lanes_of(2)
    store, store_two, write = _storing(head_dim)
    over_quad = op(TWO, TWO)(lambda b, x: [_quad(b, value, b.fadd) for value in x])
    sums_kind = types.UniTuple(float32, head_dim // 2)
    return Tile(
        load_q, score, mask, highest, weights, row_sums, weigh, scaled, store, store_two,
        write, over_quad, exp2_of, plus, times, _constant(TWO, LOWEST), _constant(TWO, 0.0),
        _constant(sums_kind, 0.0),
    )  # fmt: skip
