"""OpenELM: like llama, with a norm on each head of q and k; later layers have more heads."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, keys=("attention.head_count",))
