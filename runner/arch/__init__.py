"""Architectures: one file each, named as GGUF files name the architecture."""
