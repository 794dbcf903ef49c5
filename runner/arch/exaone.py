"""EXAONE 3: as llama, rotary pairs half a head apart."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True)
