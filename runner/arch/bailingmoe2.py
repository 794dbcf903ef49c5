"""Ling 2 (Bailing): dense first layers, shared experts; groups and a bias select experts."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    # If heads are narrower than n_embd / n_head, its last rows are not read.
    tensors=lambda hp: {"attn_qkv": (f"n_embd_qkv|{hp.n_embd + 2 * hp.n_embd_kv}", "n_embd")},
    keys=(
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
