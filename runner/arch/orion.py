"""Orion: like llama, with LayerNorm."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm="layer")
