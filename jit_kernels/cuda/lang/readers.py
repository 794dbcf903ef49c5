"""Loads of quantized blocks: the same functions for device and for shared memory.

Device memory is constant: no kernel of the same launch writes what is read.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cuda.lang.intrinsic import (
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    U4,
    float32,
    int64,
    load_constant,
    load_shared,
    op,
    uint32,
)
from tamis.jit_kernels.cuda.lang.ptx import BYTES_OF_TWO, emit

U9 = types.UniTuple(uint32, 9)


class Readers(NamedTuple):
    """Load functions of one memory; addresses are int64, in shared memory too."""

    const_f16: Any  # the float16 as float32
    const_i8: Any  # the int8 as float32
    const_u8: Any
    const_u16: Any
    const_u128: Any  # four uint32 of an address that is a multiple of 16
    words: Any  # four uint32 of a multiple of 4
    words_even: Any  # four uint32 of a multiple of 2; the two bytes before may be read as well
    words_any: Any  # four uint32 of any address; the three bytes before and after may be read, too
    block_of_34: Any  # at a multiple of 2: the 16 bits there, and the eight uint32 after them; the
    # two bytes before and after may be read as well


def readers_of(load: Callable[..., Any]) -> Readers:
    """The functions for a memory whose LLVM loads are load(builder, address, type, align)."""

    def row(b: Any, start: Any, n: int) -> list[Any]:
        return [load(b, b.add(start, ir.Constant(I64, 4 * i)), I32, 4) for i in range(n)]

    def neighbours(b: Any, parts: list[Any], chosen: Any) -> list[Any]:
        """For each pair of neighbouring words, the four bytes that `chosen` selects (PTX prmt)."""
        pairs = itertools.pairwise(parts)
        return [found for pair in pairs for found in emit(b, BYTES_OF_TWO, [*pair, chosen])]

    def is_odd(b: Any, p: Any) -> Any:
        return b.icmp_unsigned("!=", b.and_(p, ir.Constant(I64, 2)), ir.Constant(I64, 0))

    def even(b: Any, p: Any) -> list[Any]:
        parts = row(b, b.and_(p, ir.Constant(I64, ~3)), 4)
        last = load(b, b.add(p, ir.Constant(I64, 14)), I16, 2)
        parts.append(b.zext(last, I32))
        chosen = b.select(is_odd(b, p), ir.Constant(I32, 0x5432), ir.Constant(I32, 0x3210))
        return neighbours(b, parts, chosen)

    def anywhere(b: Any, p: Any) -> list[Any]:
        parts = row(b, b.and_(p, ir.Constant(I64, ~3)), 4)
        last = b.and_(b.add(p, ir.Constant(I64, 15)), ir.Constant(I64, ~3))  # of the last byte
        parts.append(load(b, last, I32, 4))
        skipped = b.trunc(b.and_(p, ir.Constant(I64, 3)), I32)
        one_more = b.mul(skipped, ir.Constant(I32, 0x1111))  # in each nibble
        return neighbours(b, parts, b.add(one_more, ir.Constant(I32, 0x3210)))

    def block(b: Any, p: Any) -> list[Any]:
        parts, odd = row(b, b.and_(p, ir.Constant(I64, ~3)), 9), is_odd(b, p)
        chosen = b.select(odd, ir.Constant(I32, 0x7654), ir.Constant(I32, 0x5432))
        first = b.select(odd, b.lshr(parts[0], ir.Constant(I32, 16)), parts[0])
        return [first, *neighbours(b, parts, chosen)]

    def vector(b: Any, p: Any) -> list[Any]:
        four = load(b, p, ir.VectorType(I32, 4), 16)
        return [b.extract_element(four, ir.Constant(I32, i)) for i in range(4)]

    return Readers(
        op(float32, int64)(lambda b, p: b.fpext(load(b, p, HALF, 2), FLOAT)),
        op(float32, int64)(lambda b, p: b.sitofp(load(b, p, I8, 1), FLOAT)),
        op(uint32, int64)(lambda b, p: b.zext(load(b, p, I8, 1), I32)),
        op(uint32, int64)(lambda b, p: b.zext(load(b, p, I16, 2), I32)),
        op(U4, int64)(vector),
        op(U4, int64)(lambda b, p: row(b, p, 4)),
        op(U4, int64)(even),
        op(U4, int64)(anywhere),
        op(U9, int64)(block),
    )


DEVICE, SHARED = readers_of(load_constant), readers_of(load_shared)
const_f16, const_i8, const_u8, const_u16, const_u128, words, words_even, words_any, block_of_34 = (
    DEVICE
)
