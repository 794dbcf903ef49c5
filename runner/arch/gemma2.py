"""Gemma 2: soft-capped scores and logits, norms around each part, alternating windows."""

from typing import Any

from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: the 27B model (46 layers) scales queries by n_embd / n_head."""
    scale = (hp.n_embd // hp.n_head) ** -0.5 if hp.n_layer == 46 else 0.0
    return {
        "attention_scale": scale,
        "attention_softcap": hp.attention_softcap or 50.0,
        "logit_softcap": hp.logit_softcap or 30.0,
        "sliding_window": hp.sliding_window or 4096,
    }


ARCH = Arch(
    neox=True,
    activation="gelu",
    scale_embedding=True,
    full_attention_every=2,
    window_scaled=True,
    keys=(
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ),
    derived=_derived,
)
