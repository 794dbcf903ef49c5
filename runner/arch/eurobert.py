"""EuroBERT: as llama, tokens see each other."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, is_encoder=True)
