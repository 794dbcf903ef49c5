"""Ling 2 (Bailing): dense first layers, shared experts, groups and a bias that choose experts."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    # Heads narrower than n_embd / n_head leave its last rows unread.
    tensors=lambda hp: {"attn_qkv": (f"n_embd_qkv|{hp.n_embd + 2 * hp.n_embd_kv}", "n_embd")},
    keys=(
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
