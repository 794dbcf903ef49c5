"""Measurements of `tamis bench` and `tamis perplexity`: time and prediction of methods."""
