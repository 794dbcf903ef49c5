"""DeepSeek (V1) mixture of experts: dense first layers, shared experts beside routed ones."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    normalize_experts=False,
    keys=("expert_weights_scale",),
)
