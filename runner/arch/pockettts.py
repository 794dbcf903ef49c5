"""Pocket TTS's language model: LayerNorm, a plain GELU."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, norm="layer", gated=False, activation="gelu")
