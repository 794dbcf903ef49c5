"""Architectures: one small frozen record a file, found by its GGUF name."""
