"""Linear layers on the CPU: dequantization, packed activations, matrix products, experts, norms."""
