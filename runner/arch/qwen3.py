"""Qwen3: a norm on each head of q and k, no biases."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True)
