"""Nemotron NAS (DeciLM), of layers that are all alike: as llama."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False)
