"""EuroBERT: like llama, with attention in both directions."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, is_encoder=True)
