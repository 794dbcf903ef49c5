"""Qwen3 mixture of experts: the feed-forward part is a weighted sum of the chosen experts."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, shared_ff=True)
