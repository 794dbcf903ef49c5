"""RWKV-7's scan: threads share the columns of the heads' states."""

from typing import Any

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_i64
from tamis.jit_kernels.cpu.lang.simd import LANES, broadcast_f, fma, load_f, store_f, zero_f


def wkv(head: int) -> Any:
    """Kernel of WKV: threads stride over vectors of columns."""
    if head % LANES:
        raise ValueError(f"head is {head}, expected a multiple of {LANES}")
    n_part, size = head // LANES, 4 * head

    def kernel(tid, n_thread, a):
        n_tok = load_i64(a.step + STEP.n_tok)
        for item in range(tid, a.n_head * n_part, n_thread):
            h, column = item // n_part, 4 * LANES * (item % n_part)
            columns, own = a.state + size * head * h + column, a.u + size * h
            for t in range(n_tok):
                at = size * (a.n_head * t + h)
                value, erased = load_f(a.v + at + column), zero_f()
                for i in range(head):
                    erased = fma(broadcast_f(a.a + at + 4 * i), load_f(columns + size * i), erased)
                found, weight = zero_f(), zero_f()
                for i in range(head):
                    row, j = columns + size * i, at + 4 * i
                    key, query = broadcast_f(a.k + j), broadcast_f(a.r + j)
                    new = fma(key, value, load_f(row) * broadcast_f(a.w + j))
                    new = new - broadcast_f(a.b + j) * erased
                    store_f(row, new)
                    found = fma(query, new, found)
                    weight = fma(query * broadcast_f(own + 4 * i), key, weight)
                store_f(a.y + at + column, found)
                store_f(a.bonus + at + column, weight * value)

    return kernel
