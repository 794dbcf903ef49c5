"""The shape of GEMM's register tile and of what it reads: panels of weights, blocks of activations.

A tile is MR rows of activations by NR rows of weights. A panel holds DEPTH elements of NR rows of
weights, a block as many of MR rows of activations, in the order in which the tile reads them.
"""

from numba import njit

from tamis.jit_kernels.cpu.lang.register_tiles import NV, load_column, store_grid, transposed
from tamis.jit_kernels.cpu.lang.simd import CPU, LANES, store_f, zero_f

NR = NV * LANES
# The sums, a row of weights and a broadcast fill the registers: 32 of 512 bits, 16 of 256.
MR = 14 if CPU.avx512 else 6
DEPTH = 32
K_BLOCK = 256  # elements decoded together: the longest block of a ggml type
ROW = 4 * (K_BLOCK + LANES)  # bytes from one decoded row of weights to the next
WORD_ROW = 4 * NR  # bytes of one 32-bit word of each row of a panel


@njit(error_model="numpy")
def clear(p, n_bytes):
    """Set n_bytes, a multiple of a vector, to zero."""
    for i in range(0, n_bytes, 4 * LANES):
        store_f(p + i, zero_f())


@njit(error_model="numpy")
def block_at(blocks, slice_size, k, size):
    """The address of the block of elements k .. of some rows; size: bytes of a block."""
    return blocks + slice_size * (k // K_BLOCK) + size * (k % K_BLOCK // DEPTH)


@njit(error_model="numpy")
def transpose_words(rows, panel):
    """Transpose LANES 32-bit words of NR rows, ROW bytes apart, to LANES words of each."""
    for first in range(0, NR, LANES):
        column = load_column(rows + ROW * first, ROW, LANES)
        store_grid(panel + 4 * first, WORD_ROW, transposed(column))


@njit(error_model="numpy")
def share_of(tid, n_thread, n_out, unit):
    """The range of rows of a thread: whole units, as even as possible."""
    n_unit = (n_out + unit - 1) // unit
    return unit * (n_unit * tid // n_thread), min(n_out, unit * (n_unit * (tid + 1) // n_thread))
