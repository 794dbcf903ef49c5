"""Products with weights in their ggml encoding.

For few rows of x see matmul_few.py and matmul_floats.py, for some matmul_some.py. For many, weights
and rows become float16, which matrix units then multiply (gemm.py).
"""

from tamis.jit_kernels.cuda.lang.grid import MORE, Launch
from tamis.jit_kernels.cuda.lang.intrinsic import device, store_f32
from tamis.jit_kernels.cuda.linear.dequant import is_quantised
from tamis.jit_kernels.cuda.linear.gemm import gemm, narrowing
from tamis.jit_kernels.cuda.linear.matmul_few import before_of, few
from tamis.jit_kernels.cuda.linear.matmul_floats import few_floats
from tamis.jit_kernels.cuda.linear.matmul_some import Rows, launched, running


@device
def _row_at(w, size, row):
    return w + size * row


@device
def _put(to, row, t, value, other):
    y, stride, bias, add = to
    at = y + 4 * (stride * t + row)
    store_f32(at, before_of(at, bias, add, row) + value)


def _some(type: str) -> Launch:
    """The kernel for some rows."""
    begin, run = running(type, Rows(1, _row_at, _put))

    def start(tid, n_thread, a):
        begin(tid, n_thread, a.step, a.w, a.n_in, a.n_out)

    def kernel(tid, n_thread, a):
        to = a.y, a.y_stride, a.bias, a.add
        run(tid, n_thread, a.step, (a.packed, a.n_in), (a.w, a.n_out), to, a.scratch)

    return launched(type, kernel, start)


def matmul(type: str) -> list[Launch]:
    """Kernels of MATMUL."""
    if is_quantised(type):
        return [few(type), _some(type), narrowing(type, "many"), gemm("many")]
    return [few_floats(type), narrowing(type, MORE), gemm(MORE)]
