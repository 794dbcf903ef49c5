"""A warpgroup's matrix products of attention (wgmma): 64 rows with a slice of K or V.

A slice is SLICE rows of keys or values in shared memory, in parts of 64 elements: a part has rows
of 128 bytes one after another, whose 16-byte pieces are permuted by xor with the row (PTX ISA
9.7.15.5.1, 128-byte swizzle). A warp's 16 rows are as in mma_f16, so that the rest of attention is
tile_attend.py's. sm_90a.
"""

from typing import Any

from llvmlite import ir
from numba import types

from tamis.jit_kernels.cuda.lang.intrinsic import (
    FLOAT,
    I32,
    I64,
    device,
    float32,
    int64,
    op,
    packed,
    uint32,
    void,
)
from tamis.jit_kernels.cuda.lang.ptx import STORE_SHARED_WORD, emit

SLICE = 64  # rows
PART = SLICE * 128  # bytes of 64 elements of all rows
SWIZZLED = 1 << 62
ROWS_8 = 64 << 32  # eight rows are 1024 bytes, in units of 16


def parts_of(head_dim: int) -> int:
    """Number of 64-element parts of a slice's rows."""
    return -(-head_dim // 64)


@device
def place(row, piece):
    """Byte offset of a 16-byte piece of a row in a slice."""
    return (piece >> 3) * PART + row * 128 + (((piece & 7) ^ (row & 7)) << 4)


def _described(b: Any, address: Any, apart: int) -> Any:
    """The wgmma matrix descriptor of a tile whose 64-element parts are `apart` bytes apart."""
    flags = SWIZZLED | ROWS_8 | apart // 16 << 16
    return b.or_(b.lshr(address, ir.Constant(I64, 4)), ir.Constant(I64, flags))


def _called(b: Any, lines: list[str], n: int, given: list[Any], letters: str) -> list[Any]:
    """Emit an asm text with n float32 results; letters: constraints of the values given."""
    tied = len(given) - len(letters)
    constraints = ["=f"] * n + [str(i) for i in range(tied)] + [*letters, "~{memory}"]
    kind = ir.FunctionType(ir.LiteralStructType([FLOAT] * n), [value.type for value in given])
    text = " ".join([START, *lines, END])
    asm = ir.InlineAsm(kind, text, ",".join(constraints), side_effect=True)
    found = b.call(asm, given)
    return [b.extract_value(found, i) for i in range(n)]


START = (
    "{ .reg .pred none, all; .reg .b64 a, b; setp.ne.b32 none, 0, 0; setp.ne.b32 all, 1, 0;"
    " wgmma.fence.sync.aligned;"
)
END = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"


def _multiply(n: int, a: str, keep: str, rows: str) -> str:
    """The asm text sums + a @ b; n columns of sums ($0 and on), b a descriptor."""
    sums = ",".join(f"${i}" for i in range(n // 2))
    kind = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16"
    return f"{kind} {{{sums}}}, {a}, b, {keep}, 1, 1, {rows};"


def scoring(head_dim: int) -> Any:
    """The intrinsic (queries' address, keys') -> queries @ keys.T, [64, SLICE] of a warpgroup.

    Queries have the layout of a slice.
    """
    n, lines = SLICE // 2, []
    for c in range(head_dim // 16):
        ahead = (c // 4 * PART + c % 4 * 32) // 16
        lines.append(f"add.s64 a, ${n}, {ahead}; add.s64 b, ${n + 1}, {ahead};")
        lines.append(_multiply(SLICE, "a", "all" if c else "none", "0, 0"))

    @op(types.UniTuple(float32, n), int64, int64)
    def score(b: Any, q: Any, k: Any) -> list[Any]:
        return _called(b, lines, n, [_described(b, q, PART), _described(b, k, PART)], "ll")

    return score


def weighing(head_dim: int) -> Any:
    """The intrinsic (sums, weights, address) -> sums + weights @ values, [64, head_dim]."""
    n, n_word, lines = head_dim // 2, SLICE // 4, []
    for key in range(SLICE // 16):
        a = ",".join(f"${2 * n + 4 * key + i}" for i in range(4))
        lines.append(f"add.s64 b, ${2 * n + n_word}, {128 * key};")
        lines.append(_multiply(head_dim, f"{{{a}}}", "all", "1"))
    sums_kind = types.UniTuple(float32, n)

    @op(sums_kind, sums_kind, types.UniTuple(float32, SLICE // 2), int64)
    def weigh(b: Any, sums: Any, w: Any, v: Any) -> list[Any]:
        words = [packed(b, w[i], w[i + 1]) for i in range(0, SLICE // 2, 2)]
        given = [*sums, *words, _described(b, v, PART)]
        return _called(b, lines, n, given, "r" * n_word + "l")

    return weigh


def storing(head_dim: int) -> Any:
    """The intrinsic that stores a warp's 16 rows for score.

    Its arguments are (queries, address, lane / 4, lane % 4); address is that of the first row,
    whose number is a multiple of 8.
    """

    @op(void, types.UniTuple(uint32, head_dim // 4), uint32, uint32, uint32)
    def store(b: Any, q: Any, address: Any, g: Any, t: Any) -> None:
        start = b.add(
            address, b.add(b.mul(g, ir.Constant(I32, 128)), b.mul(t, ir.Constant(I32, 4)))
        )
        for i, word in enumerate(q):
            piece, late = 2 * (i // 4) + i % 4 // 2, i % 2  # rows g, and g + 8
            swizzled = b.shl(b.xor(g, ir.Constant(I32, piece % 8)), ir.Constant(I32, 4))
            at = b.add(start, ir.Constant(I32, piece // 8 * PART + 1024 * late))
            emit(b, STORE_SHARED_WORD, [b.add(at, swizzled), word])

    return store
