"""The vocabulary of CUDA kernels: addresses, warps and blocks, PTX, register tiles."""
