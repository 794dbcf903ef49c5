"""Hunyuan, dense: as llama; heads of q and k are normed after they are rotated."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, norm_after_rope=True)
