"""StarCoder, SantaCoder: like gpt2."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, norm="layer", gated=False, activation="gelu", nope_every=1, positions="all")
