"""Attention sinks: a head's output, scaled down by the softmax share of a key without value."""

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, quotient, store_f32
from tamis.jit_kernels.cuda.linear.activation import over_one_plus_exp


def attend_sink() -> list[Launch]:
    """Kernel of ATTEND_SINK: threads share the elements of all rows."""

    def kernel(tid, n_thread, a):
        total = load_i64(a.step + STEP.n_tok) * a.n_head * a.head_dim
        for i in range(tid * THREADS + thread(), total, n_thread * THREADS):
            r = quotient(i, a.head_dim)
            head = r - a.n_head * quotient(r, a.n_head)
            difference = load_f32(a.lse + 4 * r) - load_f32(a.sinks + 4 * head)
            share = over_one_plus_exp(float32(1), difference)
            store_f32(a.out + 4 * i, load_f32(a.out + 4 * i) * share)

    return [Launch(kernel, blocks=4)]
