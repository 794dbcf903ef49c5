"""Products of few rows with weights of floats: each weight is read once, for all rows of x.

A warp has four rows of weights at a time, whose sums share what is read of x, and of each of them
two pieces of 16 bytes a lane, all in flight at once.
"""

from typing import Any

from llvmlite import ir
from numba import cuda, float32, types

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    sync_block,
    thread,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    FLOAT,
    HALF,
    I16,
    I32,
    I64,
    device,
    floats,
    fma,
    int64,
    load_f32,
    load_i64,
    op,
    quotient,
    store_f32,
    uint32,
)
from tamis.jit_kernels.cuda.lang.ptx import STREAM_IF, emit
from tamis.jit_kernels.cuda.lang.scratch import FEW_ROWS
from tamis.jit_kernels.cuda.linear.dequant import ELEMENTS, element_of
from tamis.jit_kernels.cuda.linear.matmul_few import before_of, four_sums, rows_of

AT_ONCE = 4  # rows of weights
PIECES = 2  # of each of them
MOST = 128  # rows whose sums lie in shared memory
FOUR = types.UniTuple(float32, AT_ONCE)
WORDS = types.UniTuple(uint32, 4 * PIECES * AT_ONCE)


def _numbers(b: Any, type: str, word: Any) -> list[Any]:
    """The elements of a word as float32."""
    if type == "F32":
        return [b.bitcast(word, FLOAT)]
    late = b.lshr(word, ir.Constant(I32, 16))
    if type == "F16":
        return [b.fpext(b.bitcast(b.trunc(x, I16), HALF), FLOAT) for x in (word, late)]
    early, late = b.shl(word, ir.Constant(I32, 16)), b.and_(word, ir.Constant(I32, 0xFFFF0000))
    return [b.bitcast(x, FLOAT) for x in (early, late)]


def _parts(type: str) -> tuple[Any, Any, Any, int]:
    """The functions weights, x and multiply, and how many elements a warp takes of a row at once.

    A lane has the elements from i on that a piece holds, then those a warp's pieces further.
    """
    n_byte = ELEMENTS[type][1]
    n = 16 // n_byte  # elements of a piece
    x_kind = types.UniTuple(float32, n * PIECES)

    def starts(b: Any, i: Any) -> list[Any]:
        return [b.add(i, ir.Constant(I64, WARP * n * piece)) for piece in range(PIECES)]

    @op(WORDS, types.UniTuple(int64, AT_ONCE), int64, int64)
    def weights(b, rows, i, n_in):
        """Zeros from the n_in-th element on."""
        found: list[Any] = []
        for at in starts(b, i):
            live = b.zext(b.icmp_signed("<", at, n_in), I32)
            far = b.mul(at, ir.Constant(I64, n_byte))
            for row in rows:
                found += emit(b, STREAM_IF, [b.add(row, far), live])
        return found

    @op(x_kind, int64, int64, int64)
    def x_of(b, row, i, n_in):
        """Other elements of the row from the n_in-th on."""
        found: list[Any] = []
        for at in starts(b, i):
            there = b.select(b.icmp_signed("<", at, n_in), at, ir.Constant(I64, 0))
            found += floats(b, b.add(row, b.mul(there, ir.Constant(I64, 4))), n)
        return found

    @op(FOUR, WORDS, x_kind, FOUR)
    def multiply(b, words, x, sums):
        found = list(sums)
        for piece in range(PIECES):
            for r in range(AT_ONCE):
                first = 4 * (AT_ONCE * piece + r)
                row = [y for w in words[first : first + 4] for y in _numbers(b, type, w)]
                for y, z in zip(row, x[n * piece : n * (piece + 1)], strict=True):
                    found[r] = fma(b, y, z, found[r])
        return found

    return weights, x_of, multiply, WARP * n * PIECES


@device
def share_of(w, n_item):
    """The first and last of a warp's items."""
    return quotient(n_item * w, WARPS), quotient(n_item * (w + 1), WARPS)


@device
def joined(sums, r, t, n_item, n_chunk):
    """A row's sum over the warps that had items of it."""
    value, first = float32(0), r // AT_ONCE * n_chunk
    for p in range(WARPS):
        begin, end = share_of(p, n_item)
        value += sums[p, t, r] if max(begin, first) < min(end, first + n_chunk) else float32(0)
    return value


def _working(type: str) -> tuple[Any, int]:
    """The function that leaves a warp's share of a block's products in shared memory.

    An item is a chunk of AT_ONCE rows. rows: address of the first, how many, bytes of each.
    """
    weights, x_of, multiply, chunk = _parts(type)

    @device
    def four_of(rows, quad):
        first, n_row, size = rows
        last, r = n_row - 1, AT_ONCE * quad
        return (
            first + size * r, first + size * min(r + 1, last),
            first + size * min(r + 2, last), first + size * min(r + 3, last),
        )  # fmt: skip

    @device
    def leave(sums, t, quad, four):
        value = four_sums(four)
        if lane() % 8 == 0:
            sums[warp(), t, AT_ONCE * quad + lane() // 8] = value

    @device
    def work(sums, rows, x, n_in, n_tok):
        n_chunk, row, none = (n_in + chunk - 1) // chunk, 4 * n_in, float32(0)
        item, last = share_of(warp(), (rows[1] + AT_ONCE - 1) // AT_ONCE * n_chunk)
        while item < last:
            quad = quotient(item, n_chunk)
            before = quad * n_chunk
            end = min(last, before + n_chunk)
            at = four_of(rows, quad)
            one = two = three = four = (none, none, none, none)
            for c in range(item - before, end - before):
                i = c * chunk + chunk // (WARP * PIECES) * lane()
                w = weights(at, i, n_in)
                one = multiply(w, x_of(x, i, n_in), one)
                if n_tok > 1:
                    two = multiply(w, x_of(x + row, i, n_in), two)
                if n_tok > 2:
                    three = multiply(w, x_of(x + 2 * row, i, n_in), three)
                if n_tok > 3:
                    four = multiply(w, x_of(x + 3 * row, i, n_in), four)
            leave(sums, 0, quad, one)
            if n_tok > 1:
                leave(sums, 1, quad, two)
            if n_tok > 2:
                leave(sums, 2, quad, three)
            if n_tok > 3:
                leave(sums, 3, quad, four)
            item = end

    return work, chunk


def few_floats(type: str) -> Launch:
    """The kernel for at most FEW_ROWS rows; rows of weights may have any length."""
    assert FEW_ROWS == 4
    n_byte, element, (work, chunk) = ELEMENTS[type][1], element_of(type), _working(type)

    @device
    def one_product(row, x, n_in):
        """The dot product of one row of any alignment with x."""
        a = float32(0)
        for i in range(lane(), n_in, WARP):
            a += load_f32(x + 4 * i) * element(row, i)
        return warp_sum(a)

    def kernel(tid, n_thread, a):
        sums = cuda.shared.array((WARPS, FEW_ROWS, MOST), float32)
        n_tok, size, (first, last) = (
            load_i64(a.step + STEP.n_tok), n_byte * a.n_in, rows_of(tid, n_thread, a.n_out),
        )  # fmt: skip
        if (a.w | size) & 15 != 0:
            for r in range(first + warp(), last, WARPS):
                for t in range(n_tok):
                    value = one_product(a.w + size * r, a.packed + 4 * a.n_in * t, a.n_in)
                    if lane() == 0:
                        to = a.y + 4 * (a.y_stride * t + r)
                        store_f32(to, value + before_of(to, a.bias, a.add, r))
            return
        n_chunk = (a.n_in + chunk - 1) // chunk
        for row in range(first, last, MOST):
            n_row = min(MOST, last - row)
            n_item = (n_row + AT_ONCE - 1) // AT_ONCE * n_chunk
            work(sums, (a.w + size * row, n_row, size), a.packed, a.n_in, n_tok)
            sync_block()
            for i in range(thread(), n_row * n_tok, THREADS):
                t = quotient(i, n_row)
                r = i - n_row * t
                to = a.y + 4 * (a.y_stride * t + row + r)
                value = joined(sums, r, t, n_item, n_chunk)
                store_f32(to, value + before_of(to, a.bias, a.add, row + r))
            sync_block()  # before the next sums overwrite what is read here

    return Launch(kernel, blocks=2, rows="few")
