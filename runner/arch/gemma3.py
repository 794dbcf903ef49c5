"""Gemma 3: five sliding-window layers to each full one, norms before and after each part."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    activation="gelu",
    scale_embedding=True,
    full_attention_every=6,
    rope_base_window=10000.0,
)
