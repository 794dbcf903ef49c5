"""Qwen3-VL, its text: all sections of its rotary positions are the same one."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, refused=("n_deepstack_layers",))
