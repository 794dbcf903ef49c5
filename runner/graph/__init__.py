"""The forward pass: layers recorded as Programs."""
