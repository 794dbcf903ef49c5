"""Phi 3.5 mixtures of experts: as phi3, biases everywhere, experts."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, rope_factors=False, long_factors=True, norm_bias=True)
