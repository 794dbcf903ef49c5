"""Phi 3 and 4: as llama, rotary frequencies of LongRoPE; q, k, v and gate, up are in one matrix."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, rope_factors=False, long_factors=True)
