"""NeoBERT: as llama, tokens see each other; the last norm has a name of its own."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, is_encoder=True)
