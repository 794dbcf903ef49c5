"""Pangu Embedded: like llama, with biases on attention."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, rope_factors=False)
