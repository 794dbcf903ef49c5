"""Work sharing of threads: three quarters in even shares, the rest by dynamic scheduling.

Threads of equal speed would best take even shares of all of it. But a core that another program or
another virtual machine uses for a moment is late, and all would wait for it at the barrier.
"""

from numba import njit

from tamis.jit_kernels.cpu.lang.intrinsic import atomic_add, atomic_store

PER_THREAD = 2  # parts of the last quarter


@njit(error_model="numpy")
def take(turn, tid, n_thread, n, turns):
    """The range of n units of work that is a thread's in its turn 0, 1, ...: begin and end.

    When begin is n, nothing is left; every thread must ask until then. An earlier range may be
    empty. turns: the address of the op's count (see layout.TURNS).
    """
    if n_thread == 1 or n == 0:
        return (0, n) if turn == 0 else (n, n)
    rest = (n + 3) // 4
    kept = n - rest
    if turn == 0:
        return kept * tid // n_thread, kept * (tid + 1) // n_thread
    last = PER_THREAD * n_thread
    part = atomic_add(turns, 1)
    if part == last + n_thread - 1:  # every other thread has found nothing left
        atomic_store(turns, 0)
    if part >= last:
        return n, n
    # Parts become smaller towards the end, so that threads end together; the last is never empty.
    left, square = last - part, last * last
    after = (rest * (left - 1) ** 2 + square - 1) // square
    return n - (rest * left * left + square - 1) // square, n - after
