"""Attention sinks: a key without value takes a share of the softmax; merge of parts of keys."""

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, quotient, store_f32
from tamis.jit_kernels.cuda.lang.ptx import exp2
from tamis.jit_kernels.cuda.linear.activation import LOG2_E


def attend_sink() -> list[Launch]:
    """Kernel of ATTEND_SINK: threads share the elements of all rows."""

    def kernel(tid, n_thread, a):
        part = a.n_head * a.head_dim
        total = load_i64(a.step + STEP.n_tok) * part
        for e in range(tid * THREADS + thread(), total, n_thread * THREADS):
            t = quotient(e, part)
            head, at = (
                quotient(e - part * t, a.head_dim),
                a.out + 4 * (e + (a.n_part - 1) * part * t),
            )
            lse = a.lse + 4 * (a.n_part * a.n_head * t + head)
            sink = load_f32(a.sinks + 4 * head)
            top = sink
            for i in range(a.n_part):
                top = max(top, load_f32(lse + 4 * a.n_head * i))
            shares, mean = exp2((sink - top) * float32(LOG2_E)), float32(0)
            for i in range(a.n_part):
                share = exp2((load_f32(lse + 4 * a.n_head * i) - top) * float32(LOG2_E))
                shares += share
                mean += load_f32(at + 4 * part * i) * share
            store_f32(at, mean / shares)

    return [Launch(kernel, blocks=4)]
