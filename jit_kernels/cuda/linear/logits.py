"""The largest logits, and the softmax normaliser of all of them."""

from numba import float32

from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    Launch,
    block_max,
    block_sum,
    sync_block,
    thread,
)
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32, load_i32, store_f32, store_i32
from tamis.jit_kernels.cuda.lang.ptx import exp2
from tamis.jit_kernels.cuda.lang.radix_topk import write_best, write_range
from tamis.jit_kernels.cuda.linear.activation import LOG2_E

LOWEST, NOTHING = -3e38, -float("inf")


@device
def write_best_of(scores, low, high, n, out):
    """Write the n best of a span of entries, or all if there are fewer.

    The span is low .. high - 1. This is a block's work.
    """
    if high - low > n:
        write_best(scores, low, high, n, out)
    else:
        write_range(out, low, high)
    sync_block()


def logit_parts() -> list[Launch]:
    """Kernel of LOGIT_PARTS: blocks stride over parts."""

    def kernel(tid, n_thread, a):
        size = (a.n_vocab + a.n_part - 1) // a.n_part
        for p in range(tid, a.n_part, n_thread):
            low = min(p * size, a.n_vocab)
            high = min(low + size, a.n_vocab)
            top, exps = float32(LOWEST), float32(0)
            for j in range(low + thread(), high, THREADS):
                top = max(top, load_f32(a.logits + 4 * j))
            top = block_max(top)
            for j in range(low + thread(), high, THREADS):
                exps += exp2((load_f32(a.logits + 4 * j) - top) * float32(LOG2_E))
            exps = block_sum(exps)
            if thread() == 0:
                store_f32(a.sums + 8 * p, top)
                store_f32(a.sums + 8 * p + 4, exps)
            own, found = a.ids + 4 * a.n_best * p, min(a.n_best, high - low)
            write_best_of(a.logits, low, high, a.n_best, own)
            for i in range(thread(), a.n_best, THREADS):
                value = float32(NOTHING)
                if i < found:
                    value = load_f32(a.logits + 4 * load_i32(own + 4 * i))
                else:
                    store_i32(own + 4 * i, -1)
                store_f32(a.values + 4 * (a.n_best * p + i), value)
            sync_block()

    return [Launch(kernel)]


def logit_best() -> list[Launch]:
    """Kernel of LOGIT_BEST: one block, the best of the parts' best."""

    def kernel(tid, n_thread, a):
        if tid == 0:
            write_best_of(a.values, 0, a.n_best * a.n_part, a.n_best, a.best_ids)
            for i in range(thread(), a.n_best, THREADS):
                at = load_i32(a.best_ids + 4 * i)
                store_f32(a.best_values + 4 * i, load_f32(a.values + 4 * at))
                store_i32(a.best_ids + 4 * i, load_i32(a.ids + 4 * at))
            top, exps = float32(LOWEST), float32(0)
            for p in range(thread(), a.n_part, THREADS):
                top = max(top, load_f32(a.sums + 8 * p))
            top = block_max(top)
            for p in range(thread(), a.n_part, THREADS):
                own = load_f32(a.sums + 8 * p) - top
                exps += load_f32(a.sums + 8 * p + 4) * exp2(own * float32(LOG2_E))
            exps = block_sum(exps)
            if thread() == 0:
                store_f32(a.total, top)
                store_f32(a.total + 4, exps)

    return [Launch(kernel)]
