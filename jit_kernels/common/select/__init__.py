"""Selection kernels that both backends run."""
