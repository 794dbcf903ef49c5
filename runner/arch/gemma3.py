"""Gemma 3: five sliding-window layers to each full one, norms before and after each part."""

from typing import Any

from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: the scale of queries is n ** -0.5.

    n is n_embd / n_head in the 27B model (62 layers), head_dim in others.
    """
    return {"attention_scale": (hp.n_embd // hp.n_head) ** -0.5} if hp.n_layer == 62 else {}


ARCH = Arch(
    neox=True,
    activation="gelu",
    scale_embedding=True,
    full_attention_every=6,
    rope_base_window=10000.0,
    keys=("attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping"),
    derived=_derived,
)
