"""Refact: like llama, with ALiBi instead of rotary positions."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    rope_factors=False,
    unread=("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
    nope_every=1,
    refused=("expert_count",),
    derived=lambda hp: {"max_alibi_bias": 8.0},
)
