"""Kernels that both backends run, and what these are written in."""
