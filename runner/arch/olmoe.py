"""OLMoE: norms of all heads of queries, and of keys, together."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, normalize_experts=False)
