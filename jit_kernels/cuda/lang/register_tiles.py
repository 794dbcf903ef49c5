"""Tiles in registers, as tuples whose operations are unrolled while IR is built.

An array that a loop indexes would go to local memory; a tuple stays in registers.
"""

from typing import Any

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cuda.lang.intrinsic import (
    FLOAT,
    I32,
    I64,
    float32,
    int64,
    op,
    uint32,
    void,
)
from tamis.jit_kernels.cuda.lang.ptx import EXP2, MMA_F16, U4, emit

ROWS, COLUMNS = 4, 4  # 16-row and 8-column parts of a warp's tile: 64 x 32 sums
SUMS = types.UniTuple(float32, 4 * ROWS * COLUMNS)


@op(SUMS)
def zero_sums(b):
    """A tile of zeros."""
    return [ir.Constant(FLOAT, 0.0)] * len(SUMS)


@op(SUMS, SUMS, U4, U4, U4, U4, U4, U4)
def multiply_add(b, sums, a0, a1, a2, a3, b0, b1):
    """Return sums + A [64, 16] @ B [16, 32], fragments as load_matrices gives them: see mma_f16."""
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
    gemm.place says; a step is 32 bytes further. It returns when the multiplication has
    ended: until then its registers are in use. sm_90a.
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
    """Elementwise functions on n float32: exp2_of (2^(a - b)), plus, times."""
    kind = types.UniTuple(float32, n)

    @op(kind, kind, kind)
    def exp2_of(b, x, y):
        return [emit(b, EXP2, [b.fsub(x[i], y[i])])[0] for i in range(n)]

    @op(kind, kind, kind)
    def plus(b, x, y):
        return [b.fadd(x[i], y[i]) for i in range(n)]

    @op(kind, kind, kind)
    def times(b, x, y):
        return [b.fmul(x[i], y[i]) for i in range(n)]

    return exp2_of, plus, times
