"""Hunyuan V3: dense first layers, a shared expert, a bias in the selection of experts."""

from tamis.model.arch import Arch

# In a layer with experts, a dense part of the file is not read.
ARCH = Arch(
    neox=True,
    shares_expert=True,
    shared_ff=True,
    score_experts="sigmoid",
    keys=("expert_weights_scale", "expert_weights_norm", "expert_gating_func"),
    unread=("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
)
