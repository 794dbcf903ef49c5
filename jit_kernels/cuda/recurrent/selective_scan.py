"""The selective scan of Mamba: one thread per channel, with its state in shared memory."""

import math

from numba import cuda, float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, store_f32

MOST_SHARED = 1 << 15  # bytes of a block's states
MOST_STATE = MOST_SHARED // 4 // 32  # numbers per channel if a block is one warp


def selective_scan(n_state: int) -> list[Launch]:
    """Kernel of SELECTIVE_SCAN: threads stride over channels."""
    if n_state > MOST_STATE:
        raise ValueError(f"n_state is {n_state}, expected at most {MOST_STATE}")
    threads = 32
    while threads < 256 and 4 * n_state * 2 * threads <= MOST_SHARED:
        threads *= 2
    n_held = n_state * threads

    def kernel(tid, n_thread, a):
        held = cuda.shared.array(n_held, float32)
        n_tok = load_i64(a.step + STEP.n_tok)
        for i in range(tid * threads + thread(), a.n, n_thread * threads):
            for s in range(n_state):
                held[s * threads + thread()] = load_f32(a.state + 4 * (a.n * s + i))
            for t in range(n_tok):
                value, rate = load_f32(a.x + 4 * (a.n * t + i)), load_f32(a.dt + 4 * (a.n * t + i))
                total, mixed = load_f32(a.d + 4 * i) * value, 4 * a.bc_stride * t
                for s in range(n_state):
                    kept = math.exp(rate * load_f32(a.a + 4 * (a.n * s + i)))
                    new = kept * held[s * threads + thread()]
                    new += rate * value * load_f32(a.b + mixed + 4 * s)
                    held[s * threads + thread()] = new
                    total += new * load_f32(a.c + mixed + 4 * s)
                store_f32(a.y + 4 * (a.n * t + i), total)
            for s in range(n_state):
                store_f32(a.state + 4 * (a.n * s + i), held[s * threads + thread()])

    return [Launch(kernel, threads=threads)]
