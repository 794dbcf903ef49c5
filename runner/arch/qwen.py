"""Qwen: one fused QKV matrix with biases."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    derived=lambda hp: {"n_ff": hp.n_ff // 2},
    # Fewer heads of keys than of queries leave its last rows unread.
    tensors=lambda hp: {"attn_qkv": ("n_embd_qkv|3*n_embd", "n_embd")},
)
