"""Architectures: one file each, found by its GGUF name."""
