"""OLMo: LayerNorm without weights; Q, K and V are clamped."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, norm="layer", weighted=False, keys=("attention.clamp_kqv",))
