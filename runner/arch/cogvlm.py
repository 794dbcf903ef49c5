"""CogVLM's text model: like llama; the experts for images are not read."""

from typing import Any

from tamis.model.arch import Arch
from tamis.model.hparams import HParams, RopeScaling, UnsupportedKey
from tamis.model.weights import THIRDS


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: heads are rotated whole.

    Raises UnsupportedKey for positions that llama.cpp does not have.
    """
    if hp.rope_base != 10000.0:
        raise UnsupportedKey("rope.freq_base", f"is {hp.rope_base}, expected 10000")
    if hp.rope_scaling != RopeScaling():
        raise UnsupportedKey("rope.scaling.type", f"is {hp.rope_scaling.kind}, expected none")
    return {"n_rot": hp.head_dim}


ARCH = Arch(
    neox=True,
    derived=_derived,
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
