"""Norms of rows: RMS norm and LayerNorm."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, fma, hsum, load_f, splat_f, store_f, zero_f


@njit(error_model="numpy")
def scale_of(row, n, eps):
    """1 / sqrt(mean of the squares of n floats + eps)."""
    sums, whole = zero_f(), n // LANES * LANES
    for i in range(0, whole, LANES):
        sums = fma(load_f(row + 4 * i), load_f(row + 4 * i), sums)
    total = hsum(sums)
    for i in range(whole, n):
        total += load_f32(row + 4 * i) * load_f32(row + 4 * i)
    return np.float32(1) / np.sqrt(total / np.float32(n) + eps)


@njit(error_model="numpy")
def normalise(row, w, out, n, eps, add):
    """Write n floats of row / rms(row) * w over, or onto, the values at out; row may be out."""
    scale, whole = scale_of(row, n, eps), n // LANES * LANES
    scales = splat_f(scale)
    for i in range(0, whole, LANES):
        values = load_f(row + 4 * i) * scales * load_f(w + 4 * i)
        store_f(out + 4 * i, values + load_f(out + 4 * i) if add else values)
    for i in range(whole, n):
        value = load_f32(row + 4 * i) * scale * load_f32(w + 4 * i)
        store_f32(out + 4 * i, value + load_f32(out + 4 * i) if add else value)


def rms_norm(add: int) -> Any:
    """Kernel of RMS_NORM: each thread takes whole rows."""

    def kernel(tid, n_thread, a):
        n_row = load_i64(a.step + STEP.n_tok) * a.rows_per_tok
        source = a.x + 4 * a.x_stride * load_i64(a.step + STEP.row)
        for r in range(tid, n_row, n_thread):
            t, i = r // a.rows_per_tok, a.n * (r % a.rows_per_tok)
            row, out = source + 4 * (a.x_stride * t + i), a.y + 4 * (a.y_stride * t + i)
            normalise(row, a.w, out, a.n, a.eps, add)

    return kernel


@njit(error_model="numpy")
def centred(row, n, eps):
    """Mean of n floats, and 1 / sqrt(their variance + eps)."""
    sums, whole = zero_f(), n // LANES * LANES
    for i in range(0, whole, LANES):
        sums += load_f(row + 4 * i)
    total = hsum(sums)
    for i in range(whole, n):
        total += load_f32(row + 4 * i)
    mean = total / np.float32(n)
    squares, means = zero_f(), splat_f(mean)
    for i in range(0, whole, LANES):
        far = load_f(row + 4 * i) - means
        squares = fma(far, far, squares)
    total = hsum(squares)
    for i in range(whole, n):
        total += (load_f32(row + 4 * i) - mean) * (load_f32(row + 4 * i) - mean)
    return mean, np.float32(1) / np.sqrt(total / np.float32(n) + eps)


def layer_norm() -> Any:
    """Kernel of LAYER_NORM: each thread takes whole rows."""

    def kernel(tid, n_thread, a):
        n_row, whole = load_i64(a.step + STEP.n_tok) * a.rows_per_tok, a.n // LANES * LANES
        source = a.x + 4 * a.n * a.rows_per_tok * load_i64(a.step + STEP.row)
        for r in range(tid, n_row, n_thread):
            row, out = source + 4 * a.n * r, a.y + 4 * a.n * r
            w = a.w + 4 * a.w_step * (r % a.rows_per_tok)
            mean, scale = centred(row, a.n, a.eps)
            means, scales = splat_f(mean), splat_f(scale)
            for i in range(0, whole, LANES):
                values = (load_f(row + 4 * i) - means) * scales
                if a.w != 0:
                    values *= load_f(w + 4 * i)
                if a.bias != 0:
                    values += load_f(a.bias + 4 * i)
                store_f(out + 4 * i, values)
            for i in range(whole, a.n):
                value = (load_f32(row + 4 * i) - mean) * scale
                if a.w != 0:
                    value *= load_f32(w + 4 * i)
                if a.bias != 0:
                    value += load_f32(a.bias + 4 * i)
                store_f32(out + 4 * i, value)

    return kernel
