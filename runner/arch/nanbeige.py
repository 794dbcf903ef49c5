"""Nanbeige: like llama."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, refused=("num_loops",))
