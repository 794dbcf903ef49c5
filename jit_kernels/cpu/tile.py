"""Vector building blocks of the float kernels: dot products and sums over 16 lanes.

The number of elements is a multiple of 16 everywhere. LLVM splits the vectors where the CPU's
registers are narrower.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from tamis.jit_kernels.cpu.intrinsic import (
    FLOAT,
    HALF,
    I32,
    I64,
    call,
    float32,
    int64,
    op,
    pointer,
    void,
)

LANES = 16
VECTOR, HALF_VECTOR = ir.VectorType(FLOAT, LANES), ir.VectorType(HALF, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)


def _at(b: Any, address: Any, index: Any, size: int) -> Any:
    """The address of element `index` of `size` bytes."""
    return b.add(address, b.mul(index, ir.Constant(I64, size)))


def _load(b: Any, address: Any) -> Any:
    return b.load(pointer(b, address, VECTOR), align=1)


def _load_half(b: Any, address: Any) -> Any:
    return b.fpext(b.load(pointer(b, address, HALF_VECTOR), align=1), VECTOR)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, "llvm.fma.v16f32", VECTOR, [x, y, z])


def _sum(b: Any, vector: Any) -> Any:
    """Sum of the lanes by halves, always in the same order."""
    n = LANES
    undefined = ir.Constant(VECTOR, ir.Undefined)
    while n > 1:
        n //= 2
        picks = [ir.Constant(I32, n + i if i < n else 0) for i in range(LANES)]
        high = b.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(I32, LANES), picks))
        vector = b.fadd(vector, high)
    return b.extract_element(vector, ir.Constant(I32, 0))


def _splat(b: Any, value: Any) -> Any:
    undefined = ir.Constant(VECTOR, ir.Undefined)
    one = b.insert_element(undefined, value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return b.shuffle_vector(one, undefined, zeros)


def _dots(n_row: int, n_col: int) -> Any:
    """sums[i * n_col + j] = w[i] . x[j] for n_row rows of w and n_col rows of x, all f32.

    Arguments: w, n (elements, also the stride of w), x, x_stride (bytes), sums. Each sum is made
    in the same order whatever the tile, so results do not depend on how rows are grouped.
    """

    def dots(b: Any, w: Any, n: Any, x: Any, x_stride: Any, sums: Any) -> None:
        cells = [cgutils.alloca_once_value(b, ZERO) for _ in range(n_row * n_col)]
        row = b.mul(n, ir.Constant(I64, 4))
        with cgutils.for_range_slice(b, I64(0), n, I64(LANES), I64) as (k, _):
            at = b.mul(k, ir.Constant(I64, 4))
            ws = [_load(b, b.add(b.add(w, b.mul(row, I64(i))), at)) for i in range(n_row)]
            for j in range(n_col):
                xj = _load(b, b.add(b.add(x, b.mul(x_stride, I64(j))), at))
                for i in range(n_row):
                    cell = cells[i * n_col + j]
                    b.store(_fma(b, ws[i], xj, b.load(cell)), cell)
        for i, cell in enumerate(cells):
            b.store(_sum(b, b.load(cell)), pointer(b, _at(b, sums, I64(i), 4), FLOAT))

    return op(void, int64, int64, int64, int64, int64)(dots)


dots_4x4, dots_4x1, dots_1x1 = _dots(4, 4), _dots(4, 1), _dots(1, 1)


@op(float32, int64, int64, int64)
def dot_half(b, x, h, n):
    """X . h of f32 x [n] and f16 h [n]."""
    cell = cgutils.alloca_once_value(b, ZERO)
    with cgutils.for_range_slice(b, I64(0), n, I64(LANES), I64) as (k, _):
        product = _fma(b, _load(b, _at(b, x, k, 4)), _load_half(b, _at(b, h, k, 2)), b.load(cell))
        b.store(product, cell)
    return _sum(b, b.load(cell))


@op(void, int64, float32, int64, int64)
def add_scaled_half(b, y, a, h, n):
    """Y += a * h of f32 y [n] and f16 h [n]."""
    scale = _splat(b, a)
    with cgutils.for_range_slice(b, I64(0), n, I64(LANES), I64) as (k, _):
        at = _at(b, y, k, 4)
        value = _fma(b, scale, _load_half(b, _at(b, h, k, 2)), _load(b, at))
        b.store(value, pointer(b, at, VECTOR), align=1)
