"""Ops of the sparse-attention methods on a GPU: each file has the kernels of one method."""
