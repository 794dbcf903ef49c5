"""MiniMax-M2: one norm across all heads, a bias in the selection of experts."""

from tamis.model.arch import Arch

# llama.cpp takes the experts' width from feed_forward_length, whatever other keys say.
ARCH = Arch(
    neox=True,
    keys=("expert_gating_func",),
    derived=lambda hp: {"n_ff_expert": hp.n_ff},
)
