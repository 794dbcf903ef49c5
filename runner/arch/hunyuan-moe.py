"""Hunyuan mixture of experts: heads are normed after rotation; a shared expert."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    norm_after_rope=True,
    derived=lambda hp: {"n_ff_expert": hp.n_ff},  # whatever the file's own key says
)
