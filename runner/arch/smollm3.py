"""SmolLM3: like llama; every fourth layer has no rotary positions."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, nope_every=4)
