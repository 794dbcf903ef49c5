"""MiniMax-M2: norms of all heads together, a bias that chooses experts."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, keys=("expert_gating_func",))
