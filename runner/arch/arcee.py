"""Arcee AFM: like llama, with a squared ReLU instead of a gate."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, gated=False, activation="relu2")
