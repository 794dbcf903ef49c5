"""dots.llm1: dense first layers, shared experts, a bias in the selection of experts."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    keys=(
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
