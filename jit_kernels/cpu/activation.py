"""Gated activations of the feed-forward part."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.ops import STEP

SQRT_2_OVER_PI = np.float32(0.7978845608028654)
ONE = np.float32(1)


@njit
def silu(x):
    """X / (1 + exp(-x))."""
    return x / (ONE + np.exp(-x))


@njit
def gelu(x):
    """The tanh form of the Gaussian error linear unit (Hendrycks and Gimpel 2016)."""
    inner = SQRT_2_OVER_PI * x * (ONE + np.float32(0.044715) * x * x)
    # tanh(u) = 1 - 2 / (exp(2u) + 1): right at both ends, exp(2u) = inf included.
    tanh = ONE - np.float32(2) / (np.exp(np.float32(2) * inner) + ONE)
    return np.float32(0.5) * x * (ONE + tanh)


def gate(activation: str) -> Any:
    """Kernel of GATE: threads share the elements of all rows."""
    function = {"silu": silu, "gelu": gelu}[activation]

    def kernel(tid, n_thread, step, gate, up, y, n):
        total = load_i64(step + STEP.n_tok) * n
        for i in range(total * tid // n_thread, total * (tid + 1) // n_thread):
            store_f32(y + 4 * i, function(load_f32(gate + 4 * i)) * load_f32(up + 4 * i))

    return kernel
