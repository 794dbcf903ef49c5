"""Ling (Bailing) mixture of experts: shared experts beside the chosen ones."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    keys=("expert_weights_scale", "expert_weights_norm"),
)
