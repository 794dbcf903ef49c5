"""BERT, MiniLM, BGE, E5: an encoder with learned positions, norms after each part, a plain GELU."""

from tamis.graph.encoder import encoder_layer
from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    is_encoder=True,
    norm="layer",
    gated=False,
    activation="gelu_erf",
    nope_every=1,
    positions="all",
    layer=encoder_layer,
)
