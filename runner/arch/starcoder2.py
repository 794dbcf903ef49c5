"""StarCoder 2: LayerNorm, biases everywhere, a plain GELU."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm="layer", gated=False, activation="gelu", rope_factors=False)
