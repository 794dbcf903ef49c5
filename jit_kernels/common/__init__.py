"""Kernels that both backends run, and the Views that they use."""
