"""Mistral 3 (Ministral): as llama."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, refused=("attention.temperature_scale",))
