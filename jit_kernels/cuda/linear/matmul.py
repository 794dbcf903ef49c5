"""Products with weights in their ggml encoding.

Few rows of x: see matmul_few.py and matmul_floats.py. Many: weights and rows become float16, which
matrix units then multiply (gemm.py).
"""

from tamis.jit_kernels.cuda.lang.grid import Launch
from tamis.jit_kernels.cuda.linear.dequant import is_quantised
from tamis.jit_kernels.cuda.linear.gemm import gemm, narrowing
from tamis.jit_kernels.cuda.linear.matmul_few import few
from tamis.jit_kernels.cuda.linear.matmul_floats import few_floats


def matmul(type: str) -> list[Launch]:
    """Kernels of MATMUL."""
    few_rows = few(type) if is_quantised(type) else few_floats(type)
    return [few_rows, narrowing(type), gemm()]
