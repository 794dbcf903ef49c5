"""How a CUDA kernel touches memory: typed loads and stores at addresses, registers in tuples.

Addresses are int64 byte addresses of device memory. Nothing here checks bounds: callers validate
every index before a kernel sees it. The instructions that LLVM has no name for are in ptx.py.
"""

import inspect
import zlib
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda import extending
from numba.cuda.extending import intrinsic
from numba.cuda.typing import templates

from tamis.jit_kernels.common.view import Target, define

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
GLOBAL, SHARED = 1, 3  # LLVM's address spaces of device memory and of shared memory

int64, int32, uint32, void = types.int64, types.int32, types.uint32, types.void
float32, float64 = types.float32, types.float64
F8 = types.UniTuple(float32, 8)
U4 = types.UniTuple(uint32, 4)

device = cuda.jit(device=True)


def op(ret: types.Type, *args: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of fixed types from `body(builder, *llvm_values) -> value or list`.

    The types are Numba's; arguments are cast to them at the call. A body whose type is a tuple
    takes and returns its elements as a list; one of type void returns None.
    """
    signature = ret(*args)

    def decorate(body: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
            split = [
                [builder.extract_value(v, i) for i in range(len(t))]
                if isinstance(t, types.UniTuple)
                else v
                for t, v in zip(args, values, strict=True)
            ]
            result = body(builder, *split)
            if isinstance(ret, types.UniTuple):
                return context.make_tuple(builder, ret, result)
            return context.get_dummy_value() if result is None else result

        def typed(_typing_context: Any, *_args: Any) -> Any:
            return signature, codegen

        # Numba reads the number of parameters from the function's signature.
        names = ["context", *(f"a{i}" for i in range(len(args)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typed.__name__ = typed.__qualname__ = body.__name__
        typed.__module__, typed.__doc__ = body.__module__, body.__doc__
        return intrinsic(typed)

    return decorate


def load_device(b: Any, address: Any, pointee: ir.Type, align: int) -> Any:
    """Emit a load from device memory."""
    return b.load(b.inttoptr(address, pointee.as_pointer(GLOBAL)), align=align)


def load_constant(b: Any, address: Any, pointee: ir.Type, align: int) -> Any:
    """Emit a load of memory that the kernel never writes: it may use the read-only cache."""
    value = load_device(b, address, pointee, align)
    value.set_metadata("invariant.load", b.module.add_metadata([]))
    return value


def load_shared(b: Any, address: Any, pointee: ir.Type, align: int) -> Any:
    """Emit a load from shared memory."""
    return b.load(b.inttoptr(b.trunc(address, I32), pointee.as_pointer(SHARED)), align=align)


def _store(b: Any, address: Any, value: Any, align: int) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer(GLOBAL)), align=align)


def _elements(b: Any, vector: Any, n: int) -> list[Any]:
    return [b.extract_element(vector, ir.Constant(I32, i)) for i in range(n)]


def _vector(b: Any, values: list[Any]) -> Any:
    vector = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        vector = b.insert_element(vector, value, ir.Constant(I32, i))
    return vector


def floats(b: Any, address: Any, n: int) -> list[Any]:
    """Emit loads of n float32 (a multiple of 4) at an address that is a multiple of 16."""
    found = []
    for i in range(0, n, 4):
        at = b.add(address, ir.Constant(I64, 4 * i))
        found += _elements(b, load_device(b, at, ir.VectorType(FLOAT, 4), 16), 4)
    return found


def pair(b: Any, address: Any, offset: int) -> list[Any]:
    """Emit the load of two float32 at address + offset, a multiple of 8."""
    at = b.add(address, ir.Constant(I64, offset))
    return _elements(b, load_device(b, at, ir.VectorType(FLOAT, 2), 8), 2)


def put_pair(b: Any, address: Any, offset: int, values: list[Any]) -> None:
    """Emit the store of two float32 at address + offset, a multiple of 8."""
    _store(b, b.add(address, ir.Constant(I64, offset)), _vector(b, values), 8)


def packed(b: Any, low: Any, high: Any) -> Any:
    """Emit the conversion of two float32 to float16, packed into 32 bits."""
    return b.bitcast(_vector(b, [b.fptrunc(low, HALF), b.fptrunc(high, HALF)]), I32)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Emit x * y + z with one rounding."""
    three = ir.FunctionType(FLOAT, [FLOAT] * 3)
    return b.call(b.module.declare_intrinsic("llvm.fma", [FLOAT], three), [x, y, z])


def nearest(b: Any, x: Any) -> Any:
    """Emit the nearest integer of a float32, |x| <= 2^22: adding 1.5 * 2^23 rounds it."""
    magic, bits = ir.Constant(FLOAT, 12582912.0), ir.Constant(I32, 0x4B400000)  # 1.5 * 2^23
    return b.sub(b.bitcast(b.fadd(x, magic), I32), bits)


# ---- views ---------------------------------------------------------------------------------------
_ELEMENTS = {"f16": HALF, "f32": FLOAT, "f64": DOUBLE, "i8": I8, "u8": I8, "u16": I16, "i32": I32}


def _load_element(b: Any, at: Any, element: str) -> Any:
    kind = _ELEMENTS.get(element, I64)
    found = load_device(b, at, kind, _bytes_of(element))
    if element == "f16":
        return b.fpext(found, FLOAT)
    if element in ("i8", "i32"):
        return b.sext(found, I64)
    return b.zext(found, I64) if element in ("u8", "u16") else found


def _store_element(b: Any, at: Any, element: str, value: Any) -> None:
    if element == "f16":
        value = b.fptrunc(value, HALF)
    elif element not in ("f32", "f64", "i64"):
        value = b.trunc(value, _ELEMENTS[element])
    _store(b, at, value, _bytes_of(element))


def _bytes_of(element: str) -> int:
    return int(element[1:]) // 8


_numba: Any = extending
define(
    Target(
        _numba, templates, _numba.core_models.StructModel, _numba.register_model, _load_element,
        _store_element,
    )
)  # fmt: skip


# ---- scalars -------------------------------------------------------------------------------------
@op(int64, int64)
def address(b, p):
    """The address that a View decays to."""
    return p


@op(int64, int64)
def load_i64(b, p):
    """The int64 at p."""
    return load_device(b, p, I64, 8)


@op(void, int64, int64)
def store_i64(b, p, v):
    """Write the int64 v at p."""
    _store(b, p, v, 8)


@op(int64, int64)
def load_i32(b, p):
    """The int32 at p, sign-extended."""
    return b.sext(load_device(b, p, I32, 4), I64)


@op(void, int64, int64)
def store_i32(b, p, v):
    """Write the low 32 bits of v at p."""
    _store(b, p, b.trunc(v, I32), 4)


@op(float32, int64)
def load_f16(b, p):
    """The float16 at p, as float32."""
    return b.fpext(load_device(b, p, HALF, 2), FLOAT)


@op(float32, int64)
def load_f32(b, p):
    """The float32 at p."""
    return load_device(b, p, FLOAT, 4)


@op(void, int64, float32)
def store_f32(b, p, v):
    """Write the float32 v at p."""
    _store(b, p, v, 4)


@op(float64, int64)
def load_f64(b, p):
    """The float64 at p."""
    return load_device(b, p, DOUBLE, 8)


@op(void, int64, float64)
def store_f64(b, p, v):
    """Write the float64 v at p."""
    _store(b, p, v, 8)


@op(U4, int64)
def load_u128(b, p):
    """The 16 bytes at p, a multiple of 16."""
    return _elements(b, load_device(b, p, ir.VectorType(I32, 4), 16), 4)


@op(void, int64, U4)
def store_u128(b, p, v):
    """Write 16 bytes at p, a multiple of 16."""
    _store(b, p, _vector(b, v), 16)


@op(void, int64, float32)
def store_f16(b, p, v):
    """Write v at p as float16, rounded to nearest even."""
    _store(b, p, b.fptrunc(v, HALF), 2)


# ---- constants: what no kernel of the same launch writes -----------------------------------------
@op(int64, int64)
def const_i64(b, p):
    """The int64 at p: read once, however often it is used."""
    return load_constant(b, p, I64, 8)


@op(float32, int64)
def const_f32(b, p):
    """The float32 at p."""
    return load_constant(b, p, FLOAT, 4)


@op(float32, int64)
def const_bf16(b, p):
    """The bfloat16 at p as float32."""
    bits = b.zext(load_constant(b, p, I16, 2), I32)
    return b.bitcast(b.shl(bits, ir.Constant(I32, 16)), FLOAT)


@op(int64, int64, int64)
def quotient(b, x, y):
    """The quotient x // y of numbers from 0 to 2^32: much faster than // of int64."""
    return b.zext(b.udiv(b.trunc(x, I32), b.trunc(y, I32)), I64)


@op(int64, int64, int64)
def remainder(b, x, y):
    """The remainder x % y of numbers from 0 to 2^32."""
    return b.zext(b.urem(b.trunc(x, I32), b.trunc(y, I32)), I64)


# ---- eight floats --------------------------------------------------------------------------------
@op(F8, int64)
def load_f32x8(b, p):
    """Eight float32 at p, a multiple of 16."""
    return floats(b, p, 8)


@op(void, int64, F8)
def store_f32x8(b, p, v):
    """Write eight float32 at p, a multiple of 16."""
    for at in (0, 4):
        _store(b, b.add(p, ir.Constant(I64, 4 * at)), _vector(b, v[at : at + 4]), 16)


@op(void, int64, F8)
def store_f16x8(b, p, v):
    """Write eight values at p, a multiple of 16, as float16 rounded to nearest even."""
    halves = _vector(b, [b.fptrunc(x, HALF) for x in v])
    _store(b, p, b.bitcast(halves, ir.VectorType(I32, 4)), 16)


@op(U4, F8)
def f16x8(b, v):
    """Eight values as float16, rounded to nearest even."""
    return [packed(b, v[i], v[i + 1]) for i in range(0, 8, 2)]


@op(F8, F8, float32, float32)
def affine8(b, x, scale, offset):
    """Eight values: x * scale + offset."""
    return [fma(b, one, scale, offset) for one in x]


@op(F8, uint32, uint32)
def bytes_f32(b, low, high):
    """The four bytes of low, then those of high, as unsigned numbers."""
    shifts = [ir.Constant(I32, 8 * i) for i in range(4)]
    mask = ir.Constant(I32, 255)
    return [b.uitofp(b.and_(b.lshr(w, s), mask), FLOAT) for w in (low, high) for s in shifts]


@op(F8, uint32, uint32)
def signed_bytes_f32(b, low, high):
    """The four bytes of low, then those of high, as signed numbers."""
    ups, down = [ir.Constant(I32, 24 - 8 * i) for i in range(4)], ir.Constant(I32, 24)
    return [b.sitofp(b.ashr(b.shl(w, up), down), FLOAT) for w in (low, high) for up in ups]


@op(void, int64, int32)
def store_i8(b, p, v):
    """Write the low 8 bits of v at p."""
    _store(b, p, b.trunc(v, I8), 1)


@op(void, int64, uint32)
def store_i16(b, p, v):
    """Write the low 16 bits of v at p."""
    _store(b, p, b.trunc(v, I16), 2)


@op(int32, float32)
def rounded(b, x):
    """The nearest integer of a value up to 2^22."""
    return nearest(b, x)


# ---- bits ----------------------------------------------------------------------------------------
@op(float32, uint32)
def half_f32(b, bits):
    """The float16 of the low 16 bits, as float32."""
    return b.fpext(b.bitcast(b.trunc(bits, I16), HALF), FLOAT)


@op(uint32, float32, float32)
def pack_f16(b, low, high):
    """Two values as float16, low in the low 16 bits."""
    return packed(b, low, high)


@op(uint32, uint32, uint32, uint32)
def field(b, w, shift, mask):
    """The bit field (w >> shift) & mask."""
    return b.and_(b.lshr(w, shift), mask)


@op(uint32, uint32, uint32, uint32)
def join(b, w, other, shift):
    """The bits w | (other << shift)."""
    return b.or_(w, b.shl(other, shift))


@op(U4, U4, uint32, uint32)
def fields(b, w, shift, mask):
    """The bit field (w >> shift) & mask of each word."""
    return [b.and_(b.lshr(x, shift), mask) for x in w]


@op(U4, U4, U4, uint32)
def joined(b, w, other, shift):
    """The bits w | (other << shift) of each word."""
    return [b.or_(x, b.shl(y, shift)) for x, y in zip(w, other, strict=True)]


@op(U4, uint32)
def bits_to_bytes(b, w):
    """The low sixteen bits of w, one a byte of four words; a product moves bit k to 8 k."""
    found = []
    for shift in range(0, 16, 4):
        four = b.and_(b.lshr(w, ir.Constant(I32, shift)), ir.Constant(I32, 15))
        spread = b.mul(four, ir.Constant(I32, 0x00204081))
        found.append(b.and_(spread, ir.Constant(I32, 0x01010101)))
    return found


def table_word(words: Any) -> Any:
    """Make the intrinsic i -> words[i] of uint32s, a constant table in device memory.

    Constant memory would serialize lanes that read different words.
    """
    kind, numbers = ir.ArrayType(I32, len(words)), words.tolist()
    name = f"table_{zlib.crc32(words.tobytes()):08x}"

    def word(b, i):
        table = b.module.globals.get(name)
        if table is None:
            table = ir.GlobalVariable(b.module, kind, name, addrspace=GLOBAL)
            table.linkage, table.global_constant = "internal", True
            table.initializer = ir.Constant(kind, numbers)
        at = b.gep(table, [ir.Constant(I64, 0), b.zext(i, I64)])
        return b.load(at, align=4)

    return op(uint32, uint32)(word)


@op(int64, int64, int64, int64)
def bits_from(b, low, high, shift):
    """64 of the 128 bits of two words, from bit `shift` of the low one on (0 to 63)."""
    ups = b.sub(ir.Constant(I64, 63), shift)
    return b.or_(b.lshr(low, shift), b.shl(b.shl(high, ups), ir.Constant(I64, 1)))


@op(float32, uint32)
def bits_f32(b, v):
    """The float32 of these bits."""
    return b.bitcast(v, FLOAT)


@op(uint32, float32)
def f32_bits(b, v):
    """The bits of a float32."""
    return b.bitcast(v, I32)


@op(uint32, float32)
def ordered(b, v):
    """A uint32 key whose order is that of the floats; +0 and -0 give the same."""
    bits = b.bitcast(v, I32)
    size = b.and_(bits, ir.Constant(I32, 0x7FFFFFFF))
    signed = b.select(b.icmp_signed("<", bits, ir.Constant(I32, 0)), b.neg(size), size)
    return b.xor(signed, ir.Constant(I32, 0x80000000))
