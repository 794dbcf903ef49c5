"""Attention on a GPU: decode, prefill by mma or wgmma, RoPE and append, score products."""
