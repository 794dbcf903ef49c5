"""Registers in tuples, whose operations are unrolled while IR is built.

What a loop indexes must not go to local memory; a tuple cannot.
"""

from typing import Any

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cuda.intrinsic import (
    F8,
    FLOAT,
    I32,
    I64,
    float32,
    floats,
    fma,
    int64,
    op,
    uint32,
    void,
)
from tamis.jit_kernels.cuda.ptx import EXP2, MMA_F16, SHUFFLE_XOR, U4, emit

ROWS, COLUMNS = 4, 4  # 16-row and 8-column parts of a warp's tile: 64 x 32 sums
SUMS = types.UniTuple(float32, 4 * ROWS * COLUMNS)


@op(SUMS)
def zero_sums(b):
    """A tile of zeros."""
    return [ir.Constant(FLOAT, 0.0)] * len(SUMS)


@op(SUMS, SUMS, U4, U4, U4, U4, U4, U4)
def multiply_add(b, sums, a0, a1, a2, a3, b0, b1):
    """Sums + A [64, 16] @ B [16, 32], whose registers load_matrices gave: see mma_f16."""
    right = [*b0, *b1]
    found = []
    for i, left in enumerate((a0, a1, a2, a3)):
        for j in range(COLUMNS):
            at = 4 * (COLUMNS * i + j)
            found += emit(b, MMA_F16, [*left, *right[2 * j : 2 * j + 2], *sums[at : at + 4]])
    return found


def store_sums(row_bytes: int, n_row: int, n_column: int) -> Any:
    """The intrinsic (sums, address): write n_row x n_column parts of 16 x 8 to shared memory.

    Rows are row_bytes apart; address: of row lane / 4 and column 2 (lane % 4) of the first part.
    """
    two = ir.FunctionType(ir.VoidType(), [I32, FLOAT, FLOAT])

    @op(void, SUMS, uint32)
    def store(b: Any, sums: Any, address: Any) -> None:
        for part in range(2 * n_row * n_column):
            i, j, half = part // 2 // n_column, part // 2 % n_column, part % 2
            at = (16 * i + 8 * half) * row_bytes + 32 * j
            text = f"st.shared.v2.f32 [$0+{at}], {{$1,$2}};"
            put = ir.InlineAsm(two, text, "r,f,f,~{memory}", side_effect=True)
            b.call(put, [address, *sums[2 * part : 2 * part + 2]])

    return store


def multiply_group(n_step: int) -> Any:
    """The intrinsic (sums, a, b): sums + A [64, 16 n_step] @ B [128, 16 n_step].T of a warpgroup.

    a and b describe tiles in shared memory (9.7.15.5.1) whose rows are 128 bytes, permuted as
    gemm.place says; a step is 32 bytes further. The multiplication has ended when it returns:
    its registers are no one else's meanwhile. sm_90a.
    """
    n = len(SUMS)
    registers = ",".join(f"${i}" for i in range(n))
    lines = ["{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, 1, 0;"]
    lines += [f"mov.b64 a, ${2 * n}; mov.b64 b, ${2 * n + 1}; wgmma.fence.sync.aligned;"]
    for step in range(n_step):
        if step:
            lines.append("add.s64 a, a, 2; add.s64 b, b, 2;")
        lines.append(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
            f" {{{registers}}}, a, b, p, 1, 1, 0, 0;"
        )
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }")
    tied = ["=f"] * n + [str(i) for i in range(n)] + ["l", "l", "~{memory}"]
    kind = ir.FunctionType(ir.LiteralStructType([FLOAT] * n), [FLOAT] * n + [I64, I64])
    asm = ir.InlineAsm(kind, " ".join(lines), ",".join(tied), side_effect=True)

    @op(SUMS, SUMS, int64, int64)
    def multiply(b: Any, sums: Any, one: Any, other: Any) -> list[Any]:
        found = b.call(asm, [*sums, one, other])
        return [b.extract_value(found, i) for i in range(n)]

    return multiply


def lanes_of(n: int) -> Any:
    """Functions of n float32 each: maximum, exp2_of (a - b), plus, times, exchanged.

    exchanged(x, mask) is x of the lane whose number differs by xor with mask.
    """
    kind = types.UniTuple(float32, n)

    @op(kind, kind, kind)
    def maximum(b, x, y):
        return [b.select(b.fcmp_ordered(">", x[i], y[i]), x[i], y[i]) for i in range(n)]

    @op(kind, kind, kind)
    def exp2_of(b, x, y):
        return [emit(b, EXP2, [b.fsub(x[i], y[i])])[0] for i in range(n)]

    @op(kind, kind, kind)
    def plus(b, x, y):
        return [b.fadd(x[i], y[i]) for i in range(n)]

    @op(kind, kind, kind)
    def times(b, x, y):
        return [b.fmul(x[i], y[i]) for i in range(n)]

    @op(kind, kind, uint32)
    def exchanged(b, x, mask):
        return [emit(b, SHUFFLE_XOR, [x[i], mask])[0] for i in range(n)]

    return maximum, exp2_of, plus, times, exchanged


def splat(n: int) -> Any:
    """The intrinsic x -> n times x."""
    return op(types.UniTuple(float32, n), float32)(lambda b, x: [x] * n)


def heads_of(group: int, lanes: int) -> Any:
    """Functions of `group` heads, of which a lane has eight elements each: scores, weighed, scaled.

    scores(q, k) sums q . k over `lanes` neighbouring lanes; weighed(sums, w, v) adds w * v to each
    head; scaled(sums, f) multiplies them by f, one a head.
    """
    some, all_ = types.UniTuple(float32, group), types.UniTuple(float32, 8 * group)

    @op(some, all_, F8)
    def scores(b, q, k):
        found = []
        for g in range(group):
            total = b.fmul(q[8 * g], k[0])
            for i in range(1, 8):
                total = fma(b, q[8 * g + i], k[i], total)
            found.append(total)
        mask = lanes // 2
        while mask:
            for g in range(group):
                other = emit(b, SHUFFLE_XOR, [found[g], ir.Constant(I32, mask)])[0]
                found[g] = b.fadd(found[g], other)
            mask //= 2
        return found

    @op(all_, all_, some, F8)
    def weighed(b, sums, w, v):
        return [fma(b, w[i // 8], v[i % 8], sums[i]) for i in range(8 * group)]

    @op(all_, all_, some)
    def scaled(b, sums, f):
        return [b.fmul(sums[i], f[i // 8]) for i in range(8 * group)]

    return scores, weighed, scaled


def load_heads(group: int) -> Any:
    """The intrinsic (address, stride, scale) -> eight float32 of each head, times scale."""

    @op(types.UniTuple(float32, 8 * group), int64, int64, float32)
    def load(b, address, stride, scale):
        found = []
        for _ in range(group):
            found += [b.fmul(x, scale) for x in floats(b, address, 8)]
            address = b.add(address, stride)
        return found

    return load


def store_runs(n: int, run: int, stride: int) -> Any:
    """The intrinsic (values, address): n float32 to shared memory, runs `stride` bytes apart."""
    one = ir.FunctionType(ir.VoidType(), [I32, FLOAT])

    @op(void, types.UniTuple(float32, n), uint32)
    def store(b, values, address):
        for i, value in enumerate(values):
            text = f"st.shared.f32 [$0+{i // run * stride + i % run * 4}], $1;"
            b.call(ir.InlineAsm(one, text, "r,f,~{memory}", side_effect=True), [address, value])

    return store
