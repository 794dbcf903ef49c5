"""Qwen1.5 and Qwen2 mixtures of experts: a shared expert with a gate beside the chosen ones."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, shared_ff=True, normalize_experts=False)
