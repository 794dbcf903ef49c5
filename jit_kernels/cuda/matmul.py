"""Products with weights in their ggml encoding.

Few rows: each block brings rows of x to shared memory as numbers of 15 bits, two signed bytes each
and one scale for 16 neighbours; each warp reads rows of weights once and multiplies their bytes.
Many rows: weights and activations become float16, which matrix units then multiply (gemm.py).
"""

from typing import Any

from numba import cuda, float32, int32, uint8, uint32

from tamis.jit_kernels.cuda.decode import (
    element_of,
    is_quantised,
    is_signed,
    quants_of,
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
    absmax8,
    device,
    high_bytes,
    load_f32,
    load_f32x8,
    load_i64,
    low_bytes,
    rounded8,
    store_f32,
    sum8,
)
from tamis.jit_kernels.cuda.ptx import (
    dot_s8,
    dot_u8,
    load_shared,
    load_shared_u128,
    shared_address,
    store_shared_f32,
    store_shared_u128,
)
from tamis.jit_kernels.ops import STEP

UNIT = 16  # elements that a lane multiplies at a time
SEGMENT = 16384  # elements of x that are in shared memory at a time
HIGH, LOW, SCALE, SUM, SIZE = 0, SEGMENT, 2 * SEGMENT, 2 * SEGMENT + SEGMENT // 4, 5 * SEGMENT // 2


@device
def quantise(x, n, shared):
    """Write n elements of x to shared memory as 128 * high + low times a scale, with their sums."""
    for i in range(UNIT * thread(), n, UNIT * THREADS):
        a, b = load_f32x8(x + 4 * i), load_f32x8(x + 4 * i + 32)
        top = max(absmax8(a), absmax8(b))
        scale = top * float32(1 / (127 * 128))
        inverse = float32(127 * 128) / top if top > float32(1e-30) else float32(0)
        one, other = rounded8(a, inverse), rounded8(b, inverse)
        store_shared_u128(uint32(shared + HIGH + i), high_bytes(one, other))
        store_shared_u128(uint32(shared + LOW + i), low_bytes(one, other))
        store_shared_f32(uint32(shared + SCALE + i // 4), scale)
        store_shared_f32(uint32(shared + SUM + i // 4), sum8(a) + sum8(b))


def _unit(type: str) -> Any:
    """The function (q, scale, offset, shared, at) -> their product with the elements at `at`."""
    dot = dot_s8 if is_signed(type) else dot_u8

    @device
    def unit(q, d, m, shared, at):
        high = load_shared_u128(uint32(shared + HIGH + at))
        low = load_shared_u128(uint32(shared + LOW + at))
        h, s = int32(0), int32(0)
        for j in range(4):
            h, s = dot(q[j], high[j], h), dot(q[j], low[j], s)
        scale = load_shared(uint32(shared + SCALE + at // 4))
        total = load_shared(uint32(shared + SUM + at // 4))
        return d * scale * (float32(128) * float32(h) + float32(s)) + m * total

    return unit


def _product(type: str) -> Any:
    """The function that multiplies n elements of two rows of weights, a lane's share of them.

    The first row's are those from `start` on, the second's lie `skew` further on, as do those of x.
    """
    quants, unit = quants_of(type), _unit(type)

    @device
    def product(rows, start, n, skew, shared):
        (first, second), a, b = rows, float32(0), float32(0)
        for i in range(UNIT * lane(), n, 2 * UNIT * WARP):
            # Two units a turn, so that the loads of both go together; at the end, one twice.
            there = i + UNIT * WARP
            j, share = (there, float32(1)) if there < n else (i, float32(0))
            qa, da, ma = quants(first, start + i)
            qb, db, mb = quants(second, start + i + skew)
            qc, dc, mc = quants(first, start + j)
            qd, dd, md = quants(second, start + j + skew)
            a += unit(qa, da, ma, shared, i) + share * unit(qc, dc, mc, shared, j)
            b += unit(qb, db, mb, shared, i + skew) + share * unit(qd, dd, md, shared, j + skew)
        return a, b

    return product


@device
def put(y, bias, add, value):
    """Write value + bias (0: none) over, or onto, what is at y."""
    if bias != 0:
        value += load_f32(bias)
    store_f32(y, value + load_f32(y) if add else value)


def _few(type: str) -> Any:
    """The kernel for at most FEW_ROWS rows: warps take rows of weights in turn.

    They take two at a time, or the halves of one where there are too few for all warps.
    """
    row_bytes, product = row_bytes_of(type), _product(type)

    def kernel(
        tid, n_thread, step, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        n_tok, size = load_i64(step + STEP.n_tok), row_bytes(n_in)
        shared = shared_address(cuda.shared.array(0, uint8))
        n_warp, first = n_thread * WARPS, tid * WARPS + warp()
        rows = 2 if n_out >= 2 * n_warp else 1
        for t in range(n_tok):
            for start in range(0, n_in, SEGMENT):
                n, last = min(SEGMENT, n_in - start), start + SEGMENT >= n_in
                if t + start > 0:
                    sync_block()  # all have read what was there
                quantise(packed + 4 * (n_in * t + start), n, shared)
                sync_block()
                for r in range(rows * first, n_out, rows * n_warp):
                    row = w + size * r
                    if rows == 2:
                        pair = row, row + size if r + 1 < n_out else row
                        a, b = product(pair, start, n, 0, shared)
                        a, b = warp_sum(a), warp_sum(b)
                    else:
                        a, b = product((row, row), start, n // 2, n // 2, shared)
                        a, b = warp_sum(a + b), float32(0)
                    at = r + lane()
                    if lane() < rows and at < n_out:
                        to = bias + 4 * at if bias != 0 and last else 0
                        onto, value = add if start == 0 else 1, a if lane() == 0 else b
                        put(y + 4 * (y_stride * t + at), to, onto, value)

    return kernel


def _few_floats(type: str) -> Any:
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

    return kernel


def matmul(type: str) -> list[Launch]:
    """Kernels of MATMUL."""
    if is_quantised(type):
        few = Launch(_few(type), blocks=3, shared=SIZE, rows="few")
    else:
        few = Launch(_few_floats(type), blocks=4, rows="few")
    return [few, narrowing(type), gemm()]
