"""Compilation of kernels: processes that compile, object code in memory and on disk, checks."""
