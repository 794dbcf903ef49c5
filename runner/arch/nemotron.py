"""Nemotron 3 and 4, Minitron: norms by mean and variance, a squared ReLU, partial rotary."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm="layer", gated=False, activation="relu2")
