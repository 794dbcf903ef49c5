"""Several residual streams, and a mix of earlier residuals."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, fma, hsum, load_f, splat_f, store_f, zero_f

ZERO, ONE = np.float32(0), np.float32(1)


@njit(error_model="numpy")
def sigmoid(x):
    """1 / (1 + exp(-x)) of a float32."""
    return ONE / (ONE + np.exp(-x))


@njit(error_model="numpy")
def divide_by_sums(comb, n, first, each, eps):
    """Divide n lines of n numbers by their sums + eps.

    Lines begin `first` apart, numbers `each` apart.
    """
    for line in range(n):
        at, total = comb + 4 * first * line, ZERO
        for i in range(n):
            total += load_f32(at + 4 * each * i)
        for i in range(n):
            store_f32(at + 4 * each * i, load_f32(at + 4 * each * i) / (total + eps))


@njit(error_model="numpy")
def softmax_rows(comb, n, eps):
    """The softmax of each of n rows, + eps, in place."""
    for row in range(n):
        at, top, total = comb + 4 * n * row, load_f32(comb + 4 * n * row), ZERO
        for i in range(1, n):
            top = max(top, load_f32(at + 4 * i))
        for i in range(n):
            store_f32(at + 4 * i, np.exp(load_f32(at + 4 * i) - top))
            total += load_f32(at + 4 * i)
        for i in range(n):
            store_f32(at + 4 * i, load_f32(at + 4 * i) / total + eps)


def stream_weights() -> Any:
    """Kernel of STREAM_WEIGHTS: threads stride over tokens."""

    def kernel(tid, n_thread, a):
        n = a.n
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            mixes = a.mixes + 4 * a.n_mix * t
            for i in range(n):
                value = load_f32(a.scale) * load_f32(mixes + 4 * i) + load_f32(a.base + 4 * i)
                store_f32(a.pre + 4 * (n * t + i), sigmoid(value) + a.eps)
            if a.post != 0:
                scale = load_f32(a.scale + 4)
                for i in range(n):
                    at = 4 * (n + i)
                    value = scale * load_f32(mixes + at) + load_f32(a.base + at)
                    store_f32(a.post + 4 * (n * t + i), a.magnitude * sigmoid(value) + a.post_eps)
            if a.comb != 0:
                comb, scale = a.comb + 4 * n * n * t, load_f32(a.scale + 8)
                for i in range(n * n):
                    at = 4 * (2 * n + i)
                    store_f32(comb + 4 * i, scale * load_f32(mixes + at) + load_f32(a.base + at))
                softmax_rows(comb, n, a.eps)
                divide_by_sums(comb, n, 1, n, a.eps)
                for _turn in range(1, a.n_turn):
                    divide_by_sums(comb, n, n, 1, a.eps)
                    divide_by_sums(comb, n, 1, n, a.eps)

    return kernel


def stream_mix() -> Any:
    """Kernel of STREAM_MIX: threads stride over streams of tokens."""

    def kernel(tid, n_thread, a):
        whole = a.n // LANES * LANES
        for r in range(tid, load_i64(a.step + STEP.n_tok) * a.n_stream, n_thread):
            t, target = r // a.n_stream, r % a.n_stream
            x, b, y = a.x + 4 * a.n * a.n_stream * t, a.b + 4 * a.n * t, a.y + 4 * a.n * r
            post = load_f32(a.post + 4 * r)
            comb = a.comb + 4 * (a.n_stream * a.n_stream * t + target)
            for i in range(0, 4 * whole, 4 * LANES):
                sums = load_f(b + i) * splat_f(post)
                if a.comb == 0:
                    sums += load_f(x + 4 * a.n * target + i)
                else:
                    for s in range(a.n_stream):
                        weight = splat_f(load_f32(comb + 4 * a.n_stream * s))
                        sums = fma(load_f(x + 4 * a.n * s + i), weight, sums)
                store_f(y + i, sums)
            for i in range(4 * whole, 4 * a.n, 4):
                total = load_f32(b + i) * post
                if a.comb == 0:
                    total += load_f32(x + 4 * a.n * target + i)
                else:
                    for s in range(a.n_stream):
                        total += load_f32(x + 4 * a.n * s + i) * load_f32(comb + 4 * a.n_stream * s)
                store_f32(y + i, total)

    return kernel


def stream_gate() -> Any:
    """Kernel of STREAM_GATE: threads stride over streams of tokens."""

    def kernel(tid, n_thread, a):
        whole = a.n // LANES * LANES
        for r in range(tid, load_i64(a.step + STEP.n_tok) * a.n_stream, n_thread):
            key, query, products = a.key + 4 * a.n * r, a.query + 4 * a.n * r, zero_f()
            for i in range(0, 4 * whole, 4 * LANES):
                products = fma(load_f(key + i), load_f(query + i), products)
            product = hsum(products)
            for i in range(4 * whole, 4 * a.n, 4):
                product += load_f32(key + i) * load_f32(query + i)
            product *= a.scale
            root = np.sqrt(max(abs(product), a.least))
            root = root if product > ZERO else (-root if product < ZERO else ZERO)
            store_f32(a.y + 4 * r, sigmoid(root))

    return kernel


@njit(error_model="numpy")
def score_of(row, w, n, eps):
    """The dot product of w and rms_norm(row)."""
    whole, squares, products = n // LANES * LANES, zero_f(), zero_f()
    for i in range(0, 4 * whole, 4 * LANES):
        squares = fma(load_f(row + i), load_f(row + i), squares)
        products = fma(load_f(row + i), load_f(w + i), products)
    square, product = hsum(squares), hsum(products)
    for i in range(4 * whole, 4 * n, 4):
        square += load_f32(row + i) * load_f32(row + i)
        product += load_f32(row + i) * load_f32(w + i)
    return product / np.sqrt(square / np.float32(n) + eps)


def residual_mix() -> Any:
    """Kernel of RESIDUAL_MIX: threads stride over tokens; softmax with a running maximum."""

    def kernel(tid, n_thread, a):
        whole = a.n // LANES * LANES
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            y, top, total = a.y + 4 * a.n * t, np.float32(-np.inf), ZERO
            for r in range(a.n_row):
                row = a.x + 4 * (a.stride * t + a.n * r)
                score = score_of(row, a.w, a.n, a.eps)
                best = max(top, score)
                before, share = total * np.exp(top - best), np.exp(score - best)
                top, total = best, before + share
                old, new = before / total, share / total
                for i in range(0, 4 * whole, 4 * LANES):
                    value = load_f(row + i) * splat_f(new)
                    store_f(y + i, value if r == 0 else fma(load_f(y + i), splat_f(old), value))
                for i in range(4 * whole, 4 * a.n, 4):
                    value = load_f32(row + i) * new
                    store_f32(y + i, value if r == 0 else load_f32(y + i) * old + value)

    return kernel
