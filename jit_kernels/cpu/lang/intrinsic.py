"""Access to memory and other threads: addresses, atomics, futex, calls by address.

Addresses are int64 byte addresses. Nothing here checks bounds: callers validate every index before
a kernel uses it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.typing import templates
from numba.extending import intrinsic, models

from tamis.jit_kernels.common.view import Target, define, opened
from tamis.jit_kernels.contract.op import Op
from tamis.jit_kernels.cpu.lang import features
from tamis.jit_kernels.cpu.lang.half import FLOAT, narrowed_half, widened_half
from tamis.platform.waiting import wait_syscall

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
DOUBLE = ir.DoubleType()

int64, float32, float64, void = types.int64, types.float32, types.float64, types.void


def op(ret: types.Type, *args: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of fixed types from `body(builder, *llvm_values) -> llvm value`.

    The types are Numba's; arguments are cast to them at the call, as for any typed function.
    A body of return type void returns None.
    """
    signature = ret(*args)

    def decorate(body: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
            result = body(builder, *values)
            return context.get_dummy_value() if result is None else result

        # Numba reads the number of parameters from the function's signature.
        typed = [
            lambda _t: (signature, codegen),
            lambda _t, a: (signature, codegen),
            lambda _t, a, b: (signature, codegen),
            lambda _t, a, b, c: (signature, codegen),
            lambda _t, a, b, c, d: (signature, codegen),
            lambda _t, a, b, c, d, e: (signature, codegen),
            lambda _t, a, b, c, d, e, f: (signature, codegen),
            lambda _t, a, b, c, d, e, f, g: (signature, codegen),
            lambda _t, a, b, c, d, e, f, g, h: (signature, codegen),
        ][len(args)]
        typed.__name__ = typed.__qualname__ = body.__name__
        typed.__module__, typed.__doc__ = body.__module__, body.__doc__
        return intrinsic(typed)

    return decorate


def pointer(builder: Any, address: Any, pointee: ir.Type) -> Any:
    """The typed pointer of an int64 address."""
    return builder.inttoptr(address, pointee.as_pointer())


def call(builder: Any, name: str, ret: ir.Type, args: list[Any]) -> Any:
    """Call the function or LLVM intrinsic `name` with the types of `args`."""
    signature = ir.FunctionType(ret, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


# ---- memory of a call ----------------------------------------------------------------------------
def _stack_bytes(_context: Any, n: Any) -> Any:
    """The address of n bytes on the stack, at a cache line, until the kernel returns."""
    if not isinstance(n, types.IntegerLiteral):
        return None

    def codegen(_context: Any, builder: Any, _sig: Any, _values: Any) -> Any:
        with builder.goto_entry_block():
            memory = builder.alloca(I8, ir.Constant(I32, n.literal_value))
            memory.align = 64
        return builder.ptrtoint(memory, I64)

    return int64(n), codegen


stack_bytes: Any = intrinsic(_stack_bytes)


# ---- scalars -------------------------------------------------------------------------------------
@op(int64, int64)
def address(b, p):
    """The address that a View decays to."""
    return p


@op(int64, int64)
def load_i64(b, p):
    """The int64 at p."""
    return b.load(pointer(b, p, I64), align=8)


@op(void, int64, int64)
def store_i64(b, p, v):
    """Write the int64 v at p."""
    b.store(v, pointer(b, p, I64), align=8)


@op(int64, int64)
def load_i32(b, p):
    """The int32 at p, sign-extended."""
    return b.sext(b.load(pointer(b, p, I32), align=4), I64)


@op(void, int64, int64)
def store_i32(b, p, v):
    """Write the low 32 bits of v at p."""
    b.store(b.trunc(v, I32), pointer(b, p, I32), align=4)


@op(float32, int64)
def load_f32(b, p):
    """The float32 at p (any alignment)."""
    return b.load(pointer(b, p, FLOAT), align=1)


@op(void, int64, float32)
def store_f32(b, p, v):
    """Write the float32 v at p (any alignment)."""
    b.store(v, pointer(b, p, FLOAT), align=1)


@op(int64, int64)
def load_u8(b, p):
    """The byte at p."""
    return b.zext(b.load(pointer(b, p, I8), align=1), I64)


@op(void, int64, int64)
def store_u8(b, p, v):
    """Write the low byte of v at p."""
    b.store(b.trunc(v, I8), pointer(b, p, I8), align=1)


@op(int64, int64)
def load_i8(b, p):
    """The int8 at p, sign-extended."""
    return b.sext(b.load(pointer(b, p, I8), align=1), I64)


@op(int64, int64)
def load_u16(b, p):
    """The uint16 at p (any alignment)."""
    return b.zext(b.load(pointer(b, p, I16), align=1), I64)


@op(void, int64, int64)
def store_i16(b, p, v):
    """Write the low 16 bits of v at p (any alignment)."""
    b.store(b.trunc(v, I16), pointer(b, p, I16), align=1)


@op(int64, int64)
def load_u32(b, p):
    """The uint32 at p (any alignment)."""
    return b.zext(b.load(pointer(b, p, I32), align=1), I64)


@op(float32, int64)
def load_f16(b, p):
    """The float16 at p as float32."""
    return widened_half(b, b.load(pointer(b, p, I16), align=1))


@op(void, int64, float32)
def store_f16(b, p, v):
    """Write v at p as float16, rounded to nearest even."""
    b.store(narrowed_half(b, v), pointer(b, p, I16), align=1)


@op(float32, int64)
def bits_f32(b, v):
    """The float32 whose bits are the low 32 bits of v."""
    return b.bitcast(b.trunc(v, I32), FLOAT)


@op(int64, float32)
def f32_bits(b, v):
    """The bits of a float32."""
    return b.zext(b.bitcast(v, I32), I64)


@op(float64, int64)
def load_f64(b, p):
    """The float64 at p."""
    return b.load(pointer(b, p, DOUBLE), align=8)


@op(void, int64, float64)
def store_f64(b, p, v):
    """Write the float64 v at p."""
    b.store(v, pointer(b, p, DOUBLE), align=8)


@op(int64, int64)
def lowest_bit(b, x):
    """The number of the lowest bit that is set in x, which is not 0."""
    return call(b, "llvm.cttz.i64", I64, [x, ir.Constant(I1, 1)])


# ---- other threads -------------------------------------------------------------------------------
@op(int64, int64, int64)
def atomic_add(b, p, v):
    """Add v to the int64 at p; returns the value before."""
    return b.atomic_rmw("add", pointer(b, p, I64), v, "seq_cst")


@op(int64, int64)
def atomic_load(b, p):
    """The int64 at p, sequentially consistent."""
    return b.load_atomic(pointer(b, p, I64), "seq_cst", 8)


@op(void, int64, int64)
def atomic_store(b, p, v):
    """Write the int64 v at p, sequentially consistent."""
    b.store_atomic(v, pointer(b, p, I64), "seq_cst", 8)


@op(void)
def pause(b):
    """Tell the core that this is a spin loop."""
    machine = features.current().machine
    if machine == "x86_64":
        call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif machine == "aarch64":
        call(b, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(I32, 1)])


@op(int64)
def cycles(b):
    """The counter for measuring time: rdtsc on x86.

    On AArch64 the system's slower one (25 MHz to 1 GHz), multiplied to some 2.5 GHz.
    """
    if features.current().machine != "aarch64":
        return call(b, "llvm.readcyclecounter", I64, [])
    signature = ir.FunctionType(I64, [ir.MetaDataType()])
    read = cgutils.get_or_insert_function(b.module, signature, "llvm.read_register.i64")
    rate = b.call(read, [b.module.add_metadata(["cntfrq_el0"])])
    ticks = call(b, "llvm.readsteadycounter", I64, [])  # cntvct_el0
    return b.mul(ticks, b.udiv(ir.Constant(I64, 2_500_000_000), rate))


@op(int64, int64, int64, int64)
def sleep_or_wake(b, p, operation, value):
    """A futex call on the low 32 bits at p.

    WAIT_PRIVATE sleeps while they equal value, WAKE_PRIVATE wakes value sleepers.
    """
    number = wait_syscall(features.current().machine)
    signature = ir.FunctionType(I64, [I64], var_arg=True)
    syscall = cgutils.get_or_insert_function(b.module, signature, "syscall")
    zero = ir.Constant(I64, 0)
    return b.call(syscall, [ir.Constant(I64, number), p, operation, value, zero, zero, zero])


KERNEL = ir.FunctionType(ir.VoidType(), [I64, I64, I64])


@op(void, int64, int64, int64, int64)
def call_kernel(b, fn, tid, n_thread, args):
    """Call the kernel at address fn, a void(tid, n_thread, address of the argument struct)."""
    b.call(b.inttoptr(fn, KERNEL.as_pointer()), [tid, n_thread, args])


_ELEMENTS = {"f16": I16, "f32": FLOAT, "f64": DOUBLE, "i8": I8, "u8": I8, "u16": I16, "i32": I32}


def _load_element(b: Any, at: Any, element: str) -> Any:
    found = b.load(pointer(b, at, _ELEMENTS.get(element, I64)), align=1)
    if element == "f16":
        return widened_half(b, found)
    if element in ("i8", "i32"):
        return b.sext(found, I64)
    return b.zext(found, I64) if element in ("u8", "u16") else found


def _store_element(b: Any, at: Any, element: str, value: Any) -> None:
    kind = _ELEMENTS.get(element, I64)
    if element == "f16":
        value = narrowed_half(b, value)
    elif element not in ("f32", "f64", "i64"):
        value = b.trunc(value, kind)
    b.store(value, pointer(b, at, kind), align=1)


define(
    Target(
        extending, templates, models.StructModel, extending.register_model, _load_element,
        _store_element,
    )
)  # fmt: skip


def struct_reader(op: Op, constants: dict[str, int | str]) -> Any:
    """An intrinsic that reads an op's argument struct: address -> NamedTuple of its fields.

    Typed arrays are Views. constants: the values of the op's.
    """
    floats = [name in op.floats for name in op.fields]
    fields = [float32 if a_float else int64 for a_float in floats]
    record, views = opened(op, constants, types.BaseTuple.from_types(fields, op.values))

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        fields = []
        for i, a_float in enumerate(floats):
            at = builder.add(values[0], ir.Constant(I64, 8 * i))
            field = builder.load(pointer(builder, at, DOUBLE if a_float else I64), align=8)
            fields.append(builder.fptrunc(field, FLOAT) if a_float else field)
        return context.make_tuple(builder, sig.return_type, views(builder, fields))

    @intrinsic
    def read_struct(_typing_context, address):
        return record(int64), codegen

    return read_struct
