"""What CUDA kernels are written in: addresses, warps and blocks, PTX, register tiles."""
