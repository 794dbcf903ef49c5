"""Phi 3 and 4: like llama, with LongRoPE; q, k and v are one matrix, and so are gate and up."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, rope_factors=False, long_factors=True)
