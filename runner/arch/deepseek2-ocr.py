"""DeepSeek-OCR's text model: dense first layers, shared experts beside routed ones."""

from typing import Any

from tamis.model.arch import Arch
from tamis.model.hparams import HParams, UnsupportedKey


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: positions are unscaled, with the default base, as in llama.cpp."""
    if hp.rope_scaling.kind != "none":
        raise UnsupportedKey("rope.scaling.type", "is not supported: positions are not stretched")
    if hp.rope_base != 10000.0:
        raise UnsupportedKey("rope.freq_base", f"is {hp.rope_base}, expected 10000")
    return {"n_rot": hp.head_dim}


ARCH = Arch(
    neox=True,
    derived=_derived,
    keys=(
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
