"""Means of the keys of neighbouring positions, weighted by gates."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32


@njit(error_model="numpy")
def row_of(a, pos, p):
    """The address of the row of position p: of the call, or of the state."""
    width = 2 * a.n_half * a.n
    return a.x + 4 * width * (p - pos) if p >= pos else a.state + 4 * width * (p % (a.n_row - 1))


def pool_keys() -> Any:
    """Kernel of POOL_KEYS: threads stride over elements; softmax with a running maximum."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        run, gates = a.n_row // a.n_half, 4 * a.n_half * a.n
        for i in range(tid, a.n, n_thread):
            for t in range(n_tok):
                top, total, mean = np.float32(-np.inf), np.float32(0), np.float32(0)
                first = pos + t + 1 - a.n_row
                is_last = (pos + t + 1) % a.every == 0
                for j in range(max(0, -first), a.n_row if is_last else 0):
                    at = row_of(a, pos, first + j) + 4 * (a.n * (j // run) + i)
                    gate = load_f32(at + gates) + load_f32(a.w + 4 * (a.n * j + i))
                    best = max(top, gate)
                    old, new = np.exp(top - best), np.exp(gate - best)
                    total, mean, top = total * old + new, mean * old + load_f32(at) * new, best
                store_f32(a.y + 4 * (a.n * t + i), mean / total if is_last else np.float32(0))
            for p in range(max(pos, pos + n_tok + 1 - a.n_row), pos + n_tok):
                to = a.state + 2 * gates * (p % (a.n_row - 1))
                for at in range(4 * i, 2 * gates, 4 * a.n):
                    store_f32(to + at, load_f32(row_of(a, pos, p) + at))

    return kernel
