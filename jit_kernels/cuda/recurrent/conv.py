"""Short causal convolutions."""

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.linear.activation import ACTIVATIONS


@device
def row_of(state, x, n, x_stride, n_before, i):
    """The address of row i of the n_before rows of the state, followed by those of x."""
    return state + 4 * n * i if i < n_before else x + 4 * x_stride * (i - n_before)


def short_conv(activation: str) -> list[Launch]:
    """Kernels of SHORT_CONV: one of outputs, then one that updates the channels' states."""
    function = ACTIVATIONS[activation]

    def outputs(tid, n_thread, a):
        total, n_before = load_i64(a.step + STEP.n_tok) * a.n, a.n_tap - 1
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            t, c = i // a.n, i % a.n
            value = load_f32(a.bias + 4 * c) if a.bias != 0 else float32(0)
            for j in range(a.n_tap):
                row = row_of(a.state, a.x, a.n, a.x_stride, n_before, t + j)
                value += load_f32(a.w + 4 * (a.n * j + c)) * load_f32(row + 4 * c)
            store_f32(a.y + 4 * (a.y_stride * t + c), function(value))

    def go_on(tid, n_thread, a):
        n_tok, n_before = load_i64(a.step + STEP.n_tok), a.n_tap - 1
        for c in range(tid * THREADS + thread(), a.n, n_thread * THREADS):
            # Row j comes from row j + n_tok >= j: ascending, none is read too late.
            for j in range(n_before):
                row = row_of(a.state, a.x, a.n, a.x_stride, n_before, n_tok + j)
                store_f32(a.state + 4 * (a.n * j + c), load_f32(row + 4 * c))

    return [Launch(outputs), Launch(go_on)]
