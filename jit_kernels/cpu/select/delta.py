"""Ops of Delta attention: which rows are also attended densely, and what others get from them."""

from typing import Any

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_i64, store_i64
from tamis.jit_kernels.cpu.lang.simd import LANES, load_f, store_f


def delta_rows() -> Any:
    """Kernel of DELTA_ROWS: one thread writes a few numbers."""

    def kernel(tid, n_thread, step, apart, last, gamma):
        if tid != 0:
            return
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        begin, end = load_i64(step + STEP.begin), load_i64(step + STEP.end)
        last_pos = max(begin, end - gamma)
        first = begin + (pos - begin + gamma - 1) // gamma * gamma
        stop = min(pos + n_tok, last_pos)
        store_i64(apart + STEP.n_tok, max(0, (stop - first + gamma - 1) // gamma))
        store_i64(apart + STEP.pos, first)
        store_i64(apart + STEP.row, first - pos)
        first = max(pos, last_pos)
        store_i64(last + STEP.n_tok, max(0, pos + n_tok - first))
        store_i64(last + STEP.pos, first)
        store_i64(last + STEP.row, first - pos)

    return kernel


def delta_add(head_dim: int) -> Any:
    """Kernel of DELTA_ADD: threads take heads in turn, and their rows in order."""
    size = 4 * head_dim

    def kernel(
        tid, n_thread, step, apart, last, apart_out, last_out, delta, delta_pos, out, n_head,
        gamma, recompute,
    ):  # fmt: skip
        pos, begin = load_i64(step + STEP.pos), load_i64(step + STEP.begin)
        first = load_i64(apart + STEP.row)
        tail, n_last = load_i64(last + STEP.row), load_i64(last + STEP.n_tok)
        sparse = load_i64(step + STEP.n_tok) - n_last  # rows before the dense end
        for h in range(tid, n_head, n_thread):
            own, head = delta + size * h, out + size * h
            for t in range(sparse):
                row, g = head + size * n_head * t, (pos + t - begin) // gamma * gamma + begin
                if g == pos + t:
                    dense = apart_out + size * (n_head * ((t - first) // gamma) + h)
                    for d in range(0, size, 4 * LANES):
                        exact = load_f(dense + d)
                        store_f(own + d, exact - load_f(row + d))
                        store_f(row + d, exact)
                    store_i64(delta_pos + 8 * h, g)
                elif recompute == 0 and load_i64(delta_pos + 8 * h) == g:
                    for d in range(0, size, 4 * LANES):
                        store_f(row + d, load_f(row + d) + load_f(own + d))
            for t in range(n_last):
                row = head + size * n_head * (tail + t)
                for d in range(0, size, 4 * LANES):
                    store_f(row + d, load_f(last_out + size * (n_head * t + h) + d))

    return kernel
