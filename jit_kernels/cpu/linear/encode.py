"""Rows encoded in quantized types: a lane of the vectors has a block of its own.

So sums run over a block's elements one after another, as in llama.cpp's reference encoders, whose
searches these are, and the bytes are the same. A tile has the elements of LANES blocks
interleaved: element i of all is the vector at V * i.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numba import njit

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract.ops.encode import ENCODE_SCRATCH
from tamis.jit_kernels.cpu.lang.intrinsic import address, load_f32, store_f32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    load_f,
    load_half,
    load_i,
    round_i32,
    splat_f,
    store_f,
    store_half,
    store_i,
    to_f32,
    vabs,
    vmax,
    vmin,
    vsqrt,
    where_less,
    zero_f,
)
from tamis.jit_kernels.cpu.linear.encode_pack import (
    ENDS,
    LEVELS,
    MINIMA,
    MINIMUM_LEVELS,
    PACKING,
    SCALE_LEVELS,
    SCALES,
    SUMS,
    WEIGHTS,
    V,
)

# Without the kernel's leave to reorder sums and to fuse products with them.
STRICT: Any = {"error_model": "numpy", "fastmath": False}
SUPER = 256  # elements of a block of the K types
NOTHING = np.float32(1e-15)  # a part whose largest value is below has the scale 0
STEP = np.float32(0.1)  # by which symmetric searches shift the number of levels
# (levels, first shift, step, steps) of searches without and with weights.
LINES = {
    "Q4_1": (15, -0.9, 0.05, 36), "Q5_1": (31, -0.9, 0.05, 36),
    "Q2_K": (3, -0.5, 0.1, 15), "Q4_K": (15, -1.0, 0.1, 20), "Q5_K": (31, -0.5, 0.1, 15),
}  # fmt: skip
WEIGHTED_LINE = (-0.9, 0.05, 36)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_TRIES = 7
IQ4_MIDDLES = tuple((low + high) / 2 for low, high in pairwise(IQ4))


@njit(**STRICT)
def whole(x, low, high):
    """The nearest whole numbers in [low, high], as float32; low where x is NaN."""
    return vmin(vmax(to_f32(round_i32(x)), low), high)


@njit(**STRICT)
def floor_of(x):
    """The largest whole numbers not above x, as float32."""
    near = to_f32(round_i32(x))
    return where_less(x, near, near - splat_f(np.float32(1)), near)


@njit(**STRICT)
def as_half(x, at):
    """The values as float16 rounds them; `at` has room for a vector."""
    store_half(at, x)
    return load_half(at)


@njit(**STRICT)
def put_level(levels, i, x):
    """Write element i of a tile of levels: int32s."""
    store_i(levels + V * i, round_i32(x))


@njit(**STRICT)
def farthest(x, n):
    """The magnitude of the value with the largest one, and that value."""
    most, value = zero_f(), zero_f()
    for i in range(n):
        v = load_f(x + V * i)
        size = vabs(v)
        value = where_less(most, size, v, value)
        most = where_less(most, size, size, most)
    return most, value


@njit(**STRICT)
def squares(x, n):
    """Sums of squares."""
    total = zero_f()
    for i in range(n):
        v = load_f(x + V * i)
        total += v * v
    return total


@njit(**STRICT)
def fit_scale(x, w, n, most, levels):
    """Scales s that make sum w (x - s l)^2 small over levels l of [-most, most - 1].

    19 numbers of levels near `most` are tried. Levels are written from 0 on.
    """
    low, high = splat_f(np.float32(-most)), splat_f(np.float32(most - 1))
    top, value = farthest(x, n)
    scale, best, chosen = zero_f(), zero_f(), zero_f()
    for k in range(19):
        shift = np.float32(0 if k == 0 else (k - 10 if k < 10 else k - 9))
        inverse = splat_f(-(np.float32(most) + STEP * shift)) / value
        wxl, wll = zero_f(), zero_f()
        for i in range(n):
            v, weight = load_f(x + V * i), load_f(w + V * i)
            level = whole(inverse * v, low, high)
            wxl += weight * v * level
            wll += weight * level * level
        found = where_less(zero_f(), vabs(wll), wxl / wll, zero_f())
        if k == 0:
            scale, best, chosen = found, found * wxl, inverse
        else:
            gain = where_less(zero_f(), wll, wxl * wxl, zero_f())
            bar = where_less(zero_f(), wll, best * wll, zero_f())
            scale = where_less(bar, gain, found, scale)
            chosen = where_less(bar, gain, inverse, chosen)
            best = where_less(bar, gain, found * wxl, best)
    nothing = splat_f(NOTHING)
    for i in range(n):
        level = whole(chosen * load_f(x + V * i), low, high) - low
        put_level(levels, i, where_less(top, nothing, zero_f(), level))
    return where_less(top, nothing, zero_f(), scale)


@njit(**STRICT)
def fit_three(x, n, most, levels):
    """As fit_scale with the weights x^2: levels of `most`, then mended one after another."""
    low, high = splat_f(np.float32(-most)), splat_f(np.float32(most - 1))
    top, value = farthest(x, n)
    inverse = splat_f(np.float32(-most)) / value
    wxl, wll = zero_f(), zero_f()
    for i in range(n):
        v = load_f(x + V * i)
        level = whole(inverse * v, low, high)
        store_f(levels + V * i, level)
        weight = v * v
        wxl += weight * v * level
        wll += weight * level * level
    for _ in range(5):
        for i in range(n):
            v, old = load_f(x + V * i), load_f(levels + V * i)
            weight = v * v
            rest, rest_2 = wxl - weight * v * old, wll - weight * old * old
            level = whole(v * rest_2 / rest, low, high)
            new, new_2 = rest + weight * v * level, rest_2 + weight * level * level
            gain = where_less(zero_f(), new_2, new * new * wll, zero_f())
            bar = where_less(zero_f(), new_2, wxl * wxl * new_2, zero_f())
            gain = where_less(zero_f(), rest, gain, bar)
            gain = where_less(zero_f(), vabs(level - old), gain, bar)
            store_f(levels + V * i, where_less(bar, gain, level, old))
            wxl, wll = where_less(bar, gain, new, wxl), where_less(bar, gain, new_2, wll)
    nothing = splat_f(NOTHING)
    for i in range(n):
        level = load_f(levels + V * i) - low
        put_level(levels, i, where_less(top, nothing, zero_f(), level))
    scale = where_less(zero_f(), wll, wxl / wll, zero_f())
    return where_less(top, nothing, zero_f(), scale)


@njit(**STRICT)
def fit_line(x, w, n, search, by_size, levels):
    """Scales s and minima m >= 0 that make sum w |x - (s l - m)|^p small over levels l <= most.

    p is 1 if by_size, else 2. search is (most, first, step, n_step): most + first, most + first +
    step, ... levels are tried over the range that the best so far leaves, each with the line of
    least squares.
    """
    most, first, step, n_step = search
    zero, high = zero_f(), splat_f(np.float32(most))
    base, top = load_f(x), load_f(x)
    sum_w, sum_x = load_f(w), load_f(w) * load_f(x)
    for i in range(1, n):
        v, weight = load_f(x + V * i), load_f(w + V * i)
        base, top = where_less(v, base, v, base), where_less(top, v, v, top)
        sum_w += weight
        sum_x += weight * v
    base = where_less(zero, base, zero, base)
    lowest = base
    chosen, chosen_base = high / (top - base), base
    scale = splat_f(np.float32(1)) / chosen
    best = zero
    for i in range(n):
        v = load_f(x + V * i)
        error = scale * whole(chosen * (v - base), zero, high) + base - v
        best += load_f(w + V * i) * (vabs(error) if by_size else error * error)
    for k in range(n_step + 1):
        shift = np.float32(first) + np.float32(step) * np.float32(k) + np.float32(most)
        inverse = splat_f(shift) / (top - base)
        sum_l, sum_ll, sum_xl = zero, zero, zero
        for i in range(n):
            v, weight = load_f(x + V * i), load_f(w + V * i)
            level = whole(inverse * (v - base), zero, high)
            sum_l += weight * level
            sum_ll += weight * level * level
            sum_xl += weight * level * v
        det = sum_w * sum_ll - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / det
        new_base = (sum_ll * sum_x - sum_l * sum_xl) / det
        new_scale = where_less(zero, new_base, sum_xl / sum_ll, new_scale)
        new_base = where_less(zero, new_base, zero, new_base)
        total = zero
        for i in range(n):
            v = load_f(x + V * i)
            error = new_scale * whole(inverse * (v - base), zero, high) + new_base - v
            total += load_f(w + V * i) * (vabs(error) if by_size else error * error)
        total = where_less(zero, det, total, best)
        scale = where_less(total, best, new_scale, scale)
        chosen = where_less(total, best, inverse, chosen)
        chosen_base = where_less(total, best, base, chosen_base)
        base = where_less(total, best, new_base, base)
        best = where_less(total, best, total, best)
    for i in range(n):
        level = whole(chosen * (load_f(x + V * i) - chosen_base), zero, high)
        put_level(levels, i, where_less(lowest, top, level, zero))
    return where_less(lowest, top, scale, zero), zero - where_less(lowest, top, base, lowest)


@njit(**STRICT)
def fit_positive(x, w, n, most, levels):
    """Scales s that make sum w (x - s l)^2 small over levels l of [0, most]."""
    zero, high, least = zero_f(), splat_f(np.float32(most)), splat_f(np.float32(-1 << 22))
    top = zero
    for i in range(n):
        v = load_f(x + V * i)
        top = where_less(v, top, top, v)
    chosen = high / top
    scale, best = splat_f(np.float32(1)) / chosen, zero
    for i in range(n):
        v = load_f(x + V * i)
        error = v - scale * whole(chosen * v, least, high)
        best += load_f(w + V * i) * error * error
    for k in range(-4, 5):
        if k == 0:
            continue
        inverse = splat_f(STEP * np.float32(k) + np.float32(most)) / top
        scale, total = splat_f(np.float32(1)) / inverse, zero
        for i in range(n):
            v = load_f(x + V * i)
            error = v - scale * whole(inverse * v, least, high)
            total += load_f(w + V * i) * error * error
        chosen = where_less(total, best, inverse, chosen)
        best = where_less(total, best, total, best)
    wxl, wll = zero, zero
    for i in range(n):
        v, weight = load_f(x + V * i), load_f(w + V * i)
        level = whole(chosen * v, least, high)
        store_f(levels + V * i, level)
        wxl += weight * v * level
        wll += weight * level * level
    for _ in range(5):
        for i in range(n):
            v, weight, old = load_f(x + V * i), load_f(w + V * i), load_f(levels + V * i)
            rest, rest_2 = wxl - weight * v * old, wll - weight * old * old
            level = whole(v * rest_2 / rest, least, high)
            new, new_2 = rest + weight * v * level, rest_2 + weight * level * level
            gain, bar = new * new * wll, wxl * wxl * new_2
            gain = where_less(zero, rest, gain, bar)
            gain = where_less(zero, rest_2, gain, bar)
            gain = where_less(zero, vabs(level - old), gain, bar)
            store_f(levels + V * i, where_less(bar, gain, level, old))
            wxl, wll = where_less(bar, gain, new, wxl), where_less(bar, gain, new_2, wll)
    nothing = splat_f(NOTHING)
    for i in range(n):
        put_level(levels, i, where_less(top, nothing, zero, load_f(levels + V * i)))
    scale = where_less(zero, wll, wxl / wll, zero)
    return where_less(top, nothing, zero, scale)


@njit(**STRICT)
def iq4_value(x):
    """The values of IQ4 types that are nearest to x."""
    found = splat_f(np.float32(IQ4[0]))
    for i in range(15):
        found = where_less(x, splat_f(IQ4_MIDDLES[i]), found, splat_f(IQ4[i + 1]))
    return found


@njit(**STRICT)
def iq4_level(x):
    """The indices of the values of IQ4 types that are nearest to x, as float32."""
    found, one = zero_f(), splat_f(np.float32(1))
    for i in range(15):
        found += where_less(x, splat_f(IQ4_MIDDLES[i]), zero_f(), one)
    return found


@njit(**STRICT)
def fit_iq4(x, w, n):
    """Scales s that make sum w (x - s v)^2 small over the values v of IQ4 types."""
    top, value = farthest(x, n)
    scale, best = zero_f(), zero_f()
    for k in range(2 * IQ4_TRIES + 2):
        shift = np.float32(0 if k == 0 else k - 1 - IQ4_TRIES)
        inverse = splat_f(shift + np.float32(IQ4[0])) / value
        if k == 0:
            inverse = splat_f(np.float32(1)) / (value / splat_f(np.float32(-IQ4[0])))
        wxq, wqq = zero_f(), zero_f()
        for i in range(n):
            v, weight = load_f(x + V * i), load_f(w + V * i)
            q = iq4_value(inverse * v)
            wxq += weight * q * v
            wqq += weight * q * q
        found = where_less(zero_f(), wqq, wxq / wqq, zero_f())
        gain = where_less(zero_f(), wqq, wxq * wxq, zero_f())
        bar = where_less(zero_f(), wqq, best * wqq, zero_f())
        if k == 0:
            scale, best = found, found * wxq
        else:
            scale = where_less(bar, gain, found, scale)
            best = where_less(bar, gain, found * wxq, best)
    return where_less(top, splat_f(NOTHING), zero_f(), scale)


# ---- blocks of 32: functions (tiles) that leave levels, and the block's scale and minimum --------
def simple(type: str) -> Any:
    """Encode without a search: Q4_0, Q5_0 by the farthest value, Q4_1, Q5_1 by the range, Q8_0."""
    half = {"Q4_0": 8, "Q5_0": 16}.get(type, 0)
    n_level = {"Q4_1": 15, "Q5_1": 31}.get(type, 0)

    @njit(**STRICT)
    def signed(t):
        _, value = farthest(t, 32)
        scale = value / splat_f(np.float32(-half))
        inverse = where_less(zero_f(), vabs(scale), splat_f(np.float32(1)) / scale, zero_f())
        store_f(t + V * SCALES, scale)
        for i in range(32):
            level = floor_of(load_f(t + V * i) * inverse + splat_f(np.float32(half + 0.5)))
            put_level(t + V * LEVELS, i, vmin(level, splat_f(np.float32(2 * half - 1))))

    @njit(**STRICT)
    def ranged(t):
        low = high = load_f(t)
        for i in range(1, 32):
            v = load_f(t + V * i)
            low, high = where_less(v, low, v, low), where_less(high, v, v, high)
        scale = (high - low) / splat_f(np.float32(n_level))
        inverse = where_less(zero_f(), scale, splat_f(np.float32(1)) / scale, zero_f())
        store_f(t + V * SCALES, scale)
        store_f(t + V * MINIMA, low)
        for i in range(32):
            level = floor_of((load_f(t + V * i) - low) * inverse + splat_f(np.float32(0.5)))
            put_level(t + V * LEVELS, i, vmin(level, splat_f(np.float32(n_level))))

    @njit(**STRICT)
    def bytes_of(t):
        top, _ = farthest(t, 32)
        scale = top / splat_f(np.float32(127))
        inverse = where_less(zero_f(), scale, splat_f(np.float32(1)) / scale, zero_f())
        store_f(t + V * SCALES, scale)
        one, half = splat_f(np.float32(1)), splat_f(np.float32(0.5))
        for i in range(32):
            v = load_f(t + V * i) * inverse
            near = to_f32(round_i32(v))
            up = where_less(v - near, half, near, near + one)  # ties go away from 0
            down = where_less(zero_f() - half, v - near, near, near - one)
            put_level(t + V * LEVELS, i, where_less(zero_f(), v, up, down))

    return bytes_of if type == "Q8_0" else (signed if half else ranged)


def searched(type: str) -> Any:
    """Encode a block of 32 by a search, with the weights of its tile."""
    most = {"Q4_0": 8, "Q5_0": 16}.get(type, 0)
    search = LINES.get(type, (0, 0.0, 0.0, 0))

    @njit(**STRICT)
    def signed(t):
        scale = fit_scale(t, t + V * WEIGHTS, 32, most, t + V * LEVELS)
        store_f(t + V * SCALES, scale)

    @njit(**STRICT)
    def ranged(t):
        w, levels = t + V * WEIGHTS, t + V * LEVELS
        scale, minimum = fit_line(t, w, 32, search, False, levels)
        store_f(t + V * SCALES, scale)
        store_f(t + V * MINIMA, zero_f() - minimum)

    @njit(**STRICT)
    def nonlinear(t):
        scale = fit_iq4(t, t + V * WEIGHTS, 32)
        store_f(t + V * SCALES, scale)
        inverse = where_less(zero_f(), vabs(scale), splat_f(np.float32(1)) / scale, zero_f())
        for i in range(32):
            put_level(t + V * LEVELS, i, iq4_level(inverse * load_f(t + V * i)))

    return nonlinear if type == "IQ4_NL" else (signed if most else ranged)


# ---- blocks of 256: parts of 16 or 32, whose scales are encoded in turn --------------------------
def ranged_super(type: str, weighted: bool) -> Any:
    """Encode a block of Q2_K, Q4_K or Q5_K: a scale and a minimum for each part."""
    part, scale_levels = (16, 15) if type == "Q2_K" else (32, 63)
    n_part, n_level = SUPER // part, LINES[type][0]
    search = (n_level, *(WEIGHTED_LINE if weighted else LINES[type][1:]))
    by_size = type == "Q2_K" and not weighted

    @njit(**STRICT)
    def by_largest(t, at, to):
        top = zero_f()
        for j in range(n_part):
            v = load_f(at + V * j)
            top = where_less(top, v, v, top)
        high = splat_f(np.float32(scale_levels))
        inverse = where_less(zero_f(), top, high / top, zero_f())
        for j in range(n_part):
            put_level(to, j, whole(inverse * load_f(at + V * j), zero_f(), high))
        return top / high

    @njit(**STRICT)
    def encode_block(t):
        w, levels = t + V * WEIGHTS, t + V * LEVELS
        for j in range(n_part):
            x, wj = t + V * part * j, w + V * part * j
            scale, minimum = fit_line(x, wj, part, search, by_size, levels + V * part * j)
            store_f(t + V * (SCALES + j), scale)
            store_f(t + V * (MINIMA + j), minimum)
        scales, minima = t + V * SCALE_LEVELS, t + V * MINIMUM_LEVELS
        if weighted:
            sums = t + V * SUMS
            d = fit_positive(t + V * SCALES, sums, n_part, scale_levels, scales)
            m = fit_positive(t + V * MINIMA, sums, n_part, scale_levels, minima)
        else:
            d = by_largest(t, t + V * SCALES, scales)
            m = by_largest(t, t + V * MINIMA, minima)
        store_f(t + V * ENDS, d)
        store_f(t + V * (ENDS + 1), m)
        d, m = as_half(d, t + V * (ENDS + 2)), as_half(m, t + V * (ENDS + 2))
        high = splat_f(np.float32(n_level))
        for j in range(n_part):
            dj = d * to_f32(load_i(scales + V * j))
            mj = m * to_f32(load_i(minima + V * j))
            for i in range(part * j, part * (j + 1)):
                level = whole((load_f(t + V * i) + mj) / dj, zero_f(), high)
                old = to_f32(load_i(levels + V * i))
                put_level(levels, i, where_less(zero_f(), vabs(dj), level, old))

    return encode_block


def signed_super(type: str, weighted: bool) -> Any:
    """Encode a block of Q3_K or Q6_K: a signed scale for each of 16 parts."""
    most, reach = (4, 32) if type == "Q3_K" else (32, 128)
    three = type == "Q3_K" and not weighted
    fit_scales = type == "Q3_K" and weighted

    @njit(**STRICT)
    def encode_block(t):
        w, levels, scales = t + V * WEIGHTS, t + V * LEVELS, t + V * SCALE_LEVELS
        for j in range(16):
            x, to = t + V * 16 * j, levels + V * 16 * j
            if three:
                scale = fit_three(x, 16, most, to)
            else:
                scale = fit_scale(x, w + V * 16 * j, 16, most, to)
            store_f(t + V * (SCALES + j), scale)
        low, high = splat_f(np.float32(-reach)), splat_f(np.float32(reach - 1))
        if fit_scales:
            d = fit_scale(t + V * SCALES, t + V * SUMS, 16, reach, scales)
            for j in range(16):
                put_level(scales, j, to_f32(load_i(scales + V * j)) + low)
        else:
            top, value = farthest(t + V * SCALES, 16)
            least = splat_f(NOTHING) if reach == 128 else zero_f()
            inverse = low / value
            d = splat_f(np.float32(1)) / inverse
            d = where_less(zero_f(), top, where_less(top, least, zero_f(), d), zero_f())
            for j in range(16):
                level = whole(inverse * load_f(t + V * (SCALES + j)), low, high)
                none = low if reach == 32 else zero_f()
                put_level(scales, j, where_less(zero_f(), vabs(d), level, none))
            if reach == 128:
                nothing = where_less(zero_f(), vabs(d), splat_f(np.float32(1)), zero_f())
                for i in range(SUPER):
                    put_level(levels, i, to_f32(load_i(levels + V * i)) * nothing)
        store_f(t + V * ENDS, d)
        d = as_half(d, t + V * (ENDS + 2))
        low, high = splat_f(np.float32(-most)), splat_f(np.float32(most - 1))
        for j in range(16):
            dj = d * to_f32(load_i(scales + V * j))
            for i in range(16 * j, 16 * (j + 1)):
                level = whole(load_f(t + V * i) / dj, low, high) - low
                old = to_f32(load_i(levels + V * i))
                put_level(levels, i, where_less(zero_f(), vabs(dj), level, old))

    return encode_block


def iq4_super() -> Any:
    """Encode a block of IQ4_XS: a signed scale for each of 8 parts."""

    @njit(**STRICT)
    def encode_block(t):
        scales = t + V * SCALE_LEVELS
        for j in range(8):
            at = V * 32 * j
            store_f(t + V * (SCALES + j), fit_iq4(t + at, t + V * WEIGHTS + at, 32))
        _, value = farthest(t + V * SCALES, 8)
        d = value / splat_f(np.float32(-32))
        one = splat_f(np.float32(1))
        low, high = splat_f(np.float32(-32)), splat_f(np.float32(31))
        store_f(t + V * ENDS, d)
        inverse = where_less(zero_f(), vabs(d), one / d, zero_f())
        for j in range(8):
            level = whole(inverse * load_f(t + V * (SCALES + j)), low, high)
            put_level(scales, j, level)
            dj = d * level
            own = where_less(zero_f(), vabs(dj), one / dj, zero_f())
            for i in range(32 * j, 32 * (j + 1)):
                put_level(t + V * LEVELS, i, iq4_level(own * load_f(t + V * i)))

    return encode_block


# ---- the kernel ----------------------------------------------------------------------------------
def weighing(type: str, weighted: bool) -> Any:
    """A function (tile, mean squares of rows) that makes the weights of errors, and their sums."""
    size = GGMLType[type].block_size
    part = 16 if type in ("Q2_K", "Q3_K") else 32
    factor = np.float32(1 if type == "Q2_K" else 2)
    by_row = size == 32 and type != "IQ4_NL"
    by_part = type in ("Q4_K", "Q5_K")
    plain = type == "Q6_K"
    magnitudes = type == "Q2_K"

    @njit(**STRICT)
    def with_importance(t):
        """The tile of weights has importances; sigma is that of each lane's row, or block."""
        w = t + V * WEIGHTS
        if plain:
            return
        sigma = load_f(t + V * ENDS)
        if not by_row:
            sigma = splat_f(factor) * squares(t, size) / splat_f(np.float32(size))
        for i in range(size):
            v = load_f(t + V * i)
            store_f(w + V * i, load_f(w + V * i) * vsqrt(sigma + v * v))
        for j in range(size // part):
            total = zero_f()
            for i in range(part * j, part * (j + 1)):
                total += load_f(w + V * i)
            store_f(t + V * (SUMS + j), total)

    @njit(**STRICT)
    def by_values(t):
        w = t + V * WEIGHTS
        for j in range(size // part):
            x = t + V * part * j
            mean = vsqrt(squares(x, part) / splat_f(np.float32(part))) if by_part else zero_f()
            for i in range(part):
                v = load_f(x + V * i)
                if by_part:
                    weight = mean + vabs(v)
                elif magnitudes:
                    weight = vabs(v)
                else:
                    weight = v * v
                store_f(w + V * (part * j + i), weight)

    return with_importance if weighted else by_values


def encode(type: str, weighted: int) -> Any:
    """Kernel of ENCODE: threads share the blocks, LANES at a time."""
    size, n_byte = GGMLType[type].block_size, GGMLType[type].type_size
    if type in ("Q2_K", "Q4_K", "Q5_K"):
        blocks = ranged_super(type, bool(weighted))
    elif type in ("Q3_K", "Q6_K"):
        blocks = signed_super(type, bool(weighted))
    elif type == "IQ4_XS":
        blocks = iq4_super()
    else:
        is_simple = type == "Q8_0" or (type != "IQ4_NL" and not weighted)
        blocks = simple(type) if is_simple else searched(type)
    weigh, pack = weighing(type, bool(weighted)), PACKING[type]
    row_sums = bool(weighted) and size == 32 and type not in ("IQ4_NL", "Q8_0")

    @njit(**STRICT)
    def mean_square(x, n):
        total = np.float32(0)
        for i in range(n):
            v = load_f32(x + 4 * i)
            total += v * v
        return total / np.float32(n)

    def kernel(tid, n_thread, a):
        n_block = a.n // size
        total = a.n_row * n_block
        n_group = (total + LANES - 1) // LANES
        t, x, rows = a.scratch + ENCODE_SCRATCH * tid, address(a.x), address(a.rows)
        known, sigma = -1, np.float32(0)
        for group in range(n_group * tid // n_thread, n_group * (tid + 1) // n_thread):
            first = group * LANES
            for b in range(LANES):
                block = min(first + b, total - 1)
                column = block % n_block * size
                for i in range(size):
                    store_f32(t + V * i + 4 * b, load_f32(x + 4 * (size * block + i)))
                    if weighted:
                        at = t + V * (WEIGHTS + i) + 4 * b
                        store_f32(at, a.importance[column + i])
                if row_sums:
                    if block // n_block != known:
                        known = block // n_block
                        sigma = mean_square(x + 4 * a.n * known, a.n)
                    store_f32(t + V * ENDS + 4 * b, sigma)
            weigh(t)
            blocks(t)
            for b in range(min(LANES, total - first)):
                pack(t, b, rows + n_byte * (first + b))

    return kernel
