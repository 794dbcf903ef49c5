"""ERNIE 4.5 mixture of experts: dense first layers, shared experts, a bias that chooses experts."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False, keys=("expert_weights_scale",), unread=("attn_output.bias",))
