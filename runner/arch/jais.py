"""Jais: ALiBi instead of rotary positions, LayerNorm, biases everywhere."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    norm="layer",
    nope_every=1,
    keys=("attention.max_alibi_bias",),
    derived=lambda hp: {"attention_scale": 1 / hp.head_dim},
)
