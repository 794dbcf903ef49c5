"""The vocabulary of CPU kernels: addresses, SIMD vectors, register tiles, work sharing."""
