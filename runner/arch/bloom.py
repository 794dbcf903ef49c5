"""BLOOM: ALiBi instead of rotary positions, normed embeddings, biases everywhere."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    norm="layer",
    norm_embedding="weighted",
    gated=False,
    activation="gelu",
    nope_every=1,
    derived=lambda hp: {"max_alibi_bias": 8.0},
)
