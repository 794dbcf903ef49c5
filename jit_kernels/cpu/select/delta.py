"""DELTA_ADD: rows between exact ones get the difference of the last exact one."""

from typing import Any

from tamis.jit_kernels.contract.op import BEGIN, N_TOK, POS, ROW
from tamis.jit_kernels.cpu.lang.simd import LANES, load_f, store_f


def delta_add(head_dim: int) -> Any:
    """Kernel of DELTA_ADD: threads stride over heads, and their rows in order."""
    size = 4 * head_dim

    def kernel(tid, n_thread, a):
        pos, begin, first = a.step[POS], a.step[BEGIN], a.apart[ROW]
        tail, n_last = a.last[ROW], a.last[N_TOK]
        sparse = a.step[N_TOK] - n_last  # rows before the dense end
        for h in range(tid, a.n_head, n_thread):
            own = a.delta[h]
            for t in range(sparse):
                row, g = a.out[t, h], (pos + t - begin) // a.gamma * a.gamma + begin
                if g == pos + t:
                    dense = a.apart_out[(t - first) // a.gamma, h]
                    for d in range(0, size, 4 * LANES):
                        exact = load_f(dense + d)
                        store_f(own + d, exact - load_f(row + d))
                        store_f(row + d, exact)
                    a.delta_pos[h] = g
                elif a.recompute == 0 and a.delta_pos[h] == g:
                    for d in range(0, size, 4 * LANES):
                        store_f(row + d, load_f(row + d) + load_f(own + d))
            for t in range(n_last):
                row, dense = a.out[tail + t, h], a.last_out[t, h]
                for d in range(0, size, 4 * LANES):
                    store_f(row + d, load_f(dense + d))

    return kernel
