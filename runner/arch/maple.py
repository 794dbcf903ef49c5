"""Maple: rotary positions in sliding-window layers only, experts with clamped gates."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    nope_full=True,
    window_scaled=True,
    clamp="before",
    keys=(
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "rope.dimension_count_swa",
        "swiglu_clamp_exp",
    ),
)
