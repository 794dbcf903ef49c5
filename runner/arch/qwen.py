"""Qwen: one fused QKV matrix with biases."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, derived=lambda hp: {"n_ff": hp.n_ff // 2})
