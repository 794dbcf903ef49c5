"""What folders of Hugging Face's models hold: config, tensors, vocabulary; and keys for GGUF."""
