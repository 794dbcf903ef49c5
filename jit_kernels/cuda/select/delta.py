"""DELTA_ADD: rows between exact ones get the difference of the last exact one."""

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import (
    load_f32,
    load_i64,
    quotient,
    remainder,
    store_f32,
    store_i64,
)


def delta_add(head_dim: int) -> list[Launch]:
    """Kernels of DELTA_ADD: first rows between exact rows, which they read, then the exact."""

    def between(tid, n_thread, a):
        pos, begin = load_i64(a.step + STEP.pos), load_i64(a.step + STEP.begin)
        sparse = load_i64(a.step + STEP.n_tok) - load_i64(a.last + STEP.n_tok)
        first, size = load_i64(a.apart + STEP.row), a.n_head * head_dim
        n = sparse * size if a.recompute == 0 else 0
        for i in range(tid * THREADS + thread(), n, n_thread * THREADS):
            t, e = quotient(i, size), remainder(i, size)
            after = remainder(pos + t - begin, a.gamma)  # rows since the last exact one
            if after == 0:
                continue
            g, to = t - after, a.out + 4 * i
            if g >= 0:
                exact = load_f32(a.apart_out + 4 * (size * quotient(g - first, a.gamma) + e))
                store_f32(to, load_f32(to) + (exact - load_f32(a.out + 4 * (size * g + e))))
            elif load_i64(a.delta_pos + 8 * (e // head_dim)) == pos + g:
                store_f32(to, load_f32(to) + load_f32(a.delta + 4 * e))

    def exact(tid, n_thread, a):
        n_apart, n_last = load_i64(a.apart + STEP.n_tok), load_i64(a.last + STEP.n_tok)
        first = load_i64(a.apart + STEP.row)
        tail = load_i64(a.last + STEP.row)
        size = a.n_head * head_dim
        for i in range(tid * THREADS + thread(), (n_apart + n_last) * size, n_thread * THREADS):
            r, e = quotient(i, size), remainder(i, size)
            if r >= n_apart:
                to = a.out + 4 * (size * (tail + r - n_apart) + e)
                store_f32(to, load_f32(a.last_out + 4 * (size * (r - n_apart) + e)))
                continue
            to = a.out + 4 * (size * (first + a.gamma * r) + e)
            dense = load_f32(a.apart_out + 4 * i)
            if r == n_apart - 1:
                store_f32(a.delta + 4 * e, dense - load_f32(to))
                if e % head_dim == 0:
                    at = load_i64(a.step + STEP.pos) + first + a.gamma * r
                    store_i64(a.delta_pos + 8 * (e // head_dim), at)
            store_f32(to, dense)

    return [Launch(between, blocks=4), Launch(exact)]
