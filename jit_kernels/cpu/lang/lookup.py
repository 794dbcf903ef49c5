"""Dequantize 64 codes to signed bytes: codebook (grid) rows, sign bits, base-3 digits.

A grid is a constant of the object code. Its rows are loaded one by one, which takes less time than
a gather.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from tamis.jit_kernels.cpu.lang.half import const, widened_half
from tamis.jit_kernels.cpu.lang.intrinsic import (
    FLOAT,
    I1,
    I8,
    I16,
    I32,
    I64,
    int64,
    op,
    pointer,
    void,
)
from tamis.jit_kernels.cpu.lang.simd import (
    Vec,
    f32x4,
    f32x8,
    f32x16,
    i8x16,
    i8x64,
    joined,
    shuffled,
    splatted,
    vector_op,
)

BYTES = i8x64.ir


def _lanes(kind: Any, n: int) -> Any:
    return ir.VectorType(kind, n)


def _load(b: Any, p: Any, offset: int, kind: Any) -> Any:
    return b.load(pointer(b, b.add(p, ir.Constant(I64, offset)), kind), align=1)


def _vector(b: Any, parts: Sequence[Any]) -> Any:
    vector = ir.Constant(_lanes(parts[0].type, len(parts)), ir.Undefined)
    for i, part in enumerate(parts):
        vector = b.insert_element(vector, part, ir.Constant(I32, i))
    return vector


# ---- codebooks -----------------------------------------------------------------------------------
def codes_at(
    offsets: Sequence[int], shifts: Sequence[int] = (), bits: int = 0
) -> Callable[..., Any]:
    """Make the reader of grid indices: low bytes at p + offsets, high `bits` from q.

    The high bits of index i are the field at bit shifts[i] of the uint32 at q.
    """

    def numbers(b: Any, p: Any, q: Any) -> list[Any]:
        codes = [b.zext(_load(b, p, i, I8), I64) for i in offsets]
        if not shifts:
            return codes
        high = b.shl(b.zext(_load(b, q, 0, I32), I64), ir.Constant(I64, 8))
        mask = ir.Constant(I64, ((1 << bits) - 1) << 8)
        tops = [b.and_(b.lshr(high, ir.Constant(I64, shift)), mask) for shift in shifts]
        return [b.or_(code, top) for code, top in zip(codes, tops, strict=True)]

    return numbers


def nine_bits(b: Any, p: Any, _q: Any) -> list[Any]:
    """Eight grid indices: the low 9 bits of each uint16 at p."""
    words = [b.zext(_load(b, p, 2 * i, I16), I64) for i in range(8)]
    return [b.and_(word, ir.Constant(I64, 511)) for word in words]


def grid_rows(grid: np.ndarray, numbers: Callable[..., list[Any]]) -> Any:
    """Make the operation (p, q) -> i8x64: gathers rows of grid, int8 [n, 8 or 4].

    numbers(b, p, q): the LLVM values of the rows' indices.
    """
    word = ir.IntType(8 * grid.shape[1])
    rows = np.ascontiguousarray(grid).view(f"<u{grid.shape[1]}").reshape(-1).tolist()
    kind = ir.ArrayType(word, len(rows))

    @op(i8x64, int64, int64)
    def lookup(b, p, q):
        table = ir.GlobalVariable(b.module, kind, b.module.get_unique_name("grid"))
        table.linkage, table.global_constant, table.unnamed_addr = "internal", True, True
        table.initializer = ir.Constant(kind, rows)
        places = [b.gep(table, [ir.Constant(I64, 0), i]) for i in numbers(b, p, q)]
        return b.bitcast(_vector(b, [b.load(at, align=1) for at in places]), BYTES)

    return lookup


# ---- signs ---------------------------------------------------------------------------------------
def _with_parity(b: Any, sevens: Any) -> Any:
    """64 sign bits of eight lanes: 7 stored ones each, and the eighth that makes the count even."""
    parity = sevens
    for distance in (4, 2, 1):
        parity = b.xor(parity, b.lshr(parity, const(sevens.type, distance)))
    top = b.shl(b.and_(parity, const(sevens.type, 1)), const(sevens.type, 7))
    return b.bitcast(b.trunc(b.or_(sevens, top), _lanes(I8, 8)), I64)


@op(int64, int64, int64)
def signs_of_words(b, p, q):
    """64 sign bits: the four 7-bit fields of the uint32 at p, then at q, with parity bits."""
    words = joined(b, *(splatted(b, _load(b, at, 0, I32), 4) for at in (p, q)))
    shifts = ir.Constant(words.type, [0, 7, 14, 21] * 2)
    return _with_parity(b, b.and_(b.lshr(words, shifts), const(words.type, 127)))


@op(int64, int64)
def signs_of_shorts(b, p):
    """64 sign bits: the upper 7 bits of each of eight uint16 at p, with parity bits."""
    shorts = _load(b, p, 0, _lanes(I16, 8))
    return _with_parity(b, b.lshr(shorts, const(shorts.type, 9)))


@op(int64, int64)
def load_bits(b, p):
    """The 64 bits at p (any alignment)."""
    return _load(b, p, 0, I64)


@op(i8x64, i8x64, int64)
def negated(b, x, bits):
    """The bytes of x, byte i negated where bit i is set."""
    zero = const(BYTES, 0)
    return b.select(b.bitcast(bits, _lanes(I1, 64)), b.sub(zero, x), x)


@op(i8x64, int64)
def plus_or_minus(b, bits):
    """Byte i is 1 where bit i is set, else -1."""
    return b.select(b.bitcast(bits, _lanes(I1, 64)), const(BYTES, 1), const(BYTES, -1))


@op(i8x64, i8x64, int64)
def nudged(b, x, bits):
    """Bytes 8 i .. 8 i + 7 plus 1, or minus 1 where bit i (0 to 7) is set."""
    mask = b.bitcast(b.trunc(bits, I8), _lanes(I1, 8))
    words = _lanes(I64, 8)
    up, down = const(words, 0x0101010101010101), const(words, -1)
    return b.add(x, b.bitcast(b.select(mask, down, up), BYTES))


@op(int64, i8x64)
def sign_bits(b, x):
    """A bit for each byte: set where it is negative."""
    return b.bitcast(b.icmp_signed("<", x, const(BYTES, 0)), I64)


@vector_op(lambda p, x: void if isinstance(x, Vec) else None)
def scatter_words(b, p, x):
    """Write the 32-bit words of x, 64 bytes apart."""
    n = x.type.count * x.type.element.width // 32
    words = b.bitcast(x, _lanes(I32, n))
    for i in range(n):
        at = pointer(b, b.add(p, ir.Constant(I64, 64 * i)), I32)
        b.store(b.extract_element(words, ir.Constant(I32, i)), at, align=1)


# ---- two bits, three values ----------------------------------------------------------------------
@op(i8x64, int64)
def pairs_in_order(b, p):
    """The 64 2-bit fields of 16 bytes at p, lowest first, minus 1 each."""
    words = b.zext(_load(b, p, 0, _lanes(I8, 16)), _lanes(I32, 16))
    spread = words
    for shift in (6, 12, 18):  # field i comes to the low bits of byte i
        spread = b.or_(spread, b.shl(words, const(words.type, shift)))
    return b.sub(b.and_(b.bitcast(spread, BYTES), const(BYTES, 3)), const(BYTES, 1))


@op(i8x64, i8x64)
def leading_digits(b, x):
    """The leading base-3 digit of each byte, read as a fraction of 256, minus 1."""
    above = b.zext(b.icmp_unsigned(">", x, const(BYTES, 170)), BYTES)
    return b.add(above, b.sext(b.icmp_unsigned("<", x, const(BYTES, 86)), BYTES))


@op(i8x16, int64)
def four_tripled(b, p):
    """The four bytes at p, times 1, 3, 9 and 27."""
    words = b.bitcast(splatted(b, _load(b, p, 0, I32), 4), i8x16.ir)
    return b.mul(words, ir.Constant(i8x16.ir, [3 ** (i // 4) for i in range(16)]))


# ---- scales --------------------------------------------------------------------------------------
def _floats(b: Any, lanes: Any) -> Any:
    return b.uitofp(lanes, _lanes(FLOAT, lanes.type.count))


def _nibbles(b: Any, p: Any, n: int) -> Any:
    """The nibbles of n bytes as floats: a low one, then the high one."""
    shorts = b.zext(_load(b, p, 0, _lanes(I8, n)), _lanes(I16, n))
    apart = b.or_(shorts, b.shl(shorts, const(shorts.type, 4)))
    fields = b.bitcast(b.and_(apart, const(shorts.type, 0x0F0F)), _lanes(I8, 2 * n))
    return _floats(b, b.zext(fields, _lanes(I32, 2 * n)))


@op(f32x8, int64)
def nibbles_x8(b, p):
    """The nibbles of 4 bytes as floats: a low one, then the high one."""
    return _nibbles(b, p, 4)


@op(f32x16, int64)
def nibbles_x16(b, p):
    """The same of 8 bytes."""
    return _nibbles(b, p, 8)


@op(f32x8, int64)
def top_nibbles_x8(b, p):
    """The upper 4 bits of 8 uint32 as floats."""
    words = _load(b, p, 0, _lanes(I32, 8))
    return _floats(b, b.lshr(words, const(words.type, 28)))


@op(f32x8, int64)
def top_nibbles_of_pairs(b, p):
    """The upper 4 bits of every second of 16 uint32 at p, as floats."""
    words = _load(b, p, 0, _lanes(I32, 16))
    odd = shuffled(b, words, words, range(1, 16, 2))
    return _floats(b, b.lshr(odd, const(odd.type, 28)))


@op(f32x8, int64)
def bits_12_to_14(b, p):
    """Bits 12 to 14 of 8 uint16 as floats."""
    words = b.zext(_load(b, p, 0, _lanes(I16, 8)), _lanes(I32, 8))
    return _floats(b, b.and_(b.lshr(words, const(words.type, 12)), const(words.type, 7)))


@op(f32x16, int64)
def threes_of_shorts(b, p):
    """The four lowest 3-bit fields of each of 4 uint16 at p, as 16 floats."""
    words = b.zext(_load(b, p, 0, _lanes(I16, 4)), _lanes(I32, 4))
    each = shuffled(b, words, words, [i // 4 for i in range(16)])
    shifts = ir.Constant(each.type, [0, 3, 6, 9] * 4)
    return _floats(b, b.and_(b.lshr(each, shifts), const(each.type, 7)))


@op(f32x16, int64)
def half_of_top_nibbles(b, p):
    """The float16 made of the upper nibbles of 4 uint16, lowest first, in all lanes."""
    word, made = _load(b, p, 0, I64), ir.Constant(I64, 0)
    for i in range(4):
        top = b.lshr(word, ir.Constant(I64, 12 + 12 * i))
        made = b.or_(made, b.and_(top, ir.Constant(I64, 15 << 4 * i)))
    return widened_half(b, splatted(b, b.trunc(made, I16), 16))


@op(f32x4, int64)
def halved_ue4m3(b, p):
    """Four UE4M3 scales (4 exponent bits of bias 7, 3 mantissa bits), halved."""
    codes = b.and_(_load(b, p, 0, _lanes(I8, 4)), const(_lanes(I8, 4), 0x7F))
    shorts = b.shl(b.zext(codes, _lanes(I16, 4)), const(_lanes(I16, 4), 7))
    # As float16, whose bias is 15; ggml's 0x7F is 0, 0xFF is not.
    values = b.fmul(widened_half(b, shorts), const(f32x4.ir, 128.0))
    none = b.icmp_unsigned("==", _load(b, p, 0, _lanes(I8, 4)), const(codes.type, 0x7F))
    return b.select(none, const(f32x4.ir, 0.0), values)


@op(i8x64, int64)
def nibbles_of_eights(b, p):
    """The 64 nibbles of 32 bytes, by groups of eight bytes: low nibbles, then high ones."""
    words = _load(b, p, 0, _lanes(I64, 4))
    each = shuffled(b, words, words, [i // 2 for i in range(8)])
    moved = b.lshr(each, ir.Constant(each.type, [0, 4] * 4))
    return b.and_(b.bitcast(moved, BYTES), const(BYTES, 15))


@op(void, int64, i8x64, f32x16)
def store_scaled(b, out, x, scales):
    """Write 64 signed bytes to out as floats, byte i times scales[i // 4]."""
    for k in range(4):
        part = shuffled(b, x, x, range(16 * k, 16 * k + 16))
        factor = shuffled(b, scales, scales, [4 * k + i // 4 for i in range(16)])
        floats = b.sitofp(b.sext(part, _lanes(I32, 16)), f32x16.ir)
        at = b.add(out, ir.Constant(I64, 64 * k))
        b.store(b.fmul(floats, factor), pointer(b, at, f32x16.ir), align=1)
