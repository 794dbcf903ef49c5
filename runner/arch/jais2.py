"""Jais 2: LayerNorm, biases everywhere, a squared ReLU."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm="layer", gated=False, activation="relu2")
