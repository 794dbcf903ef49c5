"""The largest logits, and the sum that makes probabilities of them."""

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
    """Write the n best of entries low .. high - 1 of which there may be fewer; a block's work."""
    if high - low > n:
        write_best(scores, low, high, n, out)
    else:
        write_range(out, low, high)
    sync_block()


def logit_parts() -> list[Launch]:
    """Kernel of LOGIT_PARTS: blocks take parts in turn."""

    def kernel(tid, n_thread, logits, ids, values, sums, n_vocab, n_best, n_part):
        size = (n_vocab + n_part - 1) // n_part
        for p in range(tid, n_part, n_thread):
            low = min(p * size, n_vocab)
            high = min(low + size, n_vocab)
            top, exps = float32(LOWEST), float32(0)
            for j in range(low + thread(), high, THREADS):
                top = max(top, load_f32(logits + 4 * j))
            top = block_max(top)
            for j in range(low + thread(), high, THREADS):
                exps += exp2((load_f32(logits + 4 * j) - top) * float32(LOG2_E))
            exps = block_sum(exps)
            if thread() == 0:
                store_f32(sums + 8 * p, top)
                store_f32(sums + 8 * p + 4, exps)
            own, found = ids + 4 * n_best * p, min(n_best, high - low)
            write_best_of(logits, low, high, n_best, own)
            for i in range(thread(), n_best, THREADS):
                value = float32(NOTHING)
                if i < found:
                    value = load_f32(logits + 4 * load_i32(own + 4 * i))
                else:
                    store_i32(own + 4 * i, -1)
                store_f32(values + 4 * (n_best * p + i), value)
            sync_block()

    return [Launch(kernel)]


def logit_best() -> list[Launch]:
    """Kernel of LOGIT_BEST: one block, the best of the parts' best."""

    def kernel(tid, n_thread, ids, values, sums, best_ids, best_values, total, n_best, n_part):
        if tid == 0:
            write_best_of(values, 0, n_best * n_part, n_best, best_ids)
            for i in range(thread(), n_best, THREADS):
                at = load_i32(best_ids + 4 * i)
                store_f32(best_values + 4 * i, load_f32(values + 4 * at))
                store_i32(best_ids + 4 * i, load_i32(ids + 4 * at))
            top, exps = float32(LOWEST), float32(0)
            for p in range(thread(), n_part, THREADS):
                top = max(top, load_f32(sums + 8 * p))
            top = block_max(top)
            for p in range(thread(), n_part, THREADS):
                own = load_f32(sums + 8 * p) - top
                exps += load_f32(sums + 8 * p + 4) * exp2(own * float32(LOG2_E))
            exps = block_sum(exps)
            if thread() == 0:
                store_f32(total, top)
                store_f32(total + 4, exps)

    return [Launch(kernel)]
