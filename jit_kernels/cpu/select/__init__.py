"""Ops of the sparse-attention methods on the CPU, one file a method."""
