"""Making of GGUF files from GGUF files: split, merged, edited, quantized."""
