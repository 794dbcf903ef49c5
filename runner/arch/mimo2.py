"""MiMo-V2-Flash: attention sinks, sliding-window layers, a bias in the selection of experts."""

from tamis.model.arch import Arch

# In a layer with experts, a dense part of the file is not read; nor are biases.
ARCH = Arch(
    neox=True,
    score_experts="sigmoid",
    keys=("attention.head_count", "attention.sliding_window_pattern", "rope.freq_base_swa"),
    refused=("attention.value_scale",),
    unread=(
        *("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
        *("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    ),
)
