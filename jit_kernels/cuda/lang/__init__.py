"""Lang."""
