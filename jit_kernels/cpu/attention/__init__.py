"""Attention on the CPU: RoPE and append, flash attention over a Selection, score products."""
