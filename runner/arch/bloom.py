"""BLOOM: scores fall with distance (ALiBi), embeddings are normed, biases everywhere."""

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
