"""The content of a model file: hyperparameters, tensors by name, RoPE frequencies, placement."""
