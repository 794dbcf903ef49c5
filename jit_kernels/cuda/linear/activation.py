"""Gated activations of the feed-forward part."""

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.lang.ptx import exp2

SQRT_2_OVER_PI = 0.7978845608028654
LOG2_E = 1.4426950408889634
LARGEST = 126.0  # of exp2's arguments: more would be infinite


@device
def over_one_plus_exp(x, negative):
    """X / (1 + exp(-negative)): exp at most at LARGEST, where the result is 0."""
    return x / (float32(1) + exp2(min(negative * float32(-LOG2_E), float32(LARGEST))))


@device
def silu(x):
    """X / (1 + exp(-x))."""
    return over_one_plus_exp(x, x)


@device
def gelu(x):
    """The tanh form of the Gaussian error linear unit (Hendrycks and Gimpel 2016)."""
    inner = x * float32(SQRT_2_OVER_PI) * (float32(0.044715) * x * x + float32(1))
    # x (1 + tanh(u)) / 2 = x / (1 + exp(-2u)).
    return over_one_plus_exp(x, float32(2) * inner)


def gate(activation: str) -> list[Launch]:
    """Kernel of GATE: threads share the elements of all rows."""
    function = {"silu": silu, "gelu": gelu}[activation]

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            store_f32(a.y + 4 * i, function(load_f32(a.gate + 4 * i)) * load_f32(a.up + 4 * i))

    return [Launch(kernel, blocks=4)]
