"""Phi 3.5 mixtures of experts: like phi3, with biases everywhere and experts."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, rope_factors=False, long_factors=True, norm_bias=True)
