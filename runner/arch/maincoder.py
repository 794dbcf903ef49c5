"""Maincoder: like llama; heads of q and k are normed after rotation."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, norm_after_rope=True)
