"""InternLM 2: like llama."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False)
