"""NeoBERT: like llama, with attention in both directions; the last norm has its own name."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, is_encoder=True)
