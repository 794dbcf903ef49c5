"""Qwen3-VL mixture of experts, its text: sections of rotary positions are the same one."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, refused=("n_deepstack_layers",))
