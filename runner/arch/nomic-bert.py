"""Nomic Embed: BERT with rotary positions and gates."""

from tamis.graph.encoder import encoder_layer
from tamis.model.arch import Arch

# llama.cpp loads biases of the feed-forward part, but does not add them.
ARCH = Arch(
    neox=True,
    is_encoder=True,
    norm="layer",
    layer=encoder_layer,
    unread=("ffn_up.bias", "ffn_down.bias"),
)
