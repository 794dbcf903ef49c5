"""File formats: GGUF, the ggml block types and their NumPy decoders."""
