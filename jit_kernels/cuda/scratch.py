"""Sizes of what CUDA kernels need beside their fields; known without Numba."""

DEPTH = 64  # elements of a row that the matrix product holds at a time


def padded(n_in: int) -> int:
    """N_in up to a multiple of DEPTH."""
    return (n_in + DEPTH - 1) // DEPTH * DEPTH


def matmul_scratch(n_in: int, n_out: int) -> int:
    """Bytes of MATMUL's scratch: the weights as float16."""
    return 2 * padded(n_in) * n_out
