"""Mistral 3 (Ministral): as llama; queries grow with each original context that lies before."""

from typing import Any

from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def _derived(hp: HParams) -> dict[str, Any]:
    _, scale, offset = hp.temperature
    return {"temperature": (hp.n_ctx_orig, scale, offset)} if scale else {}


ARCH = Arch(
    neox=False,
    derived=_derived,
    keys=("attention.temperature_scale", "rope.scaling.original_context_length"),
)
