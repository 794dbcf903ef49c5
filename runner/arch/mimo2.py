"""MiMo-V2-Flash: attention sinks, layers with a window, a bias that chooses experts."""

from tamis.model.arch import Arch

# Where a layer has experts, a dense part that the file has too is not read; nor are biases.
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
