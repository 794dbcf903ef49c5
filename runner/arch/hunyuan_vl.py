"""Hunyuan-VL, its text: as hunyuan-dense, rotary positions of time, height and width are one."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm_after_rope=True, keys=("rope.dimension_sections",))
