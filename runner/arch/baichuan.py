"""Baichuan: as llama; of 40 layers, the 13B model's, scores fall with distance (ALiBi) instead."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    facts=lambda hp: {"nope_every": 0 if hp.n_layer == 32 else 1},
    derived=lambda hp: {"max_alibi_bias": 8.0 if hp.n_layer == 40 else 0.0},
)
