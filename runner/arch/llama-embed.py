"""Llama-Embed-Nemotron: llama whose tokens see each other."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, is_encoder=True, unread=("output.weight",))
