"""Gates of recurrent layers: rows times an activation of others, decays of a state."""

from typing import Any

import numpy as np

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, lane, load_f, splat_f, store_f
from tamis.jit_kernels.cpu.linear.activation import ACTIVATIONS, softplus


def gate_rows(activation: str) -> Any:
    """Kernel of GATE_ROWS: threads stride over rows."""
    function = ACTIVATIONS[activation]

    def kernel(tid, n_thread, a):
        whole = a.n // LANES * LANES
        for r in range(tid, load_i64(a.step + STEP.n_tok) * a.rows_per_tok, n_thread):
            t, j = r // a.rows_per_tok, r % a.rows_per_tok
            x = a.x + 4 * (a.x_stride * t + a.x_step * j) if a.x != 0 else 0
            z = a.z + 4 * (a.z_stride * t + a.z_step * j)
            out = a.y + 4 * (a.y_stride * t + a.y_step * j)
            for i in range(0, 4 * whole, 4 * LANES):
                gate = function(load_f(z + i) if a.z_each != 0 else splat_f(load_f32(z)))
                store_f(out + i, gate * load_f(x + i) if x != 0 else gate)
            for i in range(4 * whole, 4 * a.n, 4):
                one = lane(function(splat_f(load_f32(z + i if a.z_each != 0 else z))), 0)
                store_f32(out + i, one * load_f32(x + i) if x != 0 else one)

    return kernel


def decay() -> Any:
    """Kernel of DECAY: threads stride over rows."""

    def kernel(tid, n_thread, a):
        for r in range(tid, load_i64(a.step + STEP.n_tok) * a.rows_per_tok, n_thread):
            t, j = r // a.rows_per_tok, r % a.rows_per_tok
            row = a.x + 4 * (a.x_stride * t + a.x_step * j)
            for i in range(a.n):
                element = a.n * j + i
                value = softplus(load_f32(row + 4 * i) + load_f32(a.bias + 4 * element))
                if a.dt != 0:
                    store_f32(a.dt + 4 * (a.n * r + i), value)
                if a.decay != 0:
                    rate = load_f32(a.a + 4 * (element // a.run))
                    store_f32(a.decay + 4 * (a.n * r + i), np.exp(value * rate))

    return kernel


def bounded_decay() -> Any:
    """Kernel of BOUNDED_DECAY: threads stride over rows."""

    def kernel(tid, n_thread, a):
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            for i in range(a.n):
                x = load_f32(a.x + 4 * (a.n * t + i)) + load_f32(a.bias + 4 * i)
                gate = np.exp(-x * load_f32(a.a + 4 * (i // a.run)))
                value = np.exp(np.float32(a.least) / (np.float32(1) + gate))
                store_f32(a.decay + 4 * (a.n * t + i), value)

    return kernel
