"""Gates of recurrent layers: rows times an activation of others, decays of a state."""

import math

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.linear.activation import ACTIVATIONS, sigmoid, softplus


def gate_rows(activation: str) -> list[Launch]:
    """Kernel of GATE_ROWS: threads share the elements of all rows."""
    function = ACTIVATIONS[activation]

    def kernel(tid, n_thread, a):
        total, per_tok = load_i64(a.step + STEP.n_tok) * a.rows_per_tok * a.n, a.rows_per_tok * a.n
        for e in range(tid * THREADS + thread(), total, n_thread * THREADS):
            t, j, i = e // per_tok, e % per_tok // a.n, e % a.n
            gate = function(load_f32(a.z + 4 * (a.z_stride * t + a.z_step * j + a.z_each * i)))
            if a.x != 0:
                gate *= load_f32(a.x + 4 * (a.x_stride * t + a.x_step * j + i))
            store_f32(a.y + 4 * (a.y_stride * t + a.y_step * j + i), gate)

    return [Launch(kernel)]


def decay() -> list[Launch]:
    """Kernel of DECAY: threads share the elements of all rows."""

    def kernel(tid, n_thread, a):
        total, per_tok = load_i64(a.step + STEP.n_tok) * a.rows_per_tok * a.n, a.rows_per_tok * a.n
        for e in range(tid * THREADS + thread(), total, n_thread * THREADS):
            t, element = e // per_tok, e % per_tok
            j, i = element // a.n, element % a.n
            raw = load_f32(a.x + 4 * (a.x_stride * t + a.x_step * j + i))
            value = softplus(raw + load_f32(a.bias + 4 * element))
            if a.dt != 0:
                store_f32(a.dt + 4 * e, value)
            if a.decay != 0:
                store_f32(a.decay + 4 * e, math.exp(value * load_f32(a.a + 4 * (element // a.run))))

    return [Launch(kernel)]


def bounded_decay() -> list[Launch]:
    """Kernel of BOUNDED_DECAY: threads share the elements of all rows."""

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n
        for e in range(tid * THREADS + thread(), total, n_thread * THREADS):
            i = e % a.n
            x = load_f32(a.x + 4 * e) + load_f32(a.bias + 4 * i)
            gate = sigmoid(x * load_f32(a.a + 4 * (i // a.run)))
            store_f32(a.decay + 4 * e, math.exp(a.least * gate))

    return [Launch(kernel)]
