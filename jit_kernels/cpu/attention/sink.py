"""Attention sinks: a head's output, scaled down by the softmax share of a key without value."""

from typing import Any

import numpy as np

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32


def attend_sink() -> Any:
    """Kernel of ATTEND_SINK: threads stride over heads."""

    def kernel(tid, n_thread, a):
        for r in range(tid, load_i64(a.step + STEP.n_tok) * a.n_head, n_thread):
            difference = load_f32(a.sinks + 4 * (r % a.n_head)) - load_f32(a.lse + 4 * r)
            # Where no position was left the output is 0 already.
            share = np.float32(1) / (np.float32(1) + np.exp(min(difference, np.float32(80))))
            for at in range(a.out + 4 * a.head_dim * r, a.out + 4 * a.head_dim * (r + 1), 4):
                store_f32(at, load_f32(at) * share)

    return kernel
