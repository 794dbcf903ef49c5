"""OLMoE: one norm across all heads of queries, and one across those of keys."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, normalize_experts=False)
