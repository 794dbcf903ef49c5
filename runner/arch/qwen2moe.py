"""Qwen1.5 and Qwen2 mixtures of experts: routed experts and a shared one with a gate."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, shared_ff=True, normalize_experts=False)
