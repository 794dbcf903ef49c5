"""Nemotron 3 and 4, Minitron: LayerNorm, a squared ReLU, partial rotary positions."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm="layer", gated=False, activation="relu2")
