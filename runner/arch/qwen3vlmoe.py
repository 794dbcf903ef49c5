"""Qwen3-VL mixture of experts' text model: the rotary sections of text are equal."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    interleaved_sections=True,
    shared_ff=True,
    keys=("rope.dimension_sections",),
)
