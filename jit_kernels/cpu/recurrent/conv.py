"""Short causal convolutions."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, fma, lane, load_f, splat_f, store_f, zero_f
from tamis.jit_kernels.cpu.linear.activation import ACTIVATIONS
from tamis.jit_kernels.cpu.recurrent.channels import channels


@njit(error_model="numpy")
def row_of(state, x, n, x_stride, n_before, i):
    """The address of row i of the n_before rows of the state, followed by those of x."""
    return state + 4 * n * i if i < n_before else x + 4 * x_stride * (i - n_before)


def short_conv(activation: str) -> Any:
    """Kernel of SHORT_CONV: threads share the channels."""
    function = ACTIVATIONS[activation]

    def kernel(tid, n_thread, a):
        n_tok, n_before = load_i64(a.step + STEP.n_tok), a.n_tap - 1
        first, whole, last = channels(tid, n_thread, a.n)
        for t in range(n_tok):
            out = a.y + 4 * a.y_stride * t
            for c in range(first, whole, LANES):
                total = load_f(a.bias + 4 * c) if a.bias != 0 else zero_f()
                for j in range(a.n_tap):
                    row = row_of(a.state, a.x, a.n, a.x_stride, n_before, t + j)
                    total = fma(load_f(a.w + 4 * (a.n * j + c)), load_f(row + 4 * c), total)
                store_f(out + 4 * c, function(total))
            for c in range(whole, last):
                one = load_f32(a.bias + 4 * c) if a.bias != 0 else load_f32(a.w) * 0
                for j in range(a.n_tap):
                    row = row_of(a.state, a.x, a.n, a.x_stride, n_before, t + j)
                    one += load_f32(a.w + 4 * (a.n * j + c)) * load_f32(row + 4 * c)
                store_f32(out + 4 * c, lane(function(splat_f(one)), 0))
        # Row j of the new state comes from row j + n_tok >= j: ascending, none is read too late.
        for j in range(n_before):
            row = row_of(a.state, a.x, a.n, a.x_stride, n_before, n_tok + j)
            for c in range(first, last):
                store_f32(a.state + 4 * (a.n * j + c), load_f32(row + 4 * c))

    return kernel
