"""Matrix products with weights in their ggml encoding.

For few rows of activations each row of weights is read once and multiplied without unpacking
(gemv.py). For many rows, weights are decoded to panels and multiplied in tiles (gemm.py).
"""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import (
    FEW_ROWS,
    STEP,
    STRIP,
    STRIP_TYPES,
    packed_form,
    strip_block,
)
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.work_sharing import take
from tamis.jit_kernels.cpu.linear.dequant import decode_of, row_bytes_of
from tamis.jit_kernels.cpu.linear.gemm import Operands, gemm_of, tiles_of
from tamis.jit_kernels.cpu.linear.gemv import CHUNK, pair_of_type
from tamis.jit_kernels.cpu.linear.interleaved import OF_TYPE, WIDE, product_of
from tamis.jit_kernels.cpu.linear.pack import scratch_of
from tamis.jit_kernels.cpu.linear.panel import NR, share_of

ROWS = 4  # rows of x that a strip is multiplied with at once


@njit(error_model="numpy")
def parts_of(n_unit, n_thread, n_tok):
    """The number of parts of the rows of x of a product, such that threads get even shares.

    Weights are decoded again for each part, a tenth of the work of a few hundred rows.
    """
    best, least = 1, n_unit * n_thread * 16
    for n in (1, 2, 4):
        cost = (n_unit * n + n_thread - 1) // n_thread * (10 + n) * (4 // n)
        if cost < least and n_tok >= 64 * n:
            best, least = n, cost
    return best


@njit(error_model="numpy")
def store_sum(at, value, bias_at, bias, add):
    """Write one sum, with its bias if there is one, over or onto the present value."""
    if bias != 0:
        value += load_f32(bias_at)
    if add != 0:
        value += load_f32(at)
    store_f32(at, value)


def rows_of(type: str) -> Any:
    """The function pair(row, other, n, x, spare) of a ggml type: the products of two rows with x.

    n is any that the type allows; x is a row as pack.pack_row writes it; spare: 128 bytes.
    """
    pair = pair_of_type(type)
    if packed_form(type) == "float":

        @njit(error_model="numpy")
        def pair_of_floats(row, other, n, x, spare):
            return pair(row, other, n, x)

        return pair_of_floats
    decode, row_bytes, floats = decode_of(type), row_bytes_of(type), pair_of_type("F32")

    @njit(error_model="numpy")
    def pair_of_quants(row, other, n, x, spare):
        whole = n // CHUNK * CHUNK
        a, b = pair(row, other, whole, x + 4 * n)
        if whole < n:  # one block of 32 is left
            for rest in (row, other):
                decode(rest + row_bytes(whole), n - whole, spare)
                sum, _ = floats(spare, spare, n - whole, x + 4 * whole)
                a, b = b, a + sum
        return a, b

    return pair_of_quants


def few_of_pairs(type: str) -> tuple[int, Any]:
    """Rows of weights in a unit, and the function that multiplies units with few rows of x.

    few(a, units, spare), a: Operands; units: first and last.
    """
    pair, row_bytes = rows_of(type), row_bytes_of(type)

    @njit(error_model="numpy")
    def few(a, units, spare):
        size = row_bytes(a.n_in)
        for r in range(2 * units[0], 2 * units[1], 2):
            # the last one may have no second row
            row, next = a.w + size * r, min(r + 1, a.n_out - 1)
            for t in range(a.n_row):
                to = a.y + 4 * a.y_stride * t
                sums = pair(row, a.w + size * next, a.n_in, a.packed + 8 * a.n_in * t, spare)
                store_sum(to + 4 * r, sums[0], a.bias + 4 * r, a.bias, a.add)
                if next > r:
                    store_sum(to + 4 * next, sums[1], a.bias + 4 * next, a.bias, a.add)

    return 2, few


def few_of_strips(type: str) -> tuple[int, Any]:
    """The same for interleaved weights; a unit is WIDE strips."""
    one, several = product_of(type, 1), product_of(type, ROWS)
    block, size, wide = OF_TYPE[type].block, strip_block(type), WIDE

    @njit(error_model="numpy")
    def few(a, units, spare):
        length, stride = a.n_in // block * STRIP * size, 4 * a.y_stride
        for s in range(wide * units[0], min(wide * units[1], a.n_out // STRIP), wide):
            strip, to, t = a.w + length * s, a.y + 4 * STRIP * s, 0
            apart = length if STRIP * (s + 1) < a.n_out else 0
            of_bias = a.bias + 4 * STRIP * s if a.bias != 0 else 0
            while t < a.n_row:
                n_row = min(ROWS, a.n_row - t)
                x, at = (a.packed + 8 * a.n_in * t, 8 * a.n_in, n_row), (to + stride * t, stride)
                if n_row > 1:
                    several(strip, apart, a.n_in, x, at, of_bias, a.add)
                else:
                    one(strip, apart, a.n_in, x, at, of_bias, a.add)
                t += n_row

    return wide * STRIP, few


def matmul(type: str) -> Any:
    """Kernel of MATMUL: threads take ranges of weight rows for all rows of x."""
    in_strips, gemm = STRIP_TYPES.get(type), gemm_of(type)
    unit, few = few_of_strips(in_strips) if in_strips else few_of_pairs(type)
    block_rows = tiles_of(packed_form(type)).MR

    @njit(error_model="numpy")
    def many(tid, n_thread, turns, a, mine):
        # Threads share (part of the rows of x, unit of NR weights), in this order.
        n_unit = (a.n_out + NR - 1) // NR
        n_part, turn = parts_of(n_unit, n_thread, a.n_row), 0
        begin, end = take(turn, tid, n_thread, n_unit * n_part, turns)
        while begin < n_unit * n_part:
            for part in range(begin // n_unit, (end + n_unit - 1) // n_unit):
                rows = share_of(part, n_part, a.n_row, block_rows)
                first = NR * max(0, begin - n_unit * part)
                last = min(a.n_out, NR * (end - n_unit * part))
                gemm(a, (first, last), rows, mine)
            turn += 1
            begin, end = take(turn, tid, n_thread, n_unit * n_part, turns)

    def kernel(tid, n_thread, turns, a):
        n_tok, mine = load_i64(a.step + STEP.n_tok), a.scratch + tid * scratch_of(a.n_in)
        given = Operands(a.packed, n_tok, a.w, a.bias, a.y, a.n_in, a.n_out, a.y_stride, a.add)
        if n_tok > FEW_ROWS:
            many(tid, n_thread, turns, given, mine)
            return
        n_unit, turn = (a.n_out + unit - 1) // unit, 0
        begin, end = take(turn, tid, n_thread, n_unit, turns)
        while begin < n_unit:
            few(given, (begin, end), mine)
            turn += 1
            begin, end = take(turn, tid, n_thread, n_unit, turns)

    return kernel
