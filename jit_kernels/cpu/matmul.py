"""Matrix products with weights in their ggml encoding.

Few rows of activations: each row of weights is read once and multiplied as it lies (gemv.py).
Many: weights are decoded to panels and multiplied in tiles (gemm.py).
"""

from typing import Any

from numba import njit

from tamis.jit_kernels.cpu.decode import decode_of, row_bytes_of
from tamis.jit_kernels.cpu.gemm import gemm_of, pack_rows
from tamis.jit_kernels.cpu.gemv import CHUNK, row_dot_of
from tamis.jit_kernels.cpu.intrinsic import load_f32, load_i32, load_i64, store_f32
from tamis.jit_kernels.cpu.panel import MR, NR
from tamis.jit_kernels.ops import FEW_ROWS, STEP, matmul_scratch

__all__ = ["matmul", "moe_matmul", "pack_rows"]

scratch_of = njit(matmul_scratch)


@njit(error_model="numpy")
def share_of(tid, n_thread, n_out, unit):
    """The range of rows of a thread: whole units, as even as possible."""
    n_unit = (n_out + unit - 1) // unit
    return unit * (n_unit * tid // n_thread), min(n_out, unit * (n_unit * (tid + 1) // n_thread))


@njit(error_model="numpy")
def parts_of(n_unit, n_thread, n_tok):
    """In how many parts of rows of x to cut a product, so that threads get even shares.

    Weights are decoded for each part anew, a tenth of the work of a few hundred rows.
    """
    best, least = 1, n_unit * n_thread * 16
    for n in (1, 2, 4):
        cost = (n_unit * n + n_thread - 1) // n_thread * (10 + n) * (4 // n)
        if cost < least and n_tok >= 64 * n:
            best, least = n, cost
    return best


@njit(error_model="numpy")
def store_sum(at, value, bias_at, bias, add):
    """Write one sum, with its bias where there is one, over or onto what is there."""
    if bias != 0:
        value += load_f32(bias_at)
    if add != 0:
        value += load_f32(at)
    store_f32(at, value)


def rows_of(type: str) -> Any:
    """The pair of functions (prepare, pair) of a ggml type, for any n that the type allows.

    prepare(x, n, out) writes 4 * n bytes that pair(row, other, n, out, x, spare), the products of
    two rows of weights, reads; spare: 128 bytes.
    """
    rows = row_dot_of(type)
    if rows.prepare is None:
        floats = rows.pair

        @njit(error_model="numpy")
        def no_prepare(x, n, out):
            pass

        @njit(error_model="numpy")
        def pair_x(row, other, n, prepared, x, spare):
            return floats(row, other, n, x)

        return no_prepare, pair_x
    decode, row_bytes, planes, quantised = decode_of(type), row_bytes_of(type), *rows
    floats = row_dot_of("F32").pair

    @njit(error_model="numpy")
    def prepare(x, n, out):
        planes(x, n // CHUNK * CHUNK, out)

    @njit(error_model="numpy")
    def pair(row, other, n, prepared, x, spare):
        whole = n // CHUNK * CHUNK
        a, b = quantised(row, other, whole, prepared)
        if whole < n:  # one block of 32 is left
            for rest in (row, other):
                decode(rest + row_bytes(whole), n - whole, spare)
                sum, _ = floats(spare, spare, n - whole, x + 4 * whole)
                a, b = b, a + sum
        return a, b

    return prepare, pair


def matmul(type: str) -> Any:
    """Kernel of MATMUL: each thread takes a range of weight rows for all rows of x."""
    prepare, pair = rows_of(type)
    row_bytes, gemm = row_bytes_of(type), gemm_of(type)

    def kernel(
        tid, n_thread, step, x, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        n_tok = load_i64(step + STEP.n_tok)
        mine = scratch + tid * scratch_of(n_in)
        if n_tok > FEW_ROWS:
            # Threads share (part of the rows of x, unit of NR weights), in this order.
            n_unit = (n_out + NR - 1) // NR
            n_part = parts_of(n_unit, n_thread, n_tok)
            begin, end = share_of(tid, n_thread, n_unit * n_part, 1)
            for part in range(begin // n_unit, (end + n_unit - 1) // n_unit):
                rows = share_of(part, n_part, n_tok, MR)
                first = NR * max(0, begin - n_unit * part)
                last = min(n_out, NR * (end - n_unit * part))
                gemm(w, n_in, first, last, packed, rows, y, 4 * y_stride, bias, add, mine)
            return
        first, last = share_of(tid, n_thread, n_out, 1)
        size, planes = row_bytes(n_in), 4 * n_in
        for t in range(n_tok):
            prepare(x + planes * t, n_in, mine + planes * t)
        for r in range(first, last, 2):
            row, next = w + size * r, min(r + 1, last - 1)  # the last may have no other row
            for t in range(n_tok):
                source, at = x + planes * t, mine + planes * t
                other = w + size * next
                sums = pair(row, other, n_in, at, source, mine + planes * FEW_ROWS)
                store_sum(y + 4 * (y_stride * t + r), sums[0], bias + 4 * r, bias, add)
                if next > r:
                    store_sum(y + 4 * (y_stride * t + next), sums[1], bias + 4 * next, bias, add)

    return kernel


def moe_matmul(type: str) -> Any:
    """Kernel of MOE_MATMUL: a token's row with the rows of each expert it was sent to."""
    prepare, pair = rows_of(type)
    row_bytes = row_bytes_of(type)

    def kernel(
        tid, n_thread, step, x, w, ids, y, n_in, n_out, n_used, x_per_slot, scratch,
    ):  # fmt: skip
        size, mine = row_bytes(n_in), scratch + tid * scratch_of(n_in)
        first, last = share_of(tid, n_thread, n_out, 1)
        for slot in range(load_i64(step + STEP.n_tok) * n_used):
            expert = w + size * n_out * load_i32(ids + 4 * slot)
            source = x + 4 * n_in * (slot if x_per_slot != 0 else slot // n_used)
            prepare(source, n_in, mine)
            for r in range(first, last, 2):
                row, next, to = expert + size * r, min(r + 1, last - 1), y + 4 * n_out * slot
                sums = pair(row, expert + size * next, n_in, mine, source, mine + 4 * n_in)
                store_f32(to + 4 * r, sums[0])
                store_f32(to + 4 * next, sums[1])

    return kernel
