"""Hunyuan V3: dense first layers, a shared expert, a bias that chooses experts."""

from tamis.model.arch import Arch

# Where a layer has experts, a dense part that the file has too is not read.
ARCH = Arch(
    neox=True,
    shares_expert=True,
    shared_ff=True,
    score_experts="sigmoid",
    keys=("expert_weights_scale", "expert_weights_norm", "expert_gating_func"),
    unread=("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
)
