"""What CPU kernels are written in: addresses, SIMD vectors, register tiles, work sharing."""
