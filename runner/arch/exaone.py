"""EXAONE 3: like llama, with rotary pairs half a head apart."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True)
