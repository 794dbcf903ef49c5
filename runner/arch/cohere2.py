"""Command-R7B and A: parallel parts; only sliding-window layers have rotary positions."""

from tamis.graph.layer import parallel
from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    norm="layer",
    layer=parallel,
    keys=("logit_scale", "attention.sliding_window_pattern"),
    full_attention_every=4,
    nope_full=True,
    window_scaled=True,
)
