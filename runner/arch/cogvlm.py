"""CogVLM, its text: as llama; the experts of images are not read."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    rope_factors=False,
    unread=(
        "vis_attn_qkv.weight",
        "vis_attn_output.weight",
        "vis_gate.weight",
        "vis_up.weight",
        "vis_down.weight",
    ),
)
