"""PACK_ROWS: activations, normed or gated if asked, in the format that products read.

Few rows are float32 or, for quantised weights, integers of 15 bits: two signed bytes (see
scratch.py).
"""

import math

from numba import float32

from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, block_sum, look_ahead, step_of, thread
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_f32x8,
    rounded,
    store_f16,
    store_f32,
    store_i8,
)
from tamis.jit_kernels.cuda.lang.ptx import reciprocal, shuffle_xor
from tamis.jit_kernels.cuda.lang.scratch import FEW_ROW, FEW_ROWS
from tamis.jit_kernels.cuda.linear.activation import gelu, silu
from tamis.jit_kernels.cuda.linear.gemm import padding


@device
def copied(x, other, scale):
    """An element, unchanged."""
    return x


@device
def normed(x, other, scale):
    """An element over its row's root mean square, times a weight."""
    return x * scale * other


@device
def silu_gated(x, other, scale):
    """SiLU of a gate's element, times the other branch's."""
    return silu(x) * other


@device
def gelu_gated(x, other, scale):
    """GELU of a gate's element, times the other branch's."""
    return gelu(x) * other


@device
def squares_of(x):
    """The sum of eight squares."""
    return (
        (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3])
        + (x[4] * x[4] + x[5] * x[5]) + (x[6] * x[6] + x[7] * x[7])
    )  # fmt: skip


@device
def put_float(packed, n, i, value, live):
    """Write element i of a row of n, unchanged."""
    store_f32(packed + 4 * i, value)


@device
def put_15_bits(packed, n, i, value, live):
    """Write element i of a row of n as 15 bits, if it is live; all lanes have neighbours."""
    top = max(value, -value)
    for lanes in range(4):  # sixteen neighbours share a scale
        top = max(top, shuffle_xor(top, 8 >> lanes))
    factor = float32(127 * 128) * reciprocal(top) if top > float32(1e-30) else float32(0)
    whole = rounded(value * factor)
    total = float32(whole)  # the sum of the rounded values: a weight's offset then cancels exactly
    for lanes in range(4):
        total += shuffle_xor(total, 8 >> lanes)
    high = (whole + 64) >> 7
    if live:
        store_i8(packed + i, high)
        store_i8(packed + FEW_ROW.low * n // 4 + i, whole - (high << 7))
    if live and i % 16 == 0:
        scale = top * float32(1 / (127 * 128))
        store_f32(packed + FEW_ROW.scale * n // 4 + i // 4, scale)
        store_f32(packed + FEW_ROW.sum * n // 4 + i // 4, total * scale)


@device
def put_two_15_bits(packed, n, i, one, other):
    """Write elements i and i + 1 as 15 bits, i being even.

    The lanes of a warp have 64 neighbours.
    """
    top = max(max(one, -one), max(other, -other))
    for lanes in range(3):
        top = max(top, shuffle_xor(top, 4 >> lanes))
    factor = float32(127 * 128) * reciprocal(top) if top > float32(1e-30) else float32(0)
    first, second = rounded(one * factor), rounded(other * factor)
    total = float32(first + second)
    for lanes in range(3):
        total += shuffle_xor(total, 4 >> lanes)
    high, next_high = (first + 64) >> 7, (second + 64) >> 7
    store_i8(packed + i, high)
    store_i8(packed + i + 1, next_high)
    low = packed + FEW_ROW.low * n // 4 + i
    store_i8(low, first - (high << 7))
    store_i8(low + 1, second - (next_high << 7))
    if i % 16 == 0:
        scale = top * float32(1 / (127 * 128))
        store_f32(packed + FEW_ROW.scale * n // 4 + i // 4, scale)
        store_f32(packed + FEW_ROW.sum * n // 4 + i // 4, total * scale)


SOURCES = {"rows": copied, "norm": normed, "silu": silu_gated, "gelu": gelu_gated}


def pack_rows(form: str, source: str) -> list[Launch]:
    """Kernel of PACK_ROWS: all blocks share few rows, or each takes some of many."""
    value, is_norm, has_other = SOURCES[source], source == "norm", source != "rows"

    @device
    def pair(row, other, i):
        return load_f32(row + 4 * i), load_f32(other + 4 * i) if has_other else float32(0)

    @device
    def scale_of(row, n, eps):
        if not is_norm:
            return float32(1)
        squares = float32(0)
        if form == "float":  # rows of any length
            for i in range(thread(), n, THREADS):
                squares += load_f32(row + 4 * i) * load_f32(row + 4 * i)
        else:
            for i in range(16 * thread(), n, 16 * THREADS):
                one, other = load_f32x8(row + 4 * i), load_f32x8(row + 4 * i + 32)
                squares += squares_of(one) + squares_of(other)
        return float32(1) / math.sqrt(block_sum(squares) / float32(n) + eps)

    put = put_float if form == "float" else put_15_bits
    n_quarter = 16 if form == "float" else FEW_ROW.size  # of a row's bytes

    def kernel(tid, n_thread, a):
        n_tok, _, skip = step_of(a.step)
        many, width, apart = n_tok > FEW_ROWS, padding(a.n), 0 if is_norm else 4 * a.n
        t, turn = tid if many else 0, n_thread if many else 1
        while t < n_tok:  # a range divides by its step
            row, right = a.x + 4 * a.n * (skip + t), a.other + apart * (skip + t)
            if many:
                scale = scale_of(row, a.n, a.eps)
                for i in range(thread(), width, THREADS):
                    left, gate = pair(row, right, i) if i < a.n else (float32(0), float32(0))
                    store_f16(a.packed + 2 * (width * t + i), value(left, gate, scale))
            elif tid * THREADS < a.n:
                i = tid * THREADS + thread()
                left, gate = pair(row, right, min(i, a.n - 1))  # in flight while squares are added
                scale = scale_of(row, a.n, a.eps)
                # Rows of 15 bits have a multiple of 32 elements: whole warps come here.
                while i < a.n:
                    put(a.packed + n_quarter * a.n // 4 * t, a.n, i, value(left, gate, scale), True)
                    i += n_thread * THREADS
                    left, gate = pair(row, right, min(i, a.n - 1))
            t += turn

    return [Launch(kernel, blocks=2, start=look_ahead)]
