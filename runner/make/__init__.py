"""Making of GGUF files: converted from safetensors, split, merged, edited, quantized."""
