"""Ling (Bailing) mixture of experts: shared experts in addition to the routed ones."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    keys=("expert_weights_scale", "expert_weights_norm"),
)
