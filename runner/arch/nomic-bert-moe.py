"""Nomic Embed 2: BERT with rotary positions, a mixture of experts in every second layer."""

from tamis.graph.encoder import encoder_layer
from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    is_encoder=True,
    norm="layer",
    gated=False,
    activation="gelu_erf",
    normalize_experts=False,
    layer=encoder_layer,
    derived=lambda hp: {"n_ff_expert": hp.n_ff},  # files have no key for it
)
