"""Activations of the feed-forward part, of gates and of scores."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import ACTIVATIONS as NAMES
from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    fma,
    lane,
    load_f,
    splat_f,
    store_f,
    vabs,
    vexp,
    vmax,
    vmin,
    where_less,
)

SQRT_2_OVER_PI = 0.7978845608028654
SQRT_HALF = 0.7071067811865476
LARGEST = 88.0  # of vexp's arguments
LARGEST_EXP = 87.0  # of exp's
LINEAR_FROM = 20.0  # softplus(x) is x from here on, to the last bit of a float32
ALPHA = 1.702  # of gpt-oss's gate


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


@njit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    one = splat_f(1.0)
    return one / (one + vexp(vmin(splat_f(0.0) - x, splat_f(LARGEST))))


@njit
def erf(x):
    """The error function, to 2e-7 (Abramowitz and Stegun 1964, 7.1.26)."""
    one, size = splat_f(1.0), vabs(x)
    t = one / fma(splat_f(0.3275911), size, one)
    p = fma(splat_f(1.061405429), t, splat_f(-1.453152027))
    p = fma(p, t, splat_f(1.421413741))
    p = fma(p, t, splat_f(-0.284496736))
    p = fma(p, t, splat_f(0.254829592))
    rest = p * t * vexp(vmax(splat_f(0.0) - size * size, splat_f(-LARGEST)))
    return where_less(x, splat_f(0.0), rest - one, one - rest)


@njit
def gelu_erf(x):
    """The Gaussian error linear unit."""
    return splat_f(0.5) * x * (splat_f(1.0) + erf(x * splat_f(SQRT_HALF)))


@njit
def relu(x):
    """The larger of x and 0."""
    return vmax(x, splat_f(0.0))


@njit
def relu2(x):
    """The square of relu (So et al. 2021, arXiv 2109.08668)."""
    return relu(x) * relu(x)


@njit
def tanh(x):
    """The hyperbolic tangent, to 2e-7."""
    two = splat_f(2.0)
    return two * sigmoid(two * x) - splat_f(1.0)


@njit
def clamp(x):
    """The nearest number from -1 to 1."""
    return vmin(vmax(x, splat_f(-1.0)), splat_f(1.0))


@njit
def curve(x):
    """exp(x) - 1 - x of negative x, else 0; near 0, where exp has no bits for it, by its series."""
    low = vmax(vmin(x, splat_f(0.0)), splat_f(-LARGEST))
    one = splat_f(1.0)
    series = fma(low, splat_f(1 / 8), one)
    series = fma(low * splat_f(1 / 7), series, one)
    series = fma(low * splat_f(1 / 6), series, one)
    series = fma(low * splat_f(1 / 5), series, one)
    series = fma(low * splat_f(1 / 4), series, one)
    series = fma(low * splat_f(1 / 3), series, one)
    whole = vexp(low) - one - vmin(x, splat_f(0.0))
    return where_less(low, splat_f(-0.5), whole, splat_f(0.5) * low * low * series)


@njit
def exp(x):
    """See ACTIVATIONS."""
    return vexp(vmin(x, splat_f(LARGEST_EXP)))


@njit
def identity(x):
    """The argument itself."""
    return x


FUNCTIONS = identity, silu, sigmoid, gelu, gelu_erf, relu, relu2, tanh, clamp, curve, exp
ACTIVATIONS: dict[str, Any] = dict(zip(NAMES, FUNCTIONS, strict=True))


def map_rows(activation: str, add: int) -> Any:
    """Kernel of MAP_ROWS: threads share the elements of all rows."""
    function = ACTIVATIONS[activation]

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n
        n_vector = (total + LANES - 1) // LANES
        first = LANES * (n_vector * tid // n_thread)
        last = min(total, LANES * (n_vector * (tid + 1) // n_thread))
        whole = first + (last - first) // LANES * LANES
        inner, outer = splat_f(a.inner), splat_f(a.outer)
        for i in range(first, whole, LANES):
            value = function(load_f(a.x + 4 * i) * inner) * outer
            store_f(a.y + 4 * i, load_f(a.y + 4 * i) + value if add else value)
        for i in range(whole, last):
            one = lane(function(splat_f(load_f32(a.x + 4 * i)) * inner) * outer, 0)
            store_f32(a.y + 4 * i, load_f32(a.y + 4 * i) + one if add else one)

    return kernel


@njit(error_model="numpy")
def softplus(x):
    """log(1 + exp(x)) of a float32."""
    return x if x > np.float32(LINEAR_FROM) else np.log1p(np.exp(x))


def gate(activation: str) -> Any:
    """Kernel of GATE: threads share the elements of all rows."""
    function = {"silu": silu, "gelu": gelu}[activation]

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n
        # Each thread has whole vectors, so that the number of threads does not change results.
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


@njit
def clamped(x, limit):
    """The number nearest to x in [-limit, limit]."""
    return vmax(vmin(x, limit), splat_f(0.0) - limit)


@njit
def gate_of_gpt_oss(gate, up, limit):
    """The gate of form "gpt_oss": see GATE_CLAMPED."""
    x, one = vmin(gate, limit), splat_f(1.0)
    e = vexp(vmin(splat_f(-ALPHA) * x, splat_f(LARGEST)))
    return x / (one + e) * (clamped(up, limit) + one)


@njit
def gate_clamped_before(gate, up, limit):
    """The gate of form "before": see GATE_CLAMPED."""
    return silu(vmin(gate, limit)) * clamped(up, limit)


@njit
def gate_clamped_after(gate, up, limit):
    """The gate of form "after": see GATE_CLAMPED."""
    return vmin(silu(gate), limit) * clamped(up, limit)


def gate_clamped(form: str) -> Any:
    """Kernel of GATE_CLAMPED: threads share the elements of all rows, as for GATE."""
    function = {
        "gpt_oss": gate_of_gpt_oss,
        "before": gate_clamped_before,
        "after": gate_clamped_after,
    }[form]

    def kernel(tid, n_thread, a):
        total, limit = load_i64(a.step + STEP.n_tok) * a.n, splat_f(a.limit)
        n_vector = (total + LANES - 1) // LANES
        first = LANES * (n_vector * tid // n_thread)
        last = min(total, LANES * (n_vector * (tid + 1) // n_thread))
        whole = first + (last - first) // LANES * LANES
        for i in range(first, whole, LANES):
            store_f(a.y + 4 * i, function(load_f(a.gate + 4 * i), load_f(a.up + 4 * i), limit))
        for i in range(whole, last):
            one, other = splat_f(load_f32(a.gate + 4 * i)), splat_f(load_f32(a.up + 4 * i))
            store_f32(a.y + 4 * i, lane(function(one, other, limit), 0))

    return kernel
