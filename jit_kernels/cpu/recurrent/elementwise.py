"""What kernels of recurrent layers share: activations by name, channels by thread."""

from typing import Any

from numba import njit

from tamis.jit_kernels.cpu.lang.simd import LANES, splat_f, vexp, vmin
from tamis.jit_kernels.cpu.linear.activation import LARGEST, silu


@njit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    one = splat_f(1.0)
    return one / (one + vexp(vmin(splat_f(0.0) - x, splat_f(LARGEST))))


@njit
def identity(x):
    """The argument itself."""
    return x


ACTIVATIONS: dict[str, Any] = {"none": identity, "silu": silu, "sigmoid": sigmoid}


@njit(error_model="numpy")
def channels(tid, n_thread, n):
    """The channels first .. last - 1 of n that are a thread's, and where whole vectors end."""
    n_vector = (n + LANES - 1) // LANES
    first = LANES * (n_vector * tid // n_thread)
    last = min(n, LANES * (n_vector * (tid + 1) // n_thread))
    return first, first + (last - first) // LANES * LANES, last
