"""Mellum: a mixture of experts; three of four layers have a window and unscaled positions."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    shared_ff=True,
    full_attention_every=4,
    keys=("attention.sliding_window_pattern",),
    derived=lambda hp: {"rope_base_swa": hp.rope_base},
)
