"""Which channels of a recurrent layer are a thread's."""

from numba import njit

from tamis.jit_kernels.cpu.lang.simd import LANES


@njit(error_model="numpy")
def channels(tid, n_thread, n):
    """The channels first .. last - 1 of n that are a thread's, and where whole vectors end."""
    n_vector = (n + LANES - 1) // LANES
    first = LANES * (n_vector * tid // n_thread)
    last = min(n, LANES * (n_vector * (tid + 1) // n_thread))
    return first, first + (last - first) // LANES * LANES, last
