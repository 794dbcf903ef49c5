"""Hunyuan-VL's text model: like hunyuan-dense; positions of time, height and width are equal."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm_after_rope=True, keys=("rope.dimension_sections",))
