"""Gates of recurrent layers: rows times an activation of others, decays of a state."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, lane, load_f, splat_f, store_f
from tamis.jit_kernels.cpu.recurrent.elementwise import ACTIVATIONS

LINEAR_FROM = 20.0  # softplus(x) is x from here on, to the last bit of a float32


def gate_rows(activation: str) -> Any:
    """Kernel of GATE_ROWS: threads take rows in turn."""
    function = ACTIVATIONS[activation]

    def kernel(
        tid, n_thread, step, x, z, y, n, rows_per_tok, x_stride, x_step, z_stride, z_step,
    ):  # fmt: skip
        whole = n // LANES * LANES
        for r in range(tid, load_i64(step + STEP.n_tok) * rows_per_tok, n_thread):
            t, j = r // rows_per_tok, r % rows_per_tok
            a = x + 4 * (x_stride * t + x_step * j) if x != 0 else 0
            b, out = z + 4 * (z_stride * t + z_step * j), y + 4 * n * r
            for i in range(0, 4 * whole, 4 * LANES):
                gate = function(load_f(b + i))
                store_f(out + i, gate * load_f(a + i) if a != 0 else gate)
            for i in range(4 * whole, 4 * n, 4):
                one = lane(function(splat_f(load_f32(b + i))), 0)
                store_f32(out + i, one * load_f32(a + i) if a != 0 else one)

    return kernel


@njit(error_model="numpy")
def softplus(x):
    """log(1 + exp(x)) of a float32."""
    return x if x > np.float32(LINEAR_FROM) else np.log1p(np.exp(x))


def decay() -> Any:
    """Kernel of DECAY: threads take rows in turn."""

    def kernel(
        tid, n_thread, step, x, bias, a, dt, decay, n, rows_per_tok, x_stride, x_step, run,
    ):  # fmt: skip
        for r in range(tid, load_i64(step + STEP.n_tok) * rows_per_tok, n_thread):
            t, j = r // rows_per_tok, r % rows_per_tok
            row = x + 4 * (x_stride * t + x_step * j)
            for i in range(n):
                element = n * j + i
                value = softplus(load_f32(row + 4 * i) + load_f32(bias + 4 * element))
                if dt != 0:
                    store_f32(dt + 4 * (n * r + i), value)
                if decay != 0:
                    rate = load_f32(a + 4 * (element // run))
                    store_f32(decay + 4 * (n * r + i), np.exp(value * rate))

    return kernel
