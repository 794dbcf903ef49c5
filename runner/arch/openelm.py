"""OpenELM: as llama, a norm on each head of q and k; layers have more heads the later they are."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, keys=("attention.head_count",))
