"""Dynamic work sharing: every item is done once, whichever threads are fast."""

import numpy as np
import pytest

from tamis.jit_kernels.cpu.lang.work_sharing import take


@pytest.mark.parametrize("n_thread", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 18, 1000])
def test_every_unit_is_taken_once_and_the_count_is_zero_again(n, n_thread):
    rng, turns = np.random.default_rng(n), np.zeros(1, np.int64)
    for _ in range(20):
        speed = rng.dirichlet(np.ones(n_thread))
        turn, taken, busy = [0] * n_thread, np.zeros(n, int), list(range(n_thread))
        while busy:
            weight = speed[busy] + 1e-9
            tid = int(rng.choice(busy, p=weight / weight.sum()))
            begin, end = take(turn[tid], tid, n_thread, n, turns.ctypes.data)
            turn[tid] += 1
            assert 0 <= begin <= end <= n
            taken[begin:end] += 1
            if begin == n:
                busy.remove(tid)
        assert (taken == 1).all()
        assert turns[0] == 0


def test_a_slow_thread_does_no_more_than_its_share_of_three_quarters():
    turns = np.zeros(1, np.int64)
    first = take(0, 0, 2, 800, turns.ctypes.data)
    quick = [take(turn, 1, 2, 800, turns.ctypes.data) for turn in range(6)]
    assert first == (0, 300)
    assert sum(end - begin for begin, end in quick) == 500
    assert take(1, 0, 2, 800, turns.ctypes.data) == (800, 800)
