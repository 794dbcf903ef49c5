"""Gated activations of the feed-forward part."""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, fma, lane, load_f, splat_f, store_f, vexp, vmin

SQRT_2_OVER_PI = 0.7978845608028654
LARGEST = 88.0  # of vexp's arguments


@njit
def silu(x):
    """X / (1 + exp(-x))."""
    one = splat_f(1.0)
    return x / (one + vexp(vmin(splat_f(0.0) - x, splat_f(LARGEST))))


@njit
def gelu(x):
    """The tanh form of the Gaussian error linear unit (Hendrycks and Gimpel 2016)."""
    one = splat_f(1.0)
    inner = x * splat_f(SQRT_2_OVER_PI) * fma(splat_f(0.044715) * x, x, one)
    # x (1 + tanh(u)) / 2 = x / (1 + exp(-2u)).
    return x / (one + vexp(vmin(splat_f(-2.0) * inner, splat_f(LARGEST))))


def gate(activation: str) -> Any:
    """Kernel of GATE: threads share the elements of all rows."""
    function = {"silu": silu, "gelu": gelu}[activation]

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n
        # Whole vectors a thread: how many threads there are does not change how a value is made.
        n_vector = (total + LANES - 1) // LANES
        first = LANES * (n_vector * tid // n_thread)
        last = min(total, LANES * (n_vector * (tid + 1) // n_thread))
        whole = first + (last - first) // LANES * LANES
        for i in range(first, whole, LANES):
            store_f(a.y + 4 * i, function(load_f(a.gate + 4 * i)) * load_f(a.up + 4 * i))
        for i in range(whole, last):
            value = lane(function(splat_f(load_f32(a.gate + 4 * i))), 0)
            store_f32(a.y + 4 * i, value * load_f32(a.up + 4 * i))

    return kernel
