"""CogVLM, its text: as llama; the experts of images are not read."""

from tamis.model.arch import Arch
from tamis.model.weights import THIRDS

ARCH = Arch(
    neox=True,
    rope_factors=False,
    tensors=lambda hp: {"attn_qkv": (THIRDS, "n_embd")},
    unread=(
        "vis_attn_qkv.weight",
        "vis_attn_output.weight",
        "vis_gate.weight",
        "vis_up.weight",
        "vis_down.weight",
    ),
)
