"""Ops of Delta attention: choose the rows with dense attention, add their correction to others."""

from typing import Any

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_i64, store_i64
from tamis.jit_kernels.cpu.lang.simd import LANES, load_f, store_f


def delta_rows() -> Any:
    """Kernel of DELTA_ROWS: one thread writes a few numbers."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        begin, end = load_i64(a.step + STEP.begin), load_i64(a.step + STEP.end)
        last_pos = max(begin, end - a.gamma)
        first = begin + (pos - begin + a.gamma - 1) // a.gamma * a.gamma
        stop = min(pos + n_tok, last_pos)
        store_i64(a.apart + STEP.n_tok, max(0, (stop - first + a.gamma - 1) // a.gamma))
        store_i64(a.apart + STEP.pos, first)
        store_i64(a.apart + STEP.row, first - pos)
        first = max(pos, last_pos)
        store_i64(a.last + STEP.n_tok, max(0, pos + n_tok - first))
        store_i64(a.last + STEP.pos, first)
        store_i64(a.last + STEP.row, first - pos)

    return kernel


def delta_add(head_dim: int) -> Any:
    """Kernel of DELTA_ADD: threads stride over heads, and their rows in order."""
    size = 4 * head_dim

    def kernel(tid, n_thread, a):
        pos, begin = load_i64(a.step + STEP.pos), load_i64(a.step + STEP.begin)
        first = load_i64(a.apart + STEP.row)
        tail, n_last = load_i64(a.last + STEP.row), load_i64(a.last + STEP.n_tok)
        sparse = load_i64(a.step + STEP.n_tok) - n_last  # rows before the dense end
        for h in range(tid, a.n_head, n_thread):
            own, head = a.delta + size * h, a.out + size * h
            for t in range(sparse):
                row, g = head + size * a.n_head * t, (pos + t - begin) // a.gamma * a.gamma + begin
                if g == pos + t:
                    dense = a.apart_out + size * (a.n_head * ((t - first) // a.gamma) + h)
                    for d in range(0, size, 4 * LANES):
                        exact = load_f(dense + d)
                        store_f(own + d, exact - load_f(row + d))
                        store_f(row + d, exact)
                    store_i64(a.delta_pos + 8 * h, g)
                elif a.recompute == 0 and load_i64(a.delta_pos + 8 * h) == g:
                    for d in range(0, size, 4 * LANES):
                        store_f(row + d, load_f(row + d) + load_f(own + d))
            for t in range(n_last):
                row = head + size * a.n_head * (tail + t)
                for d in range(0, size, 4 * LANES):
                    store_f(row + d, load_f(a.last_out + size * (a.n_head * t + h) + d))

    return kernel
