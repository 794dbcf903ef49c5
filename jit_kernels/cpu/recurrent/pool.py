"""Means of an indexer's last keys, weighed by gates."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32


@njit(error_model="numpy")
def element(state, x, row, n_before, width, at):
    """Element `at` of a row, counted from the first of the state's n_before rows."""
    if row < n_before:
        return load_f32(state + 4 * (width * row + at))
    return load_f32(x + 4 * (width * (row - n_before) + at))


def pool_keys() -> Any:
    """Kernel of POOL_KEYS: threads stride over elements; softmax with a running maximum."""

    def kernel(tid, n_thread, a):
        n_tok, width, n_before = load_i64(a.step + STEP.n_tok), 2 * a.n, a.n_row - 1
        for i in range(tid, a.n, n_thread):
            for t in range(n_tok):
                top, total, mean = np.float32(-np.inf), np.float32(0), np.float32(0)
                for j in range(a.n_row):
                    gate = element(a.state, a.x, t + j, n_before, width, a.n + i)
                    gate += load_f32(a.w + 4 * (a.n * j + i))
                    best = max(top, gate)
                    old, new = np.exp(top - best), np.exp(gate - best)
                    key = element(a.state, a.x, t + j, n_before, width, i)
                    total, mean, top = total * old + new, mean * old + key * new, best
                store_f32(a.y + 4 * (a.n * t + i), mean / total)
            for j in range(n_before):
                for at in (i, a.n + i):
                    value = element(a.state, a.x, n_tok + j, n_before, width, at)
                    store_f32(a.state + 4 * (width * j + at), value)

    return kernel
