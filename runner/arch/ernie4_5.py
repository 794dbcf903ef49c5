"""ERNIE 4.5: like llama, without a bias on the output of attention."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, unread=("attn_output.bias",))
