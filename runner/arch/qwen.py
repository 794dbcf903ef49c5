"""Qwen: one fused QKV matrix with biases."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    derived=lambda hp: {"n_ff": hp.n_ff // 2},
    # If there are fewer KV heads than query heads, its last rows are not read.
    tensors=lambda hp: {"attn_qkv": ("n_embd_qkv|3*n_embd", "n_embd")},
)
