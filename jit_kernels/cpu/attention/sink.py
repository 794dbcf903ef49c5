"""Attention sinks: a key without value takes a share of the softmax; merge of parts of keys."""

from typing import Any

import numpy as np

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32


def attend_sink() -> Any:
    """Kernel of ATTEND_SINK: threads stride over heads."""

    def kernel(tid, n_thread, a):
        part, size = a.n_head * a.head_dim, 4 * a.head_dim
        for r in range(tid, load_i64(a.step + STEP.n_tok) * a.n_head, n_thread):
            t, head = r // a.n_head, r % a.n_head
            lse = a.lse + 4 * (a.n_part * a.n_head * t + head)
            out = a.out + 4 * (a.n_part * part * t + a.head_dim * head)
            sink = load_f32(a.sinks + 4 * head)
            top = sink
            for i in range(a.n_part):
                top = max(top, load_f32(lse + 4 * a.n_head * i))
            total = np.exp(sink - top)
            for i in range(a.n_part):
                total += np.exp(load_f32(lse + 4 * a.n_head * i) - top)
            for i in range(a.n_part):
                share = np.exp(load_f32(lse + 4 * a.n_head * i) - top) / total
                for at in range(out, out + size, 4):
                    value = load_f32(at + 4 * part * i) * share
                    store_f32(at, value if i == 0 else load_f32(at) + value)

    return kernel
