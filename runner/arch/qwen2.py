"""Qwen2 and Qwen2.5: as llama with biases on q, k and v."""

from tamis.arch.base import Arch

ARCH = Arch(neox=True)
