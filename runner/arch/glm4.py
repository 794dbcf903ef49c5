"""GLM-4: norms before and after each part; gate and up are one matrix."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    keys=("rope.dimension_sections",),
    facts=lambda hp: {"neox": sum(hp.rope_sections) > 0},
)
