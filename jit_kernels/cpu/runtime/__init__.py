"""The CPU runtime: compiler, thread team and roofline kernels."""
