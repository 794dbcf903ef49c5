"""Qwen2-VL's text model: like qwen2; positions of time, height and width are equal."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, keys=("rope.dimension_sections",), unread=("output.bias",))
