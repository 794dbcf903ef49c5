"""GPT-2: learned positions, LayerNorm, biases everywhere, a plain GELU."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, norm="layer", gated=False, activation="gelu", nope_every=1, positions="all")
