"""EmbeddingGemma: Gemma 3 with attention in both directions, and windows centred on each token."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    is_encoder=True,
    activation="gelu",
    scale_embedding=True,
    full_attention_every=6,
    rope_base_window=10000.0,
    keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
)
