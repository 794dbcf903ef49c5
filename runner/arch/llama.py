"""Llama 2 and 3, Mistral, SmolLM2, TinyLlama: rotary pairs lie side by side."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False)
