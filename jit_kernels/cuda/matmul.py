"""Products with weights in their ggml encoding.

Few rows of x: see matmul_few.py. Many: weights and rows become float16, which matrix units then
multiply (gemm.py).
"""

from numba import float32

from tamis.jit_kernels.cuda.decode import element_of, is_quantised, row_bytes_of
from tamis.jit_kernels.cuda.gemm import gemm, narrowing
from tamis.jit_kernels.cuda.grid import WARP, WARPS, Launch, lane, warp, warp_sum
from tamis.jit_kernels.cuda.intrinsic import load_f32, load_i64
from tamis.jit_kernels.cuda.matmul_few import few, put
from tamis.jit_kernels.ops import STEP


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
    few_rows = few(type) if is_quantised(type) else _few_floats(type)
    return [few_rows, narrowing(type), gemm()]
