"""A warpgroup's products of attention: 64 rows of queries or weights in registers with a slice.

A slice is SLICE rows of keys or values in shared memory, in parts of 64 elements: a part has rows
of 128 bytes one after another, whose 16-byte pieces are permuted by xor with the row (PTX ISA
9.7.15.5.1, 128-byte swizzle). A warp's 16 rows are as in mma_f16, so that the rest of attention is
tile_attend.py's. sm_90a.
"""

from typing import Any

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cuda.intrinsic import FLOAT, I32, I64, device, op, packed, uint32
from tamis.jit_kernels.cuda.intrinsic import int64 as int64_type

SLICE = 64  # rows
PART = SLICE * 128  # bytes of 64 elements of all rows
SWIZZLED = 1 << 62
ROWS_8 = 64 << 32  # eight rows are 1024 bytes, in units of 16


def parts_of(head_dim: int) -> int:
    """Parts of a slice."""
    return -(-head_dim // 64)


@device
def place(row, piece):
    """Byte offset of a 16-byte piece of a row in a slice."""
    return (piece >> 3) * PART + row * 128 + (((piece & 7) ^ (row & 7)) << 4)


def _asm(lines: list[str], n: int, tied: bool, n_word: int) -> Any:
    """A text of n sums (given as well, where tied), n_word words and a description."""
    constraints = ["=f"] * n + [str(i) for i in range(n if tied else 0)]
    constraints += ["r"] * n_word + ["l", "~{memory}"]
    given = ([FLOAT] * n if tied else []) + [I32] * n_word + [I64]
    kind = ir.FunctionType(ir.LiteralStructType([FLOAT] * n), given)
    return ir.InlineAsm(kind, " ".join(lines), ",".join(constraints), side_effect=True)


def _multiply(n: int, slice_: int, a: list[str], ahead: int, *, keep: str, rows: str) -> str:
    """Sums of n columns + a @ the slice that operand slice_ describes, from `ahead` on."""
    sums = ",".join(f"${i}" for i in range(n // 2))
    to = f"add.s64 b, ${slice_}, {ahead // 16};"
    return (
        f"{to} wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16"
        f" {{{sums}}}, {{{','.join(a)}}}, b, {keep}, 1, 1, {rows};"
    )


START = "{ .reg .pred none, all; .reg .b64 b; setp.ne.b32 none, 0, 0; setp.ne.b32 all, 1, 0;"
FENCE = "wgmma.fence.sync.aligned;"
END = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"


def scoring(head_dim: int) -> Any:
    """The intrinsic (queries, address) -> queries @ keys.T, [64, SLICE] of a warpgroup."""
    n, n_word = SLICE // 2, head_dim // 4
    lines = [START, FENCE]
    for c in range(head_dim // 16):
        a = [f"${n + 4 * c + i}" for i in range(4)]
        ahead = c // 4 * PART + c % 4 * 32
        keep = "all" if c else "none"
        lines.append(_multiply(SLICE, n + n_word, a, ahead, keep=keep, rows="0"))
    asm = _asm([*lines, END], n, False, n_word)
    q_kind, s_kind = types.UniTuple(uint32, n_word), types.UniTuple(types.float32, n)

    @op(s_kind, q_kind, int64_type)
    def score(b: Any, q: Any, address: Any) -> list[Any]:
        start = b.lshr(address, ir.Constant(I64, 4))
        found = b.call(asm, [*q, b.or_(start, ir.Constant(I64, SWIZZLED | ROWS_8 | 1 << 16))])
        return [b.extract_value(found, i) for i in range(n)]

    return score


def weighing(head_dim: int) -> Any:
    """The intrinsic (sums, weights, address) -> sums + weights @ values, [64, head_dim]."""
    n, n_word = head_dim // 2, SLICE // 4
    lines = [START, FENCE]
    for key in range(SLICE // 16):
        a = [f"${2 * n + 4 * key + i}" for i in range(4)]
        ahead = key * 16 * 128
        lines.append(_multiply(head_dim, 2 * n + n_word, a, ahead, keep="all", rows="1"))
    asm = _asm([*lines, END], n, True, n_word)
    sums_kind = types.UniTuple(types.float32, n)
    w_kind = types.UniTuple(types.float32, SLICE // 2)

    @op(sums_kind, sums_kind, w_kind, int64_type)
    def weigh(b: Any, sums: Any, w: Any, address: Any) -> list[Any]:
        words = [packed(b, w[i], w[i + 1]) for i in range(0, SLICE // 2, 2)]
        start = b.lshr(address, ir.Constant(I64, 4))
        described = b.or_(start, ir.Constant(I64, SWIZZLED | ROWS_8 | PART // 16 << 16))
        found = b.call(asm, [*sums, *words, described])
        return [b.extract_value(found, i) for i in range(n)]

    return weigh
