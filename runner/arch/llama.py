"""Llama 2 and 3, Mistral, SmolLM2, TinyLlama: RoPE rotates adjacent elements."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False)
