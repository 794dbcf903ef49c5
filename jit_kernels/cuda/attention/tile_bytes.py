"""The products of tile_few.py for a KV cache of q8_0 and q4_0.

Keys are multiplied as integers, without conversion: with queries of 15 bits, two signed bytes an
element and a scale for 32 of them; the keys' own scales are applied after the product. Values
become float16 as their bytes are packed into words. Everything is unrolled while IR is built.
"""

from typing import Any

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cuda.attention import tile_few
from tamis.jit_kernels.cuda.attention.tile_few import FOUR, Scoring, Weighing, parts
from tamis.jit_kernels.cuda.kv.kv_rows import BIASES, key_bytes, value_bytes
from tamis.jit_kernels.cuda.lang.intrinsic import (
    FLOAT,
    HALF,
    I16,
    I32,
    I64,
    float32,
    floats,
    fma,
    int64,
    nearest,
    op,
    uint32,
    void,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    AND_OR,
    AND_XOR,
    BYTES_OF_TWO,
    FMA_HALVES,
    HIGH_BYTES,
    LANE,
    LOW_BYTES,
    MMA_F16,
    MMA_S8,
    MULTIPLY_HALVES,
    SHUFFLE_I32,
    SHUFFLE_XOR,
    STORE_SHARED_IF,
    SUBTRACT_HALVES,
    emit,
)

STEPS = 127 * 128  # steps of the largest of 32 elements
TINY = 1e-30  # elements up to this size count as 0
Q = 5  # words of a lane's eight elements of a query: high bytes, low ones, twice; their step
# Converts halves 1024 + 16 n, whose nibble is four bits up, to n - 8.
SIXTEENTHS, LESS_72 = 0x2C002C00, 0xD480D480


def _word(value: int) -> Any:
    return ir.Constant(I32, value)


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _together(b: Any, four: list[Any]) -> Any:
    """The low bytes of four words, packed into one."""
    low, high = (emit(b, BYTES_OF_TWO, [*four[i : i + 2], _word(0x0040)])[0] for i in (0, 2))
    return emit(b, BYTES_OF_TWO, [low, high, _word(0x5410)])[0]


def _fifteen_bits(b: Any, x: list[Any]) -> list[Any]:
    """Quantise eight elements of a query to 15 bits; four lanes (32 elements) share a scale."""
    top = zero = ir.Constant(FLOAT, 0.0)
    for one in x:
        top = _larger(b, _larger(b, one, b.fsub(zero, one)), top)
    for lanes in (1, 2):
        top = _larger(b, emit(b, SHUFFLE_XOR, [top, _word(lanes)])[0], top)
    some = b.fcmp_ordered(">", top, ir.Constant(FLOAT, TINY))
    inverse = b.fdiv(ir.Constant(FLOAT, float(STEPS)), top)
    inverse = b.select(some, inverse, zero)
    whole = [nearest(b, b.fmul(one, inverse)) for one in x]
    high = [b.ashr(b.add(n, _word(64)), _word(7)) for n in whole]
    low = [b.sub(n, b.shl(h, _word(7))) for n, h in zip(whole, high, strict=True)]
    step = b.bitcast(b.fmul(top, ir.Constant(FLOAT, 1 / STEPS)), I32)
    halves = (high[:4], low[:4], high[4:], low[4:])
    return [*(_together(b, four) for four in halves), step]


def _half(b: Any, word: Any, late: int) -> Any:
    """One of a word's two float16 as float32."""
    bits = b.lshr(word, _word(16)) if late else word
    return b.fpext(b.bitcast(b.trunc(bits, I16), HALF), FLOAT)


def _signed_nibbles(b: Any, word: Any) -> list[Any]:
    """The nibbles minus 8 as signed bytes times 16: low ones, then high ones."""
    moved = b.shl(word, _word(4)), word
    return [emit(b, AND_XOR, [x, _word(0xF0F0F0F0), _word(0x80808080)])[0] for x in moved]


def scoring_of(n: int, type: str) -> Scoring:
    """The functions for keys of n elements of one of KV_TYPES."""
    if type == "f16":
        return tile_few.scoring_of(n)
    keys = key_bytes(type, n)
    x_kind, q_kind = types.UniTuple(float32, 8 * keys.n), types.UniTuple(uint32, Q * keys.n)

    @op(x_kind, int64, int64)
    def read_q(b, address, _last):
        first, apart = address, 16
        if type == "q4_0":  # elements 4t .. 4t + 3 and 16 further, not 8t .. 8t + 7
            t = b.zext(b.and_(emit(b, LANE, [])[0], _word(3)), I64)
            first, apart = b.sub(address, b.shl(t, ir.Constant(I64, 4))), 64
        found: list[Any] = []
        for at in (128 * i + far for i in range(keys.n) for far in (0, apart)):
            found += floats(b, b.add(first, ir.Constant(I64, at)), 4)
        return found

    @op(q_kind, x_kind, float32)
    def load_q(b, x, scale):
        if type == "q4_0":  # whose bytes are 16 times as large
            scale = b.fmul(scale, ir.Constant(FLOAT, 1 / 16))
        x, found = [b.fmul(one, scale) for one in x], []
        for i in range(0, len(x), 8):
            found += _fifteen_bits(b, x[i : i + 8])
        return found

    @op(FOUR, q_kind, keys.kind, keys.kind)
    def score(b, q, first, second):
        lane, zeros = emit(b, LANE, [])[0], [_word(0)] * 4
        source = b.shl(b.and_(lane, _word(3)), _word(3))  # a lane of key 2t; four on, of 2t + 1
        found: list[Any] = []
        for key in (first, second):
            scales = [
                [emit(b, SHUFFLE_I32, [word, lane_])[0] for word in keys.scales(key)]
                for lane_ in (source, b.add(source, _word(4)))
            ]
            sums: list[Any] = [ir.Constant(FLOAT, 0.0)] * 2
            for i in range(keys.n):
                *bytes_, step = q[Q * i : Q * (i + 1)]
                two = keys.piece(key, i)
                two = two if type == "q8_0" else _signed_nibbles(b, two[0])
                whole = emit(b, MMA_S8, [*bytes_, *two, *zeros])
                for j in range(2):
                    n_step = b.add(b.shl(whole[j], _word(7)), whole[j + 2])
                    x = b.fmul(b.sitofp(n_step, FLOAT), b.bitcast(step, FLOAT))
                    sums[j] = fma(b, x, _half(b, scales[j][i // 2], i % 2), sums[j])
            found += sums
        return found

    load = op(keys.kind, int64, int64, uint32)(
        lambda b, row, d, m: keys.load(b, row, _bytes_before(b, type, d), m)
    )
    return Scoring(read_q, load_q, load, score, keys.n)


def _bytes_before(b: Any, type: str, d: Any) -> Any:
    """The byte offset of a lane's first piece; d: its first element."""
    return d if type == "q8_0" else b.lshr(d, ir.Constant(I64, 1))


def _pairs(b: Any, type: str, one: list[Any], other: list[Any], scale: Any) -> list[Any]:
    """Two values' pieces as words of two float16, one element of each."""

    def scaled(word: Any) -> Any:
        return emit(b, MULTIPLY_HALVES, [word, scale])[0]

    def picked(x: Any, y: Any, chosen: int) -> Any:
        return emit(b, BYTES_OF_TWO, [x, y, _word(chosen)])[0]

    found: list[Any] = []
    if type == "q8_0":
        for x, y in zip(one, other, strict=True):
            for chosen in (0x5140, 0x7362):  # a byte of each alternately
                mixed = b.xor(picked(x, y, chosen), _word(0x80808080))
                for pick in (LOW_BYTES, HIGH_BYTES):
                    two = emit(b, pick, [mixed])
                    found += emit(b, SUBTRACT_HALVES, [*two, _word(BIASES[type])])
        return [scaled(word) for word in found]
    late: list[Any] = []
    for chosen in (0x5410, 0x7632):  # two bytes of each
        mixed = picked(one[0], other[0], chosen)
        for two in (mixed, b.lshr(mixed, _word(8))):
            low, high = (
                emit(b, AND_OR, [two, _word(bits), _word(0x64006400)])[0]
                for bits in (0x000F000F, 0x00F000F0)
            )
            found += emit(b, SUBTRACT_HALVES, [low, _word(BIASES[type])])
            late += emit(b, FMA_HALVES, [high, _word(SIXTEENTHS), _word(LESS_72)])
    return [scaled(word) for word in (*found, *late)]


def weighing_of(n: int, type: str) -> Weighing:
    """The functions for values of n elements of one of KV_TYPES."""
    if type == "f16":
        return tile_few.weighing_of(n)
    halves, values = tile_few.weighing_of(n), value_bytes(type, n)
    v_kind, kind = values.kind, types.UniTuple(float32, 32 * values.n)

    @op(kind, kind, FOUR, v_kind, v_kind, v_kind, v_kind)
    def weigh(b, sums, w, *v):
        found, part = [], [*parts(b, w[0], w[1]), *parts(b, w[2], w[3])]
        late = b.icmp_unsigned(">", emit(b, LANE, [])[0], _word(15))
        chosen = b.select(late, _word(0x7632), _word(0x5410))  # the second block of 64 elements
        scales = [values.scales(x) for x in v]
        for i in range(values.n):
            pieces = [values.piece(x, i) for x in v]
            two = [
                _pairs(
                    b, type, pieces[j], pieces[j + 1],
                    emit(b, BYTES_OF_TWO, [scales[j][i], scales[j + 1][i], chosen])[0],
                )
                for j in (0, 2)
            ]  # fmt: skip
            for j in range(8):
                at = 4 * (8 * i + j)
                found += emit(b, MMA_F16, [*part, two[0][j], two[1][j], *sums[at : at + 4]])
        return found

    @op(void, kind, uint32, uint32)
    def store(b, sums, address, m):
        # Lane t has columns 2t and 2t + 1: elements 4 (2t % 4) .. of block t / 2, and 16 further.
        odd = b.and_(emit(b, LANE, [])[0], _word(1))
        first = b.sub(address, b.shl(odd, _word(5)))
        for i in range(8 * values.n):
            live = b.zext(b.icmp_unsigned(">", m, _word(i // 8)), I32)
            x = sums[4 * i : 4 * i + 4]
            for j in range(2):
                at = 64 * (i // 8) + 4 * j + i % 4 + 16 * (i % 8 // 4)
                there = b.add(first, _word(4 * at))
                emit(b, STORE_SHARED_IF, [there, b.fadd(x[j], x[j + 2]), live])

    load = op(v_kind, int64, int64, uint32)(
        lambda b, row, d, m: values.load(b, row, _bytes_before(b, type, d), m)
    )
    store = halves.store if type == "q8_0" else store
    return Weighing(load, weigh, halves.scaled, store, halves.zero, values.n)
