"""Activations of the feed-forward part, of gates and of scores."""

import math
from typing import Any

from numba import float32

from tamis.jit_kernels.contract.ops import ACTIVATIONS as NAMES
from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.lang.ptx import exp2

SQRT_2_OVER_PI = 0.7978845608028654
SQRT_HALF = 0.7071067811865476
LOG2_E = 1.4426950408889634
LARGEST_EXP = 87.0  # of exp's arguments
LARGEST = 126.0  # of exp2's arguments: larger ones would give infinity
LINEAR_FROM = 20.0  # softplus(x) is x from here on, to the last bit of a float32
ALPHA = 1.702  # of gpt-oss's gate


@device
def over_one_plus_exp(x, negative):
    """The quotient x / (1 + exp(-negative)); the exponent is clamped at LARGEST: result 0."""
    return x / (float32(1) + exp2(min(negative * float32(-LOG2_E), float32(LARGEST))))


@device
def silu(x):
    """SiLU: x / (1 + exp(-x))."""
    return over_one_plus_exp(x, x)


@device
def gelu(x):
    """The tanh form of the Gaussian error linear unit (Hendrycks and Gimpel 2016)."""
    inner = x * float32(SQRT_2_OVER_PI) * (float32(0.044715) * x * x + float32(1))
    # x (1 + tanh(u)) / 2 = x / (1 + exp(-2u)).
    return over_one_plus_exp(x, float32(2) * inner)


@device
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return over_one_plus_exp(float32(1), x)


@device
def gelu_erf(x):
    """The Gaussian error linear unit."""
    return float32(0.5) * x * (float32(1) + math.erf(x * float32(SQRT_HALF)))


@device
def relu(x):
    """The larger of x and 0."""
    return max(x, float32(0))


@device
def relu2(x):
    """The square of relu (So et al. 2021, arXiv 2109.08668)."""
    return relu(x) * relu(x)


@device
def tanh(x):
    """The hyperbolic tangent, to 2e-7."""
    return float32(2) * sigmoid(float32(2) * x) - float32(1)


@device
def curve(x):
    """exp(x) - 1 - x of negative x, else 0."""
    low = min(x, float32(0))
    return math.expm1(low) - low


@device
def clamp(x):
    """The nearest number from -1 to 1."""
    return min(max(x, float32(-1)), float32(1))


@device
def exp(x):
    """See ACTIVATIONS."""
    return exp2(min(x, float32(LARGEST_EXP)) * float32(LOG2_E))


@device
def identity(x):
    """Identity: x."""
    return x


FUNCTIONS = identity, silu, sigmoid, gelu, gelu_erf, relu, relu2, tanh, clamp, curve, exp
ACTIVATIONS: dict[str, Any] = dict(zip(NAMES, FUNCTIONS, strict=True))


def map_rows(activation: str, add: int) -> list[Launch]:
    """Kernel of MAP_ROWS: threads share the elements of all rows."""
    function = ACTIVATIONS[activation]

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            value = function(load_f32(a.x + 4 * i) * a.inner) * a.outer
            store_f32(a.y + 4 * i, load_f32(a.y + 4 * i) + value if add else value)

    return [Launch(kernel)]


@device
def softplus(x):
    """log(1 + exp(x)) of a float32."""
    return x if x > float32(LINEAR_FROM) else math.log1p(math.exp(x))


def gate(activation: str) -> list[Launch]:
    """Kernel of GATE: threads share the elements of all rows."""
    function = {"silu": silu, "gelu": gelu}[activation]

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            store_f32(a.y + 4 * i, function(load_f32(a.gate + 4 * i)) * load_f32(a.up + 4 * i))

    return [Launch(kernel, blocks=4)]


@device
def clamped(x, limit):
    """The value x, clamped to +-limit."""
    return max(min(x, limit), -limit)


@device
def gate_of_gpt_oss(gate, up, limit):
    """The gate of form "gpt_oss": see GATE_CLAMPED."""
    x = min(gate, limit)
    return over_one_plus_exp(x, float32(ALPHA) * x) * (clamped(up, limit) + float32(1))


@device
def gate_clamped_before(gate, up, limit):
    """The gate of form "before": see GATE_CLAMPED."""
    return silu(min(gate, limit)) * clamped(up, limit)


@device
def gate_clamped_after(gate, up, limit):
    """The gate of form "after": see GATE_CLAMPED."""
    return min(silu(gate), limit) * clamped(up, limit)


def gate_clamped(form: str) -> list[Launch]:
    """Kernel of GATE_CLAMPED: threads share the elements of all rows."""
    function = {
        "gpt_oss": gate_of_gpt_oss,
        "before": gate_clamped_before,
        "after": gate_clamped_after,
    }[form]

    def kernel(tid, n_thread, a):
        total, limit = load_i64(a.step + STEP.n_tok) * a.n, float32(a.limit)
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            value = function(load_f32(a.gate + 4 * i), load_f32(a.up + 4 * i), limit)
            store_f32(a.y + 4 * i, value)

    return [Launch(kernel, blocks=4)]
