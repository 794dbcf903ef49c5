"""Several residual streams, and a mix of earlier residuals."""

import math

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, block_sum, device, thread
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.linear.activation import sigmoid


@device
def divide_by_sums(comb, n, first, each, eps):
    """Divide n lines of n numbers by their sums + eps.

    Lines begin `first` apart, numbers `each` apart.
    """
    for line in range(n):
        at, total = comb + 4 * first * line, float32(0)
        for i in range(n):
            total += load_f32(at + 4 * each * i)
        for i in range(n):
            store_f32(at + 4 * each * i, load_f32(at + 4 * each * i) / (total + eps))


@device
def softmax_rows(comb, n, eps):
    """The softmax of each of n rows, + eps, in place."""
    for row in range(n):
        at, total = comb + 4 * n * row, float32(0)
        top = load_f32(at)
        for i in range(1, n):
            top = max(top, load_f32(at + 4 * i))
        for i in range(n):
            value = math.exp(load_f32(at + 4 * i) - top)
            store_f32(at + 4 * i, value)
            total += value
        for i in range(n):
            store_f32(at + 4 * i, load_f32(at + 4 * i) / total + eps)


def stream_weights() -> list[Launch]:
    """Kernel of STREAM_WEIGHTS: each thread takes whole tokens."""

    def kernel(tid, n_thread, a):
        n = a.n
        for t in range(tid * THREADS + thread(), load_i64(a.step + STEP.n_tok), n_thread * THREADS):
            mixes = a.mixes + 4 * a.n_mix * t
            for i in range(n):
                value = load_f32(a.scale) * load_f32(mixes + 4 * i) + load_f32(a.base + 4 * i)
                store_f32(a.pre + 4 * (n * t + i), sigmoid(value) + a.eps)
            if a.post != 0:
                for i in range(n):
                    at = 4 * (n + i)
                    value = load_f32(a.scale + 4) * load_f32(mixes + at) + load_f32(a.base + at)
                    store_f32(a.post + 4 * (n * t + i), a.magnitude * sigmoid(value) + a.post_eps)
            if a.comb != 0:
                comb = a.comb + 4 * n * n * t
                for i in range(n * n):
                    at = 4 * (2 * n + i)
                    value = load_f32(a.scale + 8) * load_f32(mixes + at) + load_f32(a.base + at)
                    store_f32(comb + 4 * i, value)
                softmax_rows(comb, n, a.eps)
                divide_by_sums(comb, n, 1, n, a.eps)
                for _turn in range(1, a.n_turn):
                    divide_by_sums(comb, n, n, 1, a.eps)
                    divide_by_sums(comb, n, 1, n, a.eps)

    return [Launch(kernel)]


def stream_mix() -> list[Launch]:
    """Kernel of STREAM_MIX: threads share the elements of all streams."""

    def kernel(tid, n_thread, a):
        total, per_tok = load_i64(a.step + STEP.n_tok) * a.n_stream * a.n, a.n_stream * a.n
        for e in range(tid * THREADS + thread(), total, n_thread * THREADS):
            t, target, i = e // per_tok, e % per_tok // a.n, e % a.n
            value = load_f32(a.b + 4 * (a.n * t + i))
            value *= load_f32(a.post + 4 * (a.n_stream * t + target))
            if a.comb == 0:
                value += load_f32(a.x + 4 * e)
            else:
                comb = a.comb + 4 * (a.n_stream * a.n_stream * t + target)
                for s in range(a.n_stream):
                    x = load_f32(a.x + 4 * (per_tok * t + a.n * s + i))
                    value += x * load_f32(comb + 4 * a.n_stream * s)
            store_f32(a.y + 4 * e, value)

    return [Launch(kernel, blocks=4)]


def stream_gate() -> list[Launch]:
    """Kernel of STREAM_GATE: blocks stride over streams of tokens."""

    def kernel(tid, n_thread, a):
        for r in range(tid, load_i64(a.step + STEP.n_tok) * a.n_stream, n_thread):
            part = float32(0)
            for i in range(thread(), a.n, THREADS):
                at = 4 * (a.n * r + i)
                part += load_f32(a.key + at) * load_f32(a.query + at)
            product = block_sum(part) * a.scale
            root = float32(math.sqrt(max(abs(product), a.least)))
            if product == float32(0):
                root = float32(0)
            if thread() == 0:
                store_f32(a.y + 4 * r, sigmoid(root if product > float32(0) else -root))

    return [Launch(kernel)]


def residual_mix() -> list[Launch]:
    """Kernel of RESIDUAL_MIX: each block takes whole tokens; softmax with a running maximum."""

    def kernel(tid, n_thread, a):
        for t in range(tid, load_i64(a.step + STEP.n_tok), n_thread):
            y, top, total = a.y + 4 * a.n * t, float32(-float("inf")), float32(0)
            for r in range(a.n_row):
                row, squares, products = a.x + 4 * (a.stride * t + a.n * r), float32(0), float32(0)
                for i in range(thread(), a.n, THREADS):
                    value = load_f32(row + 4 * i)
                    squares += value * value
                    products += value * load_f32(a.w + 4 * i)
                mean, product = block_sum(squares) / float32(a.n), block_sum(products)
                score = product / math.sqrt(mean + a.eps)
                best = max(top, score)
                before, share = total * math.exp(top - best), math.exp(score - best)
                top, total = best, before + share
                for i in range(thread(), a.n, THREADS):
                    value = load_f32(row + 4 * i) * (share / total)
                    if r > 0:
                        value += load_f32(y + 4 * i) * (before / total)
                    store_f32(y + 4 * i, value)

    return [Launch(kernel)]
