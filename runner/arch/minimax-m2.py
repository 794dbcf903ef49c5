"""MiniMax-M2: norms of all heads together, a bias that chooses experts."""

from tamis.model.arch import Arch

# llama.cpp has the experts' width from feed_forward_length, whatever else the file says.
ARCH = Arch(
    neox=True,
    keys=("expert_gating_func",),
    derived=lambda hp: {"n_ff_expert": hp.n_ff},
)
