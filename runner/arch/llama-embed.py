"""Llama-Embed-Nemotron: llama with attention in both directions."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, is_encoder=True, unread=("output.weight",))
