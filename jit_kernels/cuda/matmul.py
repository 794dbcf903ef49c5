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

ROWS = 2  # of weights that a warp multiplies at a time, so that x is loaded once for both


def _products(type: str) -> Any:
    """The function (first, second, x, n) -> x . each of two rows of weights, a lane's share."""
    if is_quantised(type):
        quants = quants_of(type)

        @device
        def products(first, second, x, n):
            a, b = float32(0), float32(0)
            for i in range(8 * lane(), n, 8 * WARP):
                values = load_f32x8(x + 4 * i)
                total = sum8(values)
                q, d, m = quants(first, i)
                a += d * dot8(q, values, float32(0)) + m * total
                q, d, m = quants(second, i)
                b += d * dot8(q, values, float32(0)) + m * total
            return a, b

        return products
    element = element_of(type)

    @device
    def products_of_floats(first, second, x, n):
        a, b = float32(0), float32(0)
        for i in range(lane(), n, WARP):
            value = load_f32(x + 4 * i)
            a += value * element(first, i)
            b += value * element(second, i)
        return a, b

    return products_of_floats


@device
def put(y, bias, add, value):
    """Write value + bias (0: none) over, or onto, what is at y."""
    if bias != 0:
        value += load_f32(bias)
    store_f32(y, value + load_f32(y) if add else value)


def _few(type: str) -> Any:
    """The kernel for at most FEW_ROWS rows: warps take pairs of rows of weights in turn."""
    products, row_bytes = _products(type), row_bytes_of(type)

    def kernel(
        tid, n_thread, step, x, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        n_tok, size = load_i64(step + STEP.n_tok), row_bytes(n_in)
        n_pair = (n_out + ROWS - 1) // ROWS
        for pair in range(tid * WARPS + warp(), n_pair, n_thread * WARPS):
            r = ROWS * pair
            second = min(r + 1, n_out - 1)
            for t in range(n_tok):
                a, b = products(w + size * r, w + size * second, x + 4 * n_in * t, n_in)
                a, b = warp_sum(a), warp_sum(b)
                if lane() < ROWS and r + lane() < n_out:
                    at = r + lane()
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
