"""Nomic Embed: BERT with rotary positions and gates."""

from tamis.graph.encoder import encoder_layer
from tamis.model.arch import Arch

ARCH = Arch(neox=True, is_encoder=True, norm="layer", layer=encoder_layer)
