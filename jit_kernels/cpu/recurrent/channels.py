"""The split of a recurrent layer's channels over threads."""

from numba import njit

from tamis.jit_kernels.cpu.lang.simd import LANES


@njit(error_model="numpy")
def channels(tid, n_thread, n):
    """A thread's channels first .. last - 1 of n, and the end of their whole vectors."""
    n_vector = (n + LANES - 1) // LANES
    first = LANES * (n_vector * tid // n_thread)
    last = min(n, LANES * (n_vector * (tid + 1) // n_thread))
    return first, first + (last - first) // LANES * LANES, last
