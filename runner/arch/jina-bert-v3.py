"""Jina Embeddings 3: BERT with rotary positions."""

from tamis.graph.encoder import encoder_layer
from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    is_encoder=True,
    norm="layer",
    gated=False,
    activation="gelu_erf",
    layer=encoder_layer,
)
