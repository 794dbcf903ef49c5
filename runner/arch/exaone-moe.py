"""EXAONE mixture of experts: rotary positions in sliding-window layers only, a shared expert."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    nope_full=True,
    full_attention_every=4,
    keys=(
        "attention.sliding_window_pattern",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
