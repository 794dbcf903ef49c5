"""EXAONE 4: norms after the parts; the 32B model has windows, and no positions without one."""

from typing import Any

from tamis.graph.layer import post_normed
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: only the model of 64 layers has a window, despite others' keys."""
    return {"sliding_window": (hp.sliding_window or 4096) if hp.n_layer == 64 else 0}


ARCH = Arch(
    neox=True,
    layer=post_normed,
    full_attention_every=4,
    window_scaled=True,
    keys=("attention.sliding_window_pattern",),
    derived=_derived,
    facts=lambda hp: {"nope_full": hp.sliding_window > 0},
)
