"""Pocket TTS, its language model: norms by mean and variance, a plain GELU."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, norm="layer", gated=False, activation="gelu")
