"""Products with weights in their ggml encoding.

Few rows of x are numbers of 15 bits, two signed bytes each and one scale for 16 neighbours, as
PACK_ROWS leaves them; warps read each weight once and multiply its bytes.
Many rows: weights and activations become float16, which matrix units then multiply (gemm.py).
"""

from typing import Any

from numba import cuda, float32, int32

from tamis.jit_kernels.cuda.decode import (
    element_of,
    halves_of,
    is_quantised,
    is_signed,
    row_bytes_of,
)
from tamis.jit_kernels.cuda.gemm import gemm, narrowing
from tamis.jit_kernels.cuda.grid import (
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
from tamis.jit_kernels.cuda.intrinsic import (
    const_f32,
    const_u128,
    device,
    load_f32,
    load_i64,
    quotient,
    store_f32,
)
from tamis.jit_kernels.cuda.ptx import dot_s8, dot_u8, prefetch, shuffle_xor
from tamis.jit_kernels.cuda.scratch import FEW_ROW
from tamis.jit_kernels.ops import STEP

AT_ONCE = 4  # rows of weights that a warp multiplies at a time: their loads go together
LINE = 128  # bytes that the cache fetches
MOST = 256  # rows whose sums lie in shared memory


@device
def x_unit(row, n, at):
    """Sixteen elements of a packed row: high bytes, low bytes, their scale and their sum."""
    quarter = n // 4
    return (
        const_u128(row + at),
        const_u128(row + FEW_ROW.low * quarter + at),
        const_f32(row + FEW_ROW.scale * quarter + at // 4),
        const_f32(row + FEW_ROW.sum * quarter + at // 4),
    )


def _multiplying(type: str) -> Any:
    """The function (weights of two units, units x and y) -> the product of 32 elements."""
    dot = dot_s8 if is_signed(type) else dot_u8

    @device
    def unit(weights, x):
        (q, d, m), (high, low, scale, total), h, s = weights, x, int32(0), int32(0)
        for j in range(4):
            h, s = dot(q[j], high[j], h), dot(q[j], low[j], s)
        return d * scale * (float32(128) * float32(h) + float32(s)) + m * total

    @device
    def both(weights, x, y):
        _, one, other = weights
        return unit(one, x) + unit(other, y)

    return both


@device
def four_sums(sums):
    """The sums over a warp of four numbers a lane: lane 8 i has the i-th, and lanes beside it."""
    late = lane() & 16 != 0
    a, b = (sums[2], sums[3]) if late else (sums[0], sums[1])
    c, d = (sums[0], sums[1]) if late else (sums[2], sums[3])
    a, b = a + shuffle_xor(c, 16), b + shuffle_xor(d, 16)
    x, y = (b, a) if lane() & 8 != 0 else (a, b)
    x += shuffle_xor(y, 8)
    for i in range(3):
        x += shuffle_xor(x, 4 >> i)
    return x


@device
def put(y, bias, add, value):
    """Write value + bias (0: none) over, or onto, what is at y."""
    if bias != 0:
        value += load_f32(bias)
    store_f32(y, value + load_f32(y) if add else value)


@device
def rows_of(tid, n_thread, n_out):
    """The first and last of a block's rows of weights."""
    return quotient(n_out * tid, n_thread), quotient(n_out * (tid + 1), n_thread)


def _few(type: str) -> Launch:
    """The kernel for at most FEW_ROWS rows: a block takes neighbouring rows of weights.

    Warps share each row's elements, as many of them as have 32 units of 32; four rows at a time.
    """
    row_bytes, product, halves = row_bytes_of(type), _multiplying(type), halves_of(type)

    @device
    def fetch(begin, end):
        for at in range(begin + LINE * thread(), end, LINE * THREADS):
            prefetch(at)

    @device
    def shares(n_in):
        n_part = 1
        while 2 * n_part <= WARPS and n_in >= 2 * n_part * 32 * WARP:
            n_part *= 2
        return warp() & (n_part - 1), n_part

    def start(
        tid, n_thread, step, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        # Weights are constant: the first come to the cache while the kernel before still runs.
        size, (begin, end) = row_bytes(n_in), rows_of(tid, n_thread, n_out)
        first, (_, n_part) = w + size * begin, shares(n_in)
        n_byte = quotient(WARPS, n_part) * AT_ONCE * size
        fetch(first, min(first + n_byte, w + size * end))

    @device
    def multiply(w, size, last, x_row, n, part, n_part):
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        second, third, fourth = w + size, w + 2 * size, w + 3 * size
        second, third, fourth = min(second, last), min(third, last), min(fourth, last)
        u = WARP * part + lane()
        while u < n // 32:  # a range divides by its step
            one, other = halves(w, u), halves(second, u)
            more, most = halves(third, u), halves(fourth, u)
            x, y = x_unit(x_row, n, one[0][0]), x_unit(x_row, n, one[0][1])
            a, b = a + product(one, x, y), b + product(other, x, y)
            c, d = c + product(more, x, y), d + product(most, x, y)
            u += WARP * n_part
        return four_sums((a, b, c, d))

    def kernel(
        tid, n_thread, step, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        sums = cuda.shared.array((WARPS, MOST), float32)
        n_tok, size, (part, n_part) = load_i64(step + STEP.n_tok), row_bytes(n_in), shares(n_in)
        apart = quotient(WARPS, n_part) * AT_ONCE
        begin, end = rows_of(tid, n_thread, n_out)
        for t in range(n_tok):
            x = packed + FEW_ROW.size * n_in // 4 * t
            for first in range(begin, end, MOST):
                n_row = min(MOST, end - first)
                r = quotient(warp(), n_part) * AT_ONCE
                while r < n_row:
                    at, last = w + size * (first + r), w + size * (first + n_row - 1)
                    total = multiply(at, size, last, x, n_in, part, n_part)
                    if lane() % 8 == 0:
                        sums[part, r + lane() // 8] = total
                    r += apart
                sync_block()
                for r in range(thread(), n_row, THREADS):
                    value = sums[0, r]
                    for p in range(1, n_part):
                        value += sums[p, r]
                    c = first + r
                    put(y + 4 * (y_stride * t + c), bias + 4 * c if bias != 0 else 0, add, value)
                sync_block()  # before the next sums overwrite what is read here

    return Launch(kernel, blocks=2, rows="few", start=start)


def _few_floats(type: str) -> Launch:
    """The same for weights of floats, whose rows may have any length: one row at a time."""
    row_bytes, element = row_bytes_of(type), element_of(type)

    def kernel(
        tid, n_thread, step, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        n_tok, size = load_i64(step + STEP.n_tok), row_bytes(n_in)
        for r in range(tid * WARPS + warp(), n_out, n_thread * WARPS):
            for t in range(n_tok):
                a, row, values = float32(0), w + size * r, packed + 4 * n_in * t
                for i in range(lane(), n_in, WARP):
                    a += load_f32(values + 4 * i) * element(row, i)
                a = warp_sum(a)
                if lane() == 0:
                    put(y + 4 * (y_stride * t + r), bias + 4 * r if bias != 0 else 0, add, a)

    return Launch(kernel, blocks=4, rows="few")


def matmul(type: str) -> list[Launch]:
    """Kernels of MATMUL."""
    few = _few(type) if is_quantised(type) else _few_floats(type)
    return [few, narrowing(type), gemm()]
