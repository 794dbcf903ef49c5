"""Gates of recurrent layers: rows times an activation of others, decays of a state."""

import math

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.recurrent.elementwise import ACTIVATIONS

LINEAR_FROM = 20.0  # softplus(x) is x from here on, to the last bit of a float32


def gate_rows(activation: str) -> list[Launch]:
    """Kernel of GATE_ROWS: threads share the elements of all rows."""
    function = ACTIVATIONS[activation]

    def kernel(
        tid, n_thread, step, x, z, y, n, rows_per_tok, x_stride, x_step, z_stride, z_step,
    ):  # fmt: skip
        total, per_tok = load_i64(step + STEP.n_tok) * rows_per_tok * n, rows_per_tok * n
        for e in range(tid * THREADS + thread(), total, n_thread * THREADS):
            t, j, i = e // per_tok, e % per_tok // n, e % n
            gate = function(load_f32(z + 4 * (z_stride * t + z_step * j + i)))
            if x != 0:
                gate *= load_f32(x + 4 * (x_stride * t + x_step * j + i))
            store_f32(y + 4 * e, gate)

    return [Launch(kernel)]


@device
def softplus(x):
    """log(1 + exp(x)) of a float32."""
    return x if x > float32(LINEAR_FROM) else math.log1p(math.exp(x))


def decay() -> list[Launch]:
    """Kernel of DECAY: threads share the elements of all rows."""

    def kernel(
        tid, n_thread, step, x, bias, a, dt, decay, n, rows_per_tok, x_stride, x_step, run,
    ):  # fmt: skip
        total, per_tok = load_i64(step + STEP.n_tok) * rows_per_tok * n, rows_per_tok * n
        for e in range(tid * THREADS + thread(), total, n_thread * THREADS):
            t, element = e // per_tok, e % per_tok
            j, i = element // n, element % n
            raw = load_f32(x + 4 * (x_stride * t + x_step * j + i))
            value = softplus(raw + load_f32(bias + 4 * element))
            if dt != 0:
                store_f32(dt + 4 * e, value)
            if decay != 0:
                store_f32(decay + 4 * e, math.exp(value * load_f32(a + 4 * (element // run))))

    return [Launch(kernel)]
