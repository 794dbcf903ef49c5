"""Baichuan: like llama; the 13B model, of 40 layers, has ALiBi instead of rotary positions."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    facts=lambda hp: {"nope_every": 0 if hp.n_layer == 32 else 1},
    derived=lambda hp: {"max_alibi_bias": 8.0 if hp.n_layer == 40 else 0.0},
)
