"""What a model file holds: hyperparameters, tensors by name, RoPE frequencies, placement."""
