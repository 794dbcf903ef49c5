"""Sixteen elements at a time: weights of every encoding to floats, dot products with float16 keys.

The number of elements is always a multiple of 16. LLVM splits the vectors if the CPU's registers
are narrower.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from tamis.jit_kernels.cpu.lang.half import widened_half
from tamis.jit_kernels.cpu.lang.intrinsic import (
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    float32,
    int64,
    op,
    pointer,
    void,
)
from tamis.jit_kernels.cpu.lang.simd import fused

LANES = 16
VECTOR, HALF_VECTOR = ir.VectorType(FLOAT, LANES), ir.VectorType(I16, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)


def _at(b: Any, address: Any, index: Any, size: int) -> Any:
    """The address of element `index` of `size` bytes."""
    return b.add(address, b.mul(index, ir.Constant(I64, size)))


def _load(b: Any, address: Any) -> Any:
    return b.load(pointer(b, address, VECTOR), align=1)


def _load_half(b: Any, address: Any) -> Any:
    return widened_half(b, b.load(pointer(b, address, HALF_VECTOR), align=1))


def _sum(b: Any, vector: Any) -> Any:
    """Sum of the lanes by halves, always in the same order."""
    n = LANES
    undefined = ir.Constant(VECTOR, ir.Undefined)
    while n > 1:
        n //= 2
        picks = [ir.Constant(I32, n + i if i < n else 0) for i in range(LANES)]
        high = b.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(I32, LANES), picks))
        vector = b.fadd(vector, high)
    return b.extract_element(vector, ir.Constant(I32, 0))


def _splat(b: Any, value: Any) -> Any:
    undefined = ir.Constant(VECTOR, ir.Undefined)
    one = b.insert_element(undefined, value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return b.shuffle_vector(one, undefined, zeros)


@op(float32, int64, int64, int64)
def dot_half(b, x, h, n):
    """The dot product of f32 x [n] and f16 h [n]."""
    cell = cgutils.alloca_once_value(b, ZERO)
    with cgutils.for_range_slice(b, I64(0), n, I64(LANES), I64) as (k, _):
        product = fused(b, _load(b, _at(b, x, k, 4)), _load_half(b, _at(b, h, k, 2)), b.load(cell))
        b.store(product, cell)
    return _sum(b, b.load(cell))


@op(float32, int64, int64, int64)
def dot_float(b, x, y, n):
    """The dot product of f32 x and y [n]."""
    cell = cgutils.alloca_once_value(b, ZERO)
    with cgutils.for_range_slice(b, I64(0), n, I64(LANES), I64) as (k, _):
        at = b.mul(k, I64(4))
        product = fused(b, _load(b, b.add(x, at)), _load(b, b.add(y, at)), b.load(cell))
        b.store(product, cell)
    return _sum(b, b.load(cell))


@op(void, int64, float32, int64, int64)
def add_scaled_half(b, y, a, h, n):
    """Add a * h to y: f32 y [n], f16 h [n]."""
    scale = _splat(b, a)
    with cgutils.for_range_slice(b, I64(0), n, I64(LANES), I64) as (k, _):
        at = _at(b, y, k, 4)
        value = fused(b, scale, _load_half(b, _at(b, h, k, 2)), _load(b, at))
        b.store(value, pointer(b, at, VECTOR), align=1)


# ---- decoding: 16 values a step, value = d * q + m -----------------------------------------------
BYTES, WORDS = ir.VectorType(I8, LANES), ir.VectorType(I32, LANES)


def _words(n: int) -> Any:
    return ir.Constant(WORDS, [n] * LANES)


def _splat_word(b: Any, value: Any) -> Any:
    undefined = ir.Constant(WORDS, ir.Undefined)
    one = b.insert_element(undefined, b.trunc(value, I32), ir.Constant(I32, 0))
    return b.shuffle_vector(one, undefined, _words(0))


def _bits(b: Any, address: Any, shift: Any, mask: int) -> Any:
    """(bytes >> shift) & mask of 16 bytes, as 32-bit lanes."""
    words = b.zext(b.load(pointer(b, address, BYTES), align=1), WORDS)
    return b.and_(b.lshr(words, _splat_word(b, shift)), _words(mask))


def _store_affine(b: Any, out: Any, q: Any, d: Any, m: Any) -> None:
    value = fused(b, b.sitofp(q, VECTOR), _splat(b, d), _splat(b, m))
    b.store(value, pointer(b, out, VECTOR), align=1)


@op(void, int64, int64, int64, float32, float32)
def decode_u2(b, out, low, shift, d, m):
    """Write 16 floats d * q + m to out; q: the 2-bit field at bit `shift` of each byte at low."""
    _store_affine(b, out, _bits(b, low, shift, 3), d, m)


@op(void, int64, int64, int64, float32, float32)
def decode_u4(b, out, low, shift, d, m):
    """Write 16 floats d * q + m to out; q: the nibble at `shift` (0 or 4) of each byte at low."""
    _store_affine(b, out, _bits(b, low, shift, 15), d, m)


@op(void, int64, int64, int64, int64, float32, float32)
def decode_u5_mask(b, out, low, shift, bits, d, m):
    """As decode_u4; bit i of `bits` is the fifth bit of element i."""
    lanes = ir.Constant(WORDS, list(range(LANES)))
    high = b.and_(b.lshr(_splat_word(b, bits), lanes), _words(1))
    q = b.or_(_bits(b, low, shift, 15), b.shl(high, _words(4)))
    _store_affine(b, out, q, d, m)


@op(void, int64, int64, int64, int64, int64, float32, float32)
def decode_u5(b, out, low, shift, high, high_shift, d, m):
    """As decode_u4; the fifth bit is bit `high_shift` of each byte at high."""
    top = b.shl(_bits(b, high, high_shift, 1), _words(4))
    _store_affine(b, out, b.or_(_bits(b, low, shift, 15), top), d, m)


@op(void, int64, int64, int64, int64, int64, float32, float32)
def decode_u6(b, out, low, shift, high, high_shift, d, m):
    """As decode_u4; bits 4 and 5 are the field at `high_shift` of each byte at high."""
    top = b.shl(_bits(b, high, high_shift, 3), _words(4))
    _store_affine(b, out, b.or_(_bits(b, low, shift, 15), top), d, m)


@op(void, int64, int64, float32)
def decode_i8(b, out, p, d):
    """Write 16 floats to out: the int8s at p times d."""
    q = b.sext(b.load(pointer(b, p, BYTES), align=1), WORDS)
    _store_affine(b, out, q, d, ir.Constant(FLOAT, 0.0))


@op(void, int64, int64)
def decode_half(b, out, p):
    """Write 16 floats to out: the float16s at p."""
    b.store(_load_half(b, p), pointer(b, out, VECTOR), align=1)
