"""Qwen2-VL, its text: as qwen2, rotary positions of time, height and width are the same one."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, keys=("rope.dimension_sections",), unread=("output.bias",))
