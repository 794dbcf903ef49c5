"""Rows made ready for products: normed or gated where asked, few as float32, many as float16."""

import math

from numba import float32

from tamis.jit_kernels.cuda.activation import gelu, silu
from tamis.jit_kernels.cuda.gemm import padding
from tamis.jit_kernels.cuda.grid import THREADS, Launch, block_sum, thread
from tamis.jit_kernels.cuda.intrinsic import device, load_f32, load_i64, store_f16, store_f32
from tamis.jit_kernels.ops import FEW_ROWS, STEP


@device
def copied(x, other, scale):
    """An element as it is."""
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


SOURCES = {"rows": copied, "norm": normed, "silu": silu_gated, "gelu": gelu_gated}


def pack_rows(form: str, source: str) -> list[Launch]:
    """Kernel of PACK_ROWS: all blocks share few rows, or each takes some of many."""
    value, is_norm, has_other = SOURCES[source], source == "norm", source != "rows"

    @device
    def element(row, other, i, scale):
        right = load_f32(other + 4 * i) if has_other else float32(0)
        return value(load_f32(row + 4 * i), right, scale)

    @device
    def scale_of(row, n, eps):
        if not is_norm:
            return float32(1)
        squares = float32(0)
        for i in range(thread(), n, THREADS):
            squares += load_f32(row + 4 * i) * load_f32(row + 4 * i)
        return float32(1) / math.sqrt(block_sum(squares) / float32(n) + eps)

    def kernel(tid, n_thread, step, x, other, packed, n, scratch, eps_f):
        n_tok, skip = load_i64(step + STEP.n_tok), load_i64(step + STEP.row)
        many, width, apart = n_tok > FEW_ROWS, padding(n), 0 if is_norm else 4 * n
        for t in range(tid if many else 0, n_tok, n_thread if many else 1):
            row, right = x + 4 * n * (skip + t), other + apart * (skip + t)
            scale = scale_of(row, n, eps_f)
            if many:
                for i in range(thread(), width, THREADS):
                    made = element(row, right, i, scale) if i < n else float32(0)
                    store_f16(packed + 2 * (width * t + i), made)
            else:
                for i in range(tid * THREADS + thread(), n, n_thread * THREADS):
                    store_f32(packed + 4 * (n * t + i), element(row, right, i, scale))

    return [Launch(kernel, blocks=2)]
