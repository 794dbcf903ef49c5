"""Ops of Delta attention that only write a few numbers."""

from typing import Any

from tamis.jit_kernels.contract.op import BEGIN, END, N_TOK, POS, ROW


def delta_rows() -> Any:
    """Kernel of DELTA_ROWS: one worker writes the two step records."""

    def kernel(worker, n_worker, a):
        if worker != 0:
            return
        n_tok, pos, begin = a.step[N_TOK], a.step[POS], a.step[BEGIN]
        last_pos = max(begin, a.step[END] - a.gamma)
        first = begin + (pos - begin + a.gamma - 1) // a.gamma * a.gamma
        stop = min(pos + n_tok, last_pos)
        a.apart[N_TOK] = max(0, (stop - first + a.gamma - 1) // a.gamma)
        a.apart[POS] = first
        a.apart[ROW] = first - pos
        first = max(pos, last_pos)
        a.last[N_TOK] = max(0, pos + n_tok - first)
        a.last[POS] = first
        a.last[ROW] = first - pos

    return kernel
