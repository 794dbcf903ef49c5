"""OpenELM: as llama, a norm on each head of q and k."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True)
