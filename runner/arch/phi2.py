"""Phi 1.5 and 2: parallel parts after one norm, biases everywhere, partial rotary positions."""

from tamis.graph.layer import parallel
from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm="layer", gated=False, activation="gelu", layer=parallel)
