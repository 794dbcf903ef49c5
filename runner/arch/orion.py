"""Orion: as llama, norms by mean and variance."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm="layer")
