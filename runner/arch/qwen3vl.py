"""Qwen3-VL, its text: rotary sections of text are one."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    interleaved_sections=True,
    keys=("rope.dimension_sections",),
    refused=("n_deepstack_layers",),
)
