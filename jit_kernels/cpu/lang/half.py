"""Float16 to float32 and back, as LLVM IR of scalars and vectors, at every level of CPU features.

Without the instructions LLVM would call a function of the compiler's run-time library, which the
process need not have.
"""

from typing import Any

from llvmlite import ir

from tamis.jit_kernels.cpu.lang import features

HALF, FLOAT = ir.HalfType(), ir.FloatType()
I16, I32 = ir.IntType(16), ir.IntType(32)


def const(like: ir.Type, values: Any) -> ir.Constant:
    """A constant of the type; one number fills all lanes of a vector."""
    if isinstance(like, ir.VectorType) and not isinstance(values, list):
        values = [values] * like.count
    return ir.Constant(like, values)


def lanes_of(element: ir.Type, like: Any) -> ir.Type:
    """The type with this element and as many lanes as the value or type `like`."""
    kind = like if isinstance(like, ir.Type) else like.type
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def widened_half(b: Any, bits: Any) -> Any:
    """The float vector of a vector of half bits (i16 lanes)."""
    floats = lanes_of(FLOAT, bits)
    if features.current().fused:
        return b.fpext(b.bitcast(bits, lanes_of(HALF, bits)), floats)
    words = lanes_of(I32, bits)
    wide = b.zext(bits, words)
    sign = b.shl(b.and_(wide, const(words, 0x8000)), const(words, 16))
    rest = b.shl(b.and_(wide, const(words, 0x7FFF)), const(words, 13))
    # As a float this is the value * 2^-112, subnormal halves included; 2^112 is exact.
    scaled = b.bitcast(b.fmul(b.bitcast(rest, floats), const(floats, 2.0**112)), words)
    special = b.icmp_unsigned(">=", rest, const(words, 0x0F800000))
    infinite = b.or_(rest, const(words, 0x7F800000))
    return b.bitcast(b.or_(b.select(special, infinite, scaled), sign), floats)


def narrowed_half(b: Any, x: Any) -> Any:
    """Half bits (i16 lanes) of a float vector, rounded to nearest even."""
    if features.current().fused:
        return b.bitcast(b.fptrunc(x, lanes_of(HALF, x)), lanes_of(I16, x))
    words, floats = lanes_of(I32, x), x.type
    bits = b.bitcast(x, words)
    sign = b.and_(b.lshr(bits, const(words, 16)), const(words, 0x8000))
    size = b.and_(bits, const(words, 0x7FFFFFFF))
    # Subnormal halves: a sum with 0.5 leaves them, rounded to even, in the lowest bits.
    small = b.bitcast(b.fadd(b.bitcast(size, floats), const(floats, 0.5)), words)
    small = b.sub(small, const(words, 0x3F000000))
    odd = b.and_(b.lshr(size, const(words, 13)), const(words, 1))
    normal = b.add(b.sub(size, const(words, 112 << 23)), b.add(odd, const(words, 0xFFF)))
    normal = b.lshr(normal, const(words, 13))
    large = b.icmp_unsigned(">=", size, const(words, 0x47800000))
    normal = b.select(large, const(words, 0x7C00), normal)
    normal = b.select(b.icmp_unsigned("<", size, const(words, 0x38800000)), small, normal)
    nan = b.icmp_unsigned(">", size, const(words, 0x7F800000))
    half = b.or_(b.select(nan, const(words, 0x7E00), normal), sign)
    return b.trunc(half, lanes_of(I16, x))
