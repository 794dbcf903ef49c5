"""Activations of recurrent layers by name."""

from typing import Any

from numba import float32

from tamis.jit_kernels.cuda.lang.intrinsic import device
from tamis.jit_kernels.cuda.linear.activation import over_one_plus_exp, silu


@device
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return over_one_plus_exp(float32(1), x)


@device
def identity(x):
    """The argument itself."""
    return x


ACTIVATIONS: dict[str, Any] = {"none": identity, "silu": silu, "sigmoid": sigmoid}
