"""Products with weights in their ggml encoding.

Few rows: each warp reads rows of weights once and multiplies as it decodes them. Many rows: weights
and activations become float16 in scratch, which matrix units then multiply (gemm.py).
"""

from typing import Any

from numba import float32

from tamis.jit_kernels.cuda.decode import element_of, is_quantised, quants_of, row_bytes_of
from tamis.jit_kernels.cuda.gemm import gemm, narrowing
from tamis.jit_kernels.cuda.grid import WARP, WARPS, Launch, lane, warp, warp_sum
from tamis.jit_kernels.cuda.intrinsic import (
    device,
    dot8,
    load_f32,
    load_f32x8,
    load_i64,
    store_f32,
    sum8,
)
from tamis.jit_kernels.ops import FEW_ROWS, STEP


def _pair_of_rows(type: str) -> Any:
    """The function (first, second, x, n) -> x . each of two rows of weights, a lane's share."""
    quants = quants_of(type)

    @device
    def products(first, second, x, n):
        a, b = float32(0), float32(0)
        for i in range(8 * lane(), n, 16 * WARP):
            # Two units a turn, so that the loads of both go together; at the end, one twice.
            there = i + 8 * WARP
            j, share = (there, float32(1)) if there < n else (i, float32(0))
            qa, da, ma = quants(first, i)
            qb, db, mb = quants(second, i)
            qc, dc, mc = quants(first, j)
            qd, dd, md = quants(second, j)
            values, others = load_f32x8(x + 4 * i), load_f32x8(x + 4 * j)
            total, rest = sum8(values), share * sum8(others)
            a += da * dot8(qa, values, float32(0)) + ma * total
            b += db * dot8(qb, values, float32(0)) + mb * total
            a += share * dc * dot8(qc, others, float32(0)) + mc * rest
            b += share * dd * dot8(qd, others, float32(0)) + md * rest
        return a, b

    return products


def _one_row(type: str) -> Any:
    """The function (row, x, n) -> x . a row of weights, a lane's share, of four units a turn."""
    quants = quants_of(type)

    @device
    def unit(row, x, i, n):
        j, share = (i, float32(1)) if i < n else (0, float32(0))
        q, d, m = quants(row, j)
        return q, share * d, share * m, load_f32x8(x + 4 * j)

    @device
    def product(row, x, n):
        a = float32(0)
        for i in range(8 * lane(), n, 32 * WARP):
            qa, da, ma, xa = unit(row, x, i, n)
            qb, db, mb, xb = unit(row, x, i + 8 * WARP, n)
            qc, dc, mc, xc = unit(row, x, i + 16 * WARP, n)
            qd, dd, md, xd = unit(row, x, i + 24 * WARP, n)
            a += da * dot8(qa, xa, float32(0)) + ma * sum8(xa)
            a += db * dot8(qb, xb, float32(0)) + mb * sum8(xb)
            a += dc * dot8(qc, xc, float32(0)) + mc * sum8(xc)
            a += dd * dot8(qd, xd, float32(0)) + md * sum8(xd)
        return a

    return product


def _floats(type: str) -> tuple[Any, Any]:
    """Both functions for a type of floats, whose rows may have any length."""
    element = element_of(type)

    @device
    def product(row, x, n):
        a = float32(0)
        for i in range(lane(), n, WARP):
            a += load_f32(x + 4 * i) * element(row, i)
        return a

    @device
    def products(first, second, x, n):
        return product(first, x, n), product(second, x, n)

    return products, product


@device
def put(y, bias, add, value):
    """Write value + bias (0: none) over, or onto, what is at y."""
    if bias != 0:
        value += load_f32(bias)
    store_f32(y, value + load_f32(y) if add else value)


def _few(type: str) -> Any:
    """The kernel for at most FEW_ROWS rows: warps take rows of weights in turn.

    They take two at a time where there are enough for all warps, so that x is loaded once for both.
    """
    row_bytes = row_bytes_of(type)
    if is_quantised(type):
        products, product = _pair_of_rows(type), _one_row(type)
    else:
        products, product = _floats(type)

    def kernel(
        tid, n_thread, step, x, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        n_tok, size = load_i64(step + STEP.n_tok), row_bytes(n_in)
        n_warp, first = n_thread * WARPS, tid * WARPS + warp()
        rows = 2 if n_out >= 2 * n_warp else 1
        for r in range(rows * first, n_out, rows * n_warp):
            for t in range(n_tok):
                values, row = x + 4 * n_in * t, w + size * r
                if rows == 2:
                    a, b = products(row, w + size * min(r + 1, n_out - 1), values, n_in)
                    a, b = warp_sum(a), warp_sum(b)
                else:
                    a, b = warp_sum(product(row, values, n_in)), float32(0)
                at = r + lane()
                if lane() < rows and at < n_out:
                    to = bias + 4 * at if bias != 0 else 0
                    put(y + 4 * (y_stride * t + at), to, add, a if lane() == 0 else b)

    return kernel


def matmul(type: str) -> list[Launch]:
    """Kernels of MATMUL."""
    assert FEW_ROWS < 16
    return [
        Launch(_few(type), blocks=4, rows="few"),
        Launch(narrowing(type), blocks=4, rows="many"),
        gemm(),
    ]
