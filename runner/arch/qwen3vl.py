"""Qwen3-VL's text model: the rotary sections of text are equal."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    interleaved_sections=True,
    keys=("rope.dimension_sections",),
)
