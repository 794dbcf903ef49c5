"""Qwen2 and Qwen2.5: like llama, with biases on q, k and v."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True)
