"""The op contract, the recorded program and the kernels of each backend."""
