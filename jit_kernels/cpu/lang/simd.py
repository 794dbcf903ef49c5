"""A SIMD vocabulary for kernels: vector types that live in registers and one-line operations.

A vector is named by lane and count: i8x32, f32x16. Operations read their width from their operands:
`fma(x, y, z)` serves any float vector; only what makes a vector (`load_i8x32`, `splat_f32x8`) is
named by its type. `vf` is the float vector of this CPU, LANES wide; `load_f`, `zero_f` and the like
make one, so that a float kernel is written once. Counts and shifts in an operation's arguments are
literals. Operators: + - * / on floats, + - * & | ^ on integers (wrapping).

Every operation is correct on every CPU: if features.py turns an instruction off, or a vector is
wider than the registers, it is lowered to narrower ones or to plain LLVM IR that needs no library.
Floating point follows the flags of the kernel's compilation; nothing here relies on their absence.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from tamis.jit_kernels.cpu.lang import features
from tamis.jit_kernels.cpu.lang.half import const, lanes_of, narrowed_half, widened_half
from tamis.jit_kernels.cpu.lang.intrinsic import (
    FLOAT,
    I1,
    I8,
    I16,
    I32,
    I64,
    call,
    float32,
    int64,
    op,
    pointer,
    void,
)

CPU = features.current()
LANES = 16 if CPU.avx512 else 8


class Vec(types.Type):
    """The Numba type of a vector: kind "i" or "f", bits a lane, n lanes."""

    def __init__(self, kind: str, bits: int, n: int) -> None:
        self.kind, self.bits, self.n = kind, bits, n
        super().__init__(name=f"{kind}{bits}x{n}")

    @property
    def ir(self) -> ir.VectorType:
        """The LLVM type."""
        return ir.VectorType(FLOAT if self.kind == "f" else ir.IntType(self.bits), self.n)


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vec: Vec) -> None:
        super().__init__(manager, vec, vec.ir)


f32x4 = Vec("f", 32, 4)
i8x8, i8x16, i8x32, i8x64 = (Vec("i", 8, n) for n in (8, 16, 32, 64))
i16x8, i16x16, i16x32 = (Vec("i", 16, n) for n in (8, 16, 32))
i32x8, i32x16 = (Vec("i", 32, n) for n in (8, 16))
f32x8, f32x16 = (Vec("f", 32, n) for n in (8, 16))
vf = f32x16 if LANES == 16 else f32x8


# ---- LLVM IR helpers -----------------------------------------------------------------------------
def shuffled(b: Any, x: Any, y: Any, picks: Sequence[int]) -> Any:
    """Lanes `picks` of x followed by y."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(picks)), list(picks)))


def splatted(b: Any, scalar: Any, n: int) -> Any:
    """A scalar in all n lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, n), ir.Undefined)
    one = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return shuffled(b, one, undefined, [0] * n)


def halves(b: Any, x: Any) -> tuple[Any, Any]:
    """The lower and the upper half of the lanes."""
    n = x.type.count
    return shuffled(b, x, x, range(n // 2)), shuffled(b, x, x, range(n // 2, n))


def joined(b: Any, x: Any, y: Any) -> Any:
    """The lanes of x, then those of y."""
    return shuffled(b, x, y, range(2 * x.type.count))


def by_halves(b: Any, body: Callable[..., Any], *args: Any) -> Any:
    """body(b, *args) made of two calls on half as wide vectors."""
    low, high = zip(*(halves(b, x) for x in args), strict=True)
    return joined(b, body(b, *low), body(b, *high))


def vector_op(
    rule: Callable[..., types.Type | None] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of any vector type from `body(builder, *llvm_values)`.

    rule(*types) is the type of the result, or None where the operation has no such form. Without
    a rule all arguments and the result have one type. Literal integers are passed to the body as
    Python ints. A body of result type void returns None.
    """
    choose = rule or (lambda first, *rest: first if all(t == first for t in rest) else None)

    def decorate(body: Callable[..., Any]) -> Any:
        def typed(*args: types.Type) -> Any:
            result = choose(*args)
            if result is None:
                return None

            def codegen(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
                literal = types.IntegerLiteral
                made = body(
                    builder,
                    *(
                        t.literal_value if isinstance(t, literal) else v
                        for t, v in zip(args, values, strict=True)
                    ),
                )
                return context.get_dummy_value() if made is None else made

            return result(*args), codegen

        # Numba reads the number of parameters from the function's signature.
        by_count = [
            lambda _t: typed(),
            lambda _t, a: typed(a),
            lambda _t, a, b: typed(a, b),
            lambda _t, a, b, c: typed(a, b, c),
            lambda _t, a, b, c, d: typed(a, b, c, d),
            lambda _t, a, b, c, d, e: typed(a, b, c, d, e),
            lambda _t, a, b, c, d, e, f: typed(a, b, c, d, e, f),
        ][body.__code__.co_argcount - 1]
        by_count.__name__ = by_count.__qualname__ = body.__name__
        by_count.__module__, by_count.__doc__ = body.__module__, body.__doc__
        return intrinsic(prefer_literal=True)(by_count)

    return decorate


def _each(make: Callable[[Vec], Any], *vectors: Vec) -> tuple[Any, ...]:
    return tuple(make(vec) for vec in vectors)


def _named(name: str, doc: str, body: Callable[..., Any]) -> Callable[..., Any]:
    body.__name__, body.__doc__ = name, doc
    return body


def _is(vec: Any, kind: str = "if", bits: int = 0) -> bool:
    return isinstance(vec, Vec) and vec.kind in kind and bits in (0, vec.bits)


# ---- memory: any alignment -----------------------------------------------------------------------
def _load(vec: Vec) -> Any:
    def body(b: Any, p: Any) -> Any:
        return b.load(pointer(b, p, vec.ir), align=1)

    return op(vec, int64)(_named(f"load_{vec.name}", f"The {vec.name} at p.", body))


def _store(vec: Vec) -> Any:
    def body(b: Any, p: Any, x: Any) -> None:
        b.store(x, pointer(b, p, vec.ir), align=1)

    return op(void, int64, vec)(_named(f"store_{vec.name}", f"Write an {vec.name} at p.", body))


load_i8x8, load_i8x16, load_i8x32, load_i8x64 = _each(_load, i8x8, i8x16, i8x32, i8x64)
load_i16x8, load_i16x16, load_i16x32 = _each(_load, i16x8, i16x16, i16x32)
load_i32x8, load_i32x16, load_f32x8, load_f32x16 = _each(_load, i32x8, i32x16, f32x8, f32x16)
load_f32x4, store_f32x4 = _load(f32x4), _store(f32x4)
store_i8x8, store_i8x16, store_i8x32, store_i8x64 = _each(_store, i8x8, i8x16, i8x32, i8x64)
store_i16x8, store_i16x16, store_i16x32 = _each(_store, i16x8, i16x16, i16x32)
store_i32x8, store_i32x16, store_f32x8, store_f32x16 = _each(_store, i32x8, i32x16, f32x8, f32x16)


def _load_half(vec: Vec) -> Any:
    def body(b: Any, p: Any) -> Any:
        return widened_half(b, b.load(pointer(b, p, lanes_of(I16, vec.ir)), align=1))

    return op(vec, int64)(_named(f"load_f16x{vec.n}", "Float16s at p as float32.", body))


def _store_half(vec: Vec) -> Any:
    def body(b: Any, p: Any, x: Any) -> None:
        b.store(narrowed_half(b, x), pointer(b, p, lanes_of(I16, vec.ir)), align=1)

    doc = "Write float32s at p as float16s, rounded to nearest even."
    return op(void, int64, vec)(_named(f"store_f16x{vec.n}", doc, body))


def _load_brain(vec: Vec) -> Any:
    def body(b: Any, p: Any) -> Any:
        words = lanes_of(I32, vec.ir)
        wide = b.zext(b.load(pointer(b, p, lanes_of(I16, vec.ir)), align=1), words)
        return b.bitcast(b.shl(wide, const(words, 16)), vec.ir)

    return op(vec, int64)(_named(f"load_bf16x{vec.n}", "Bfloat16s at p as float32.", body))


load_f16x8, load_f16x16 = _each(_load_half, f32x8, f32x16)
store_f16x8, store_f16x16 = _each(_store_half, f32x8, f32x16)
load_bf16x8, load_bf16x16 = _each(_load_brain, f32x8, f32x16)


def _store_low(vec: Vec, bits: int, name: str) -> Any:
    def body(b: Any, p: Any, x: Any) -> None:
        narrow = lanes_of(ir.IntType(bits), vec.ir)
        b.store(b.trunc(x, narrow), pointer(b, p, narrow), align=1)

    doc = f"Write the low {bits} bits of int32s at p."
    return op(void, int64, vec)(_named(f"store_low_{name}_x{vec.n}", doc, body))


store_low_bytes_x8, store_low_bytes_x16 = (_store_low(v, 8, "bytes") for v in (i32x8, i32x16))
store_low_words_x8, store_low_words_x16 = (_store_low(v, 16, "words") for v in (i32x8, i32x16))


def ask_for(b: Any, p: Any) -> None:
    """Emit a prefetch of the cache line at p into the cache that features.reads_ahead names."""
    hints = [ir.Constant(I32, n) for n in (0, features.reads_ahead()[0], 1)]  # read, cache, data
    call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer(b, p, I8), *hints])


@op(void, int64)
def prefetch(b, p):
    """Prefetch the cache line at p; any address is allowed."""
    ask_for(b, p)


# ---- the same in all lanes -----------------------------------------------------------------------
def _splat(vec: Vec) -> Any:
    def body(b: Any, x: Any) -> Any:
        narrow = vec.ir.element
        return splatted(b, x if vec.kind == "f" else b.trunc(x, narrow), vec.n)

    doc = "The low bits of x in all lanes." if vec.kind == "i" else "x in all lanes."
    scalar = float32 if vec.kind == "f" else int64
    return op(vec, scalar)(_named(f"splat_{vec.name}", doc, body))


def _zero(vec: Vec) -> Any:
    def body(b: Any) -> Any:
        return const(vec.ir, 0.0 if vec.kind == "f" else 0)

    return op(vec)(_named(f"zero_{vec.name}", "Zero in all lanes.", body))


def _count(vec: Vec) -> Any:
    def body(b: Any) -> Any:
        return const(vec.ir, list(range(vec.n)))

    return op(vec)(_named(f"count_{vec.name}", "The lanes 0, 1, 2, ...", body))


def _broadcast_f32(vec: Vec) -> Any:
    def body(b: Any, p: Any) -> Any:
        return splatted(b, b.load(pointer(b, p, FLOAT), align=1), vec.n)

    name, doc = f"broadcast_f32_x{vec.n}", "The float32 at p in all lanes."
    return op(vec, int64)(_named(name, doc, body))


def _broadcast_f16(vec: Vec) -> Any:
    # Widened as a vector: the widening of one scalar half is a vpinsrw into a register that is in
    # use, and the false dependency halves the speed of a loop over blocks.
    def body(b: Any, p: Any) -> Any:
        return widened_half(b, splatted(b, b.load(pointer(b, p, I16), align=1), vec.n))

    name, doc = f"broadcast_f16_x{vec.n}", "The float16 at p as float32 in all lanes."
    return op(vec, int64)(_named(name, doc, body))


splat_i8x16, splat_i8x32, splat_i8x64 = _each(_splat, i8x16, i8x32, i8x64)
splat_i16x16, splat_i16x32 = _each(_splat, i16x16, i16x32)
splat_i32x8, splat_i32x16 = _each(_splat, i32x8, i32x16)
splat_f32x8, splat_f32x16 = _each(_splat, f32x8, f32x16)
zero_i8x32, zero_i8x64, zero_i16x16, zero_i16x32 = _each(_zero, i8x32, i8x64, i16x16, i16x32)
zero_i32x8, zero_i32x16, zero_f32x8, zero_f32x16 = _each(_zero, i32x8, i32x16, f32x8, f32x16)
zero_f32x4 = _zero(f32x4)
count_i32x8, count_i32x16 = _each(_count, i32x8, i32x16)
broadcast_f32_x8, broadcast_f32_x16 = _each(_broadcast_f32, f32x8, f32x16)
broadcast_f16_x8, broadcast_f16_x16 = _each(_broadcast_f16, f32x8, f32x16)

# The float vector of this CPU.
_WIDE = LANES == 16
load_f, store_f = (load_f32x16, store_f32x16) if _WIDE else (load_f32x8, store_f32x8)
load_half, store_half = (load_f16x16, store_f16x16) if _WIDE else (load_f16x8, store_f16x8)
load_brain = load_bf16x16 if _WIDE else load_bf16x8
splat_f, zero_f = (splat_f32x16, zero_f32x16) if _WIDE else (splat_f32x8, zero_f32x8)
broadcast_f = broadcast_f32_x16 if _WIDE else broadcast_f32_x8
broadcast_half = broadcast_f16_x16 if _WIDE else broadcast_f16_x8
store_low_bytes = store_low_bytes_x16 if _WIDE else store_low_bytes_x8
store_low_words = store_low_words_x16 if _WIDE else store_low_words_x8
# Its companion of 32-bit integers.
load_i, store_i = (load_i32x16, store_i32x16) if _WIDE else (load_i32x8, store_i32x8)
splat_i = splat_i32x16 if _WIDE else splat_i32x8
count_i = count_i32x16 if _WIDE else count_i32x8


# ---- operators -----------------------------------------------------------------------------------
def _operator(python: Any, on_int: str | None, on_float: str | None) -> None:
    """Define a Python operator on vectors of one type.

    on_int, on_float: names of the IR builder's methods for integer and float lanes.
    """

    @infer_global(python)
    class Operator(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and isinstance(args[0], Vec) and args[0] == args[1]:
                return signature(args[0], *args) if _method(args[0]) else None
            return None

    def _method(vec: Vec) -> str | None:
        return on_float if vec.kind == "f" else on_int

    @lower_builtin(python, Vec, Vec)
    def lower(_context: Any, b: Any, sig: Any, args: Any) -> Any:
        name = _method(sig.return_type)
        assert name is not None
        return getattr(b, name)(*args)


for _symbol, _on_int, _on_float in (
    ("add", "add", "fadd"),
    ("sub", "sub", "fsub"),
    ("mul", "mul", "fmul"),
    ("and_", "and_", None),
    ("or_", "or_", None),
    ("xor", "xor", None),
):
    _operator(getattr(operator, _symbol), _on_int, _on_float)
    _operator(getattr(operator, "i" + _symbol.rstrip("_")), _on_int, _on_float)
_operator(operator.truediv, None, "fdiv")
_operator(operator.itruediv, None, "fdiv")


# ---- arithmetic ----------------------------------------------------------------------------------
def fused(b: Any, x: Any, y: Any, z: Any) -> Any:
    """The sum x * y + z, in one rounding where the CPU can."""
    if CPU.fused:
        return call(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])
    # llvm.fma would call the C library once a lane where the CPU has no such instruction.
    return b.fadd(b.fmul(x, y), z)


def larger(b: Any, x: Any, y: Any) -> Any:
    """The larger of two vectors, lane by lane."""
    is_float = x.type.element == FLOAT
    return b.select((b.fcmp_ordered if is_float else b.icmp_signed)(">", x, y), x, y)


def smaller(b: Any, x: Any, y: Any) -> Any:
    """The smaller of two vectors, lane by lane."""
    is_float = x.type.element == FLOAT
    return b.select((b.fcmp_ordered if is_float else b.icmp_signed)("<", x, y), x, y)


def magnitude(b: Any, x: Any) -> Any:
    """Absolute values; the lowest integer stays as it is (as unsigned it is right)."""
    if x.type.element == FLOAT:
        return call(b, f"llvm.fabs.v{x.type.count}f32", x.type, [x])
    name = f"llvm.abs.v{x.type.count}i{x.type.element.width}"
    return call(b, name, x.type, [x, ir.Constant(I1, 0)])


def rounded(b: Any, x: Any) -> Any:
    """Nearest int32 of each lane, ties to even; |x| < 2^31."""
    n, words = x.type.count, lanes_of(I32, x)
    if CPU.avx512 and n == 16:
        masked = [x, const(words, 0), ir.Constant(I16, -1), ir.Constant(I32, 4)]  # 4: MXCSR's mode
        return call(b, "llvm.x86.avx512.mask.cvtps2dq.512", words, masked)
    if CPU.avx2 and n == 8:
        return call(b, "llvm.x86.avx.cvt.ps2dq.256", words, [x])
    if CPU.neon and n == 4:
        return call(b, "llvm.aarch64.neon.fcvtns.v4i32.v4f32", words, [x])
    if (CPU.avx2 and n == 16) or (CPU.neon and n > 4):
        return by_halves(b, rounded, x)
    whole = b.fptosi(x, words)
    size = magnitude(b, b.fsub(x, b.sitofp(whole, x.type)))  # exact
    odd = b.icmp_unsigned("!=", b.and_(whole, const(words, 1)), const(words, 0))
    tie = b.and_(b.fcmp_ordered("==", size, const(x.type, 0.5)), odd)
    away = b.or_(b.fcmp_ordered(">", size, const(x.type, 0.5)), tie)
    one = b.or_(b.ashr(b.bitcast(x, words), const(words, 31)), const(words, 1))  # x's sign
    return b.add(whole, b.select(away, one, const(words, 0)))


def _float_only(*args: Any) -> Any:
    return args[0] if all(_is(t, "f") and t == args[0] for t in args) else None


@vector_op(_float_only)
def fma(b, x, y, z):
    """The sum x * y + z, in one rounding where the CPU can."""
    return fused(b, x, y, z)


@vector_op()
def vmax(b, x, y):
    """The larger, lane by lane; y where either is NaN."""
    return larger(b, x, y)


@vector_op()
def vmin(b, x, y):
    """The smaller, lane by lane; y where either is NaN."""
    return smaller(b, x, y)


def _chosen_rule(a: Any, b: Any, x: Any, y: Any) -> Any:
    return x if a == b and x == y and _is(a) and _is(x) and a.n == x.n else None


@vector_op(_chosen_rule)
def where_less(b, a, c, x, y):
    """Lanes of x where a < c, else of y."""
    compare = b.fcmp_ordered if a.type.element == FLOAT else b.icmp_signed
    return b.select(compare("<", a, c), x, y)


@vector_op()
def vabs(b, x):
    """Absolute values; the lowest integer wraps to itself, which is right as unsigned."""
    return magnitude(b, x)


@vector_op(_float_only)
def vsqrt(b, x):
    """Square roots."""
    return call(b, f"llvm.sqrt.v{x.type.count}f32", x.type, [x])


@vector_op(lambda x: Vec("i", 32, x.n) if _is(x, "f") else None)
def round_i32(b, x):
    """Nearest int32, ties to even; |x| < 2^31."""
    return rounded(b, x)


@vector_op(lambda x: Vec("f", 32, x.n) if _is(x, "i", 32) else None)
def to_f32(b, x):
    """Int32s as float32s."""
    return b.sitofp(x, lanes_of(FLOAT, x))


@vector_op(lambda x: Vec("i", 2 * x.bits, x.n) if _is(x, "i") and x.bits < 32 else None)
def widen(b, x):
    """Signed lanes of twice the bits."""
    return b.sext(x, lanes_of(ir.IntType(2 * x.type.element.width), x))


@vector_op(lambda x: Vec("i", 2 * x.bits, x.n) if _is(x, "i") and x.bits < 32 else None)
def widen_unsigned(b, x):
    """Unsigned lanes of twice the bits."""
    return b.zext(x, lanes_of(ir.IntType(2 * x.type.element.width), x))


def folded(b: Any, x: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """Reduce the lanes with `join`, halving the vector each time: a fixed order of operations."""
    while x.type.count > 1:
        x = join(b, *halves(b, x))
    return b.extract_element(x, ir.Constant(I32, 0))


def _lane_type(x: Any) -> types.Type | None:
    return (float32 if x.kind == "f" else types.int32) if _is(x, bits=32) else None


@vector_op(_lane_type)
def hsum(b, x):
    """Sum of the lanes (32 bits each), by halves."""
    is_float = x.type.element == FLOAT
    return folded(b, x, lambda b, low, high: (b.fadd if is_float else b.add)(low, high))


@vector_op(_lane_type)
def hmax(b, x):
    """The largest lane (32 bits each)."""
    return folded(b, x, larger)


@vector_op(lambda x, y: int64 if _is(x, "i", 32) and x == y else None)
def count_at_least(b, x, y):
    """How many lanes of x are at least those of y."""
    n = x.type.count
    mask = b.bitcast(b.icmp_signed(">=", x, y), ir.IntType(n))
    return b.zext(call(b, f"llvm.ctpop.i{n}", ir.IntType(n), [mask]), ir.IntType(64))


@vector_op(lambda x, y: int64 if _is(x, "i", 32) and x == y else None)
def bits_at_least(b, x, y):
    """A word with bit i set where lane i of x is at least that of y."""
    mask = b.bitcast(b.icmp_signed(">=", x, y), ir.IntType(x.type.count))
    return b.zext(mask, I64)


@vector_op(lambda x, y: int64 if _is(x, "f") and x == y else None)
def bits_above(b, x, y):
    """A word with bit i set where lane i of x is above that of y."""
    mask = b.bitcast(b.fcmp_ordered(">", x, y), ir.IntType(x.type.count))
    return b.zext(mask, I64)


@op(int64, int64, int64, int64)
def bits_from(b, low, high, first):
    """64 of the 128 bits of two words, from bit `first` (0 to 63) of the lower one on."""
    return call(b, "llvm.fshr.i64", I64, [high, low, first])


@op(int64, int64)
def count_bits(b, word):
    """How many bits are set."""
    return call(b, "llvm.ctpop.i64", I64, [word])


@op(int64, int64)
def lowest_bit(b, word):
    """The number of the lowest bit that is set; word is not 0."""
    return call(b, "llvm.cttz.i64", I64, [word, ir.Constant(I1, 1)])


def _chosen_lanes(p: Any, x: Any, bits: Any) -> Any:
    fits = _is(x, bits=32) and isinstance(p, types.Integer) and isinstance(bits, types.Integer)
    return types.void if fits else None


@vector_op(_chosen_lanes)
def store_chosen(b, p, x, bits):
    """Write the lanes whose bits are set one after the other; a whole vector is written at p."""
    n, kind = x.type.count, x.type.element
    if CPU.avx512 and n == 16:
        mask = b.bitcast(b.trunc(bits, I16), ir.VectorType(I1, n))
        name = f"llvm.x86.avx512.mask.compress.v16{'f32' if kind == FLOAT else 'i32'}"
        b.store(call(b, name, x.type, [x, const(x.type, 0), mask]), pointer(b, p, x.type), align=1)
        return
    for i in range(n):
        # Written always, stepped over where chosen: no branch that a CPU would guess wrong.
        b.store(b.extract_element(x, ir.Constant(I32, i)), pointer(b, p, kind), align=1)
        bit = b.and_(b.lshr(bits, ir.Constant(I64, i)), ir.Constant(I64, 1))
        p = b.add(p, b.shl(bit, ir.Constant(I64, 2)))


@vector_op(lambda p, x, y, z: void if p == int64 and _is(x, "i", 32) and x == y == z else None)
def pack_at_least(b, p, items, x, bar):
    """Write the items whose lane of x is at least bar's, one after the other from p on."""
    n, mask = x.type.count, b.icmp_signed(">=", x, bar)
    if CPU.avx512 and n == 16:
        # Packed in a register, then stored: Zen 4 takes over 100 cycles to do both at once.
        packed = call(
            b, "llvm.x86.avx512.mask.compress.v16i32", x.type, [items, const(x.type, 0), mask]
        )
        count = call(b, "llvm.ctpop.i32", I32, [b.zext(b.bitcast(mask, I16), I32)])
        bits = b.sub(b.shl(ir.Constant(I32, 1), count), ir.Constant(I32, 1))
        first = b.bitcast(b.trunc(bits, I16), ir.VectorType(I1, n))
        args = [packed, pointer(b, p, x.type), ir.Constant(I32, 4), first]
        call(b, "llvm.masked.store.v16i32.p0v16i32", ir.VoidType(), args)
        return
    call(b, f"llvm.masked.compressstore.v{n}i32", ir.VoidType(), [items, pointer(b, p, I32), mask])


# ---- lanes ---------------------------------------------------------------------------------------
def _shifted(x: Any, k: Any) -> Any:
    return x if _is(x, "i") and isinstance(k, types.IntegerLiteral) else None


@vector_op(_shifted)
def shift_right(b, x, k):
    """Lanes shifted right by k bits, zeros from the left."""
    return b.lshr(x, const(x.type, k))


@vector_op(_shifted)
def shift_left(b, x, k):
    """Lanes shifted left by k bits."""
    return b.shl(x, const(x.type, k))


def _repeated(x: Any, *args: Any) -> Any:
    literal = all(isinstance(a, types.IntegerLiteral) for a in args)
    return Vec(x.kind, x.bits, args[-1].literal_value) if _is(x) and literal else None


def _half_type(x: Any) -> types.Type | None:
    return Vec(x.kind, x.bits, x.n // 2) if _is(x) else None


@vector_op(_shifted)
def shift_right_signed(b, x, k):
    """Lanes shifted right by k bits, copies of the sign from the left."""
    return b.ashr(x, const(x.type, k))


@vector_op(lambda x, i: float32 if _is(x, "f") and isinstance(i, types.Integer) else None)
def lane(b, x, i):
    """Lane i of a float vector; i may be known only at run time, though that is slow."""
    return b.extract_element(x, i if isinstance(i, ir.Value) else ir.Constant(I32, i))


@op(f32x4, float32, float32)
def doubled(b, x, y):
    """x, x, y, y."""
    return joined(b, splatted(b, x, 2), splatted(b, y, 2))


def _halves_in_blocks(_p: Any, _stride: Any, n: Any) -> types.Type | None:
    return Vec("f", 32, 2 * n.literal_value) if isinstance(n, types.IntegerLiteral) else None


def _words_of_halves(b: Any, p: Any, stride: Any, n: int, picks: Sequence[int]) -> Any:
    """Two float16 are read at each of p, p + stride, ...; of them the lanes `picks`, as float32."""
    words = ir.Constant(ir.VectorType(I32, n), ir.Undefined)
    step = ir.Constant(I64, stride) if isinstance(stride, int) else stride
    for i in range(n):
        at = b.add(p, b.mul(step, ir.Constant(I64, i)))
        word = b.load(pointer(b, at, I32), align=1)
        words = b.insert_element(words, word, ir.Constant(I32, i))
    bits = b.bitcast(words, ir.VectorType(I16, 2 * n))
    return widened_half(b, shuffled(b, bits, bits, picks))


@vector_op(_halves_in_blocks)
def pairs_of_halves(b, p, stride, n):
    """The float16 at p and p + 2, at p + stride and p + stride + 2, ...: n pairs, as float32."""
    return _words_of_halves(b, p, stride, n, range(2 * n))


@vector_op(_halves_in_blocks)
def doubled_halves(b, p, stride, n):
    """The n float16 at p, p + stride, ..., each twice, as float32; four bytes are read at each."""
    return _words_of_halves(b, p, stride, n, [i // 2 * 2 for i in range(2 * n)])


@vector_op(lambda x, i: f32x16 if _is(x, "f") and isinstance(i, types.IntegerLiteral) else None)
def two_eights(b, x, i):
    """16 lanes: lane i of x eight times, then lane i + 2 eight times."""
    return shuffled(b, x, x, [i] * 8 + [i + 2] * 8)


@op(f32x16, float32, float32)
def alternating_lanes(b, x, y):
    """x, y, x, y, ..."""
    return shuffled(b, splatted(b, x, 16), splatted(b, y, 16), [16 * (i % 2) for i in range(16)])


@op(f32x16, f32x16, f32x16)
def hsum_two(b, x, y):
    """The sum of the lanes of x in lane 0, that of y in lane 8; what is in others is undefined."""
    low, high = range(8), range(8, 16)
    picks = [[*part, *(16 + i for i in part)] for part in (low, high)]
    total = b.fadd(*(shuffled(b, x, y, part) for part in picks))
    for distance in (4, 2, 1):
        moved = shuffled(b, total, total, [i ^ distance for i in range(16)])
        total = b.fadd(total, moved)
    return total


@vector_op(_half_type)
def even_lanes(b, x):
    """Lanes 0, 2, 4 and so on."""
    return shuffled(b, x, x, range(0, x.type.count, 2))


@vector_op(_half_type)
def odd_lanes(b, x):
    """Lanes 1, 3, 5 and so on."""
    return shuffled(b, x, x, range(1, x.type.count, 2))


@op(f32x16, f32x16, f32x8, f32x8)
def rotated_pairs(b, x, c, s):
    """Eight pairs of neighbours (x, y) rotated to (x * c - y * s, x * s + y * c)."""
    pairs = range(16)
    swapped = shuffled(b, x, x, [i ^ 1 for i in pairs])
    cosines = shuffled(b, c, c, [i // 2 for i in pairs])
    negative = b.fmul(s, const(s.type, -1.0))
    sines = shuffled(b, negative, s, [i // 2 + 8 * (i % 2) for i in pairs])
    return fused(b, x, cosines, b.fmul(swapped, sines))


@vector_op(_repeated)
def repeat(b, x, first, times, n):
    """A vector of n lanes: lane `first` of x `times` times, the next lane as often, and so on."""
    return shuffled(b, x, x, [first + i // times for i in range(n)])


@vector_op(lambda x: Vec(x.kind, x.bits, 2 * x.n) if _is(x) else None)
def twice(b, x):
    """The lanes of x, and once more."""
    return joined(b, x, x)


@vector_op(lambda x, y: Vec(x.kind, x.bits, 2 * x.n) if _is(x) and x == y else None)
def join(b, x, y):
    """The lanes of x, then those of y."""
    return joined(b, x, y)


@vector_op(_half_type)
def low_half(b, x):
    """The first half of the lanes."""
    return halves(b, x)[0]


@vector_op(_half_type)
def high_half(b, x):
    """The second half of the lanes."""
    return halves(b, x)[1]


def _view(kind: str, bits: int) -> Any:
    def rule(x: Any) -> Any:
        return Vec(kind, bits, x.bits * x.n // bits) if _is(x) else None

    def body(b: Any, x: Any) -> Any:
        size = x.type.count * (32 if x.type.element == FLOAT else x.type.element.width)
        element = FLOAT if kind == "f" else ir.IntType(bits)
        return b.bitcast(x, ir.VectorType(element, size // bits))

    name = f"as_{kind}{bits}"
    return vector_op(rule)(_named(name, f"The same bits as {kind}{bits} lanes.", body))


as_i8, as_i16, as_i32, as_f32 = _view("i", 8), _view("i", 16), _view("i", 32), _view("f", 32)


@op(i8x8, int64)
def bytes_of(b, word):
    """The eight bytes of a word, lowest first."""
    return b.bitcast(word, i8x8.ir)


@vector_op(lambda x: Vec("i", 8, 2 * x.n) if _is(x, "i", 8) else None)
def nibbles(b, x):
    """The low nibbles of all bytes, then the high nibbles (the order of ggml's 4-bit blocks)."""
    n = x.type.count
    two = joined(b, x, x)
    shifts = ir.Constant(ir.VectorType(I16, n), [0] * (n // 2) + [4] * (n // 2))
    # Shifted as 16-bit lanes, which the CPU can do; the mask removes what crosses over.
    moved = b.bitcast(b.lshr(b.bitcast(two, shifts.type), shifts), two.type)
    return b.and_(moved, const(two.type, 15))


def _two_each_twice(b: Any, p: Any, q: Any) -> Any:
    """The 16 bytes at p twice, then those at q twice: 64 lanes."""
    first, second = (b.load(pointer(b, at, ir.VectorType(I8, 16)), align=1) for at in (p, q))
    order = [i + 16 * block for block in (0, 0, 1, 1) for i in range(16)]
    return shuffled(b, first, second, order)


@op(i8x64, int64, int64)
def nibbles_of_two(b, p, q):
    """The nibbles of the 16 bytes at p (low ones, then high ones), then of the 16 at q."""
    four = _two_each_twice(b, p, q)
    shifts = ir.Constant(ir.VectorType(I16, 32), ([0] * 8 + [4] * 8) * 2)
    moved = b.bitcast(b.lshr(b.bitcast(four, shifts.type), shifts), four.type)
    return b.and_(moved, const(four.type, 15))


@vector_op(lambda x: Vec("i", 8, 2 * x.n) if _is(x, "i", 8) else None)
def nibbles_in_place(b, x):
    """As `nibbles`, but the high ones are not shifted: each is 16 times itself."""
    two = joined(b, x, x)
    n = x.type.count
    return b.and_(two, ir.Constant(two.type, [15] * n + [0xF0] * n))


@op(i8x64, int64, int64)
def nibbles_of_two_in_place(b, p, q):
    """As `nibbles_of_two`, but the high ones are not shifted: each is 16 times itself."""
    four = _two_each_twice(b, p, q)
    return b.and_(four, ir.Constant(four.type, ([15] * 16 + [0xF0] * 16) * 2))


@vector_op(lambda x, n: x if _is(x, "f") and isinstance(n, types.IntegerLiteral) else None)
def sixteenth_of_odd_runs(b, x, n):
    """Divide every second run of n lanes by 16."""
    factors = [1.0 if i // n % 2 == 0 else 0.0625 for i in range(x.type.count)]
    return b.fmul(x, ir.Constant(x.type, factors))


def byte_mask(b: Any, bits: Any) -> Any:
    """The 64 bits of a word as a mask of lanes."""
    if not CPU.neon:
        return b.bitcast(bits, ir.VectorType(I1, 64))
    eight = b.bitcast(bits, ir.VectorType(I8, 8))
    copies = shuffled(b, eight, eight, [i // 8 for i in range(64)])
    own = ir.Constant(copies.type, [1 << i % 8 for i in range(64)])
    return b.icmp_unsigned("!=", b.and_(copies, own), const(copies.type, 0))


@op(i8x64, int64, int64)
def bits_to_bytes(b, bits, value):
    """Bytes: `value` where a bit is set (the lowest bit first), else 0."""
    lanes = splatted(b, b.trunc(value, I8), 64)
    return b.select(byte_mask(b, bits), lanes, const(lanes.type, 0))


def table_lookup(values: Sequence[int]) -> Callable[[Any, Any], Any]:
    """The function x -> values[x] on LLVM vectors of bytes; 16 values, lanes of x below 16."""

    def body(b: Any, x: Any) -> Any:
        n = x.type.count
        table = const(x.type, [*values] * (n // 16))
        if CPU.avx512 and n == 64:
            return call(b, "llvm.x86.avx512.pshuf.b.512", x.type, [table, x])
        if CPU.avx2 and n == 32:
            return call(b, "llvm.x86.avx2.pshuf.b", x.type, [table, x])
        if CPU.neon and n == 16:
            return call(b, "llvm.aarch64.neon.tbl1.v16i8", x.type, [table, x])
        if (CPU.avx2 and n == 64) or (CPU.neon and n > 16):
            return by_halves(b, body, x)
        found = const(x.type, values[0])
        for i, value in enumerate(values):
            same = b.icmp_unsigned("==", x, const(x.type, i))
            found = b.select(same, const(x.type, value), found)
        return found

    return body


def byte_table(values: Sequence[int]) -> Any:
    """The operation x -> values[x] on i8 vectors; 16 values, lanes of x below 16."""
    body = table_lookup(values)
    rule = lambda x: x if _is(x, "i", 8) and x.n % 16 == 0 else None  # noqa: E731
    return vector_op(rule)(_named("lookup", "The table's value of each lane.", body))


# ---- integer dot products ------------------------------------------------------------------------
def summed_groups(b: Any, x: Any, group: int) -> Any:
    """Sums of `group` neighbouring lanes."""
    n = x.type.count
    parts = [shuffled(b, x, x, range(i, n, group)) for i in range(group)]
    total = parts[0]
    for part in parts[1:]:
        total = b.add(total, part)
    return total


def in_quarters_of_neon(b: Any, body: Callable[..., Any], acc: Any, x: Any, y: Any) -> Any:
    """body(b, acc, x, y) on the registers of NEON, four lanes of acc each."""
    if acc.type.count == 4:
        return body(b, acc, x, y)
    return by_halves(b, lambda b, *args: in_quarters_of_neon(b, body, *args), acc, x, y)


def _neon_i8(b: Any, acc: Any, x: Any, y: Any) -> Any:
    """Four neighbouring products of signed bytes, of which two fit 16 bits, for each of acc."""
    if CPU.dotprod:
        return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, [acc, x, y])
    shorts = ir.VectorType(I16, 8)
    parts = zip(halves(b, x), halves(b, y), strict=True)
    products = [call(b, "llvm.aarch64.neon.smull.v8i16", shorts, [*pair]) for pair in parts]
    pairs = call(b, "llvm.aarch64.neon.addp.v8i16", shorts, products)
    return b.add(acc, call(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, [pairs]))


def _neon_u8(b: Any, acc: Any, u: Any, s: Any) -> Any:
    return call(b, "llvm.aarch64.neon.usdot.v4i32.v16i8", acc.type, [acc, u, s])


def _neon_i16(b: Any, acc: Any, x: Any, y: Any) -> Any:
    """Two neighbouring products of 16-bit lanes for each of acc."""
    parts = zip(halves(b, x), halves(b, y), strict=True)
    products = [call(b, "llvm.aarch64.neon.smull.v4i32", acc.type, [*pair]) for pair in parts]
    return b.add(acc, call(b, "llvm.aarch64.neon.addp.v4i32", acc.type, products))


def dotted_i8(b: Any, acc: Any, x: Any, y: Any) -> Any:
    """The sum of acc and of four neighbouring products of signed bytes; no lane of y is -128."""
    if CPU.neon:
        return in_quarters_of_neon(b, _neon_i8, acc, x, y)
    return dotted_u8(b, acc, magnitude(b, x), signed_like(b, y, x))


def dotted_u8(b: Any, acc: Any, u: Any, s: Any) -> Any:
    """The sum of acc and of four neighbouring products of u (unsigned) and s (signed)."""
    n = acc.type.count
    if CPU.neon:
        return in_quarters_of_neon(b, _neon_u8 if CPU.i8mm else _neon_i8, acc, u, s)
    native = (CPU.avx2 and n == 8) or (CPU.avx512 and n == 16)
    if CPU.vnni and native:
        return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * n}", acc.type, [acc, u, s])
    if native:
        return plus_pairs(b, acc, sums_of_two(b, u, s), 1)
    if CPU.avx2 and n > 8:
        return by_halves(b, dotted_u8, acc, u, s)
    words = lanes_of(I32, u)
    return b.add(acc, summed_groups(b, b.mul(b.zext(u, words), b.sext(s, words)), 4))


def sums_of_two(b: Any, u: Any, s: Any) -> Any:
    """Sums of two neighbouring products of u (unsigned) and s (signed), int16; AVX2."""
    n = u.type.count
    if n > 32 and not CPU.avx512:
        return by_halves(b, sums_of_two, u, s)
    name = {32: "llvm.x86.avx2.pmadd.ub.sw", 64: "llvm.x86.avx512.pmaddubs.w.512"}[n]
    return call(b, name, ir.VectorType(I16, n // 2), [u, s])


def plus_pairs(b: Any, acc: Any, shorts: Any, factor: int) -> Any:
    """The sum of acc and of two neighbouring int16 times a factor; AVX2."""
    n = acc.type.count
    if n > 8 and not CPU.avx512:
        return by_halves(b, lambda b, acc, x: plus_pairs(b, acc, x, factor), acc, shorts)
    name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[n]
    return b.add(acc, call(b, name, acc.type, [shorts, const(shorts.type, factor)]))


def dotted_i16(b: Any, acc: Any, x: Any, y: Any) -> Any:
    """The sum of acc and of two neighbouring products of signed 16-bit lanes."""
    n = acc.type.count
    native = (CPU.avx2 and n == 8) or (CPU.avx512 and n == 16)
    if CPU.vnni and native:
        return call(b, f"llvm.x86.avx512.vpdpwssd.{32 * n}", acc.type, [acc, x, y])
    if native:
        name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[n]
        return b.add(acc, call(b, name, acc.type, [x, y]))
    if CPU.avx2 and n > 8:
        return by_halves(b, dotted_i16, acc, x, y)
    if CPU.neon:
        return in_quarters_of_neon(b, _neon_i16, acc, x, y)
    words = lanes_of(I32, x)
    return b.add(acc, summed_groups(b, b.mul(b.sext(x, words), b.sext(y, words)), 2))


def signed_like(b: Any, y: Any, x: Any) -> Any:
    """y, negated where x is negative."""
    if CPU.avx2 and y.type.count == 32 and not CPU.avx512:
        return call(b, "llvm.x86.avx2.psign.b", y.type, [y, x])
    if CPU.avx2 and y.type.count == 64 and not CPU.avx512:
        return by_halves(b, signed_like, y, x)
    zero = const(y.type, 0)
    return b.select(b.icmp_signed("<", x, zero), b.sub(zero, y), y)


def _dot_rule(bits: int) -> Callable[..., Any]:
    def rule(acc: Any, x: Any, y: Any) -> Any:
        fits = _is(acc, "i", 32) and _is(x, "i", bits) and x == y
        return acc if fits and x.bits * x.n == acc.bits * acc.n else None

    return rule


@vector_op(_dot_rule(8))
def dot_u8(b, acc, u, s):
    """The sum of acc and of four neighbouring products of u8 lanes u and i8 lanes s.

    Two neighbouring products must fit 16 bits: u <= 127. Not where CPU.mixed_bytes.
    """
    return dotted_u8(b, acc, u, s)


@vector_op(_dot_rule(8))
def dot_i8(b, acc, x, y):
    """The sum of acc and of four neighbouring products of i8 lanes; no lane of y is -128."""
    return dotted_i8(b, acc, x, y)


@vector_op(_dot_rule(16))
def dot_i16(b, acc, x, y):
    """The sum of acc and of two neighbouring products of i16 lanes, wrapping."""
    return dotted_i16(b, acc, x, y)


@vector_op(lambda y, x: y if _is(y, "i", 8) and x == y else None)
def sign_like(b, y, x):
    """The lanes of y, negated where x < 0; y or 0 where x is 0: for products with |x|."""
    return signed_like(b, y, x)


# ---- exponential ---------------------------------------------------------------------------------
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428606765330187e-06  # n * LN2_HIGH is exact
# 1/k! from k = 7 down to 0: the next term is below 1e-8 for |x| <= ln(2) / 2.
EXP_TERMS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


@vector_op(_float_only)
def vexp(b, x):
    """Exponentials to about 1e-7 relative; 0 below -87.3, x is at most 88."""
    floats, words = x.type, lanes_of(I32, x)
    tiny = b.fcmp_ordered("<", x, const(floats, -87.3))
    x = larger(b, x, const(floats, -87.3))
    n = rounded(b, b.fmul(x, const(floats, LOG2_E)))
    turns = b.sitofp(n, floats)
    # The fence keeps a reassociating compiler from folding the two parts of ln 2 into one.
    rest = fused(b, turns, const(floats, -LN2_HIGH), x)
    rest = call(b, f"llvm.arithmetic.fence.v{floats.count}f32", floats, [rest])
    rest = fused(b, turns, const(floats, -LN2_LOW), rest)
    total = const(floats, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        total = fused(b, total, rest, const(floats, term))
    power = b.shl(b.add(n, const(words, 127)), const(words, 23))
    return b.select(tiny, const(floats, 0.0), b.fmul(total, b.bitcast(power, floats)))
