"""MiniCPM: like llama, with scales of embeddings, residuals and logits."""

import math
from typing import Any

from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: scales that the file lacks."""
    return {
        "embedding_scale": hp.embedding_scale or 12.0,
        "residual_scale": hp.residual_scale or 1.4 / math.sqrt(hp.n_layer),
        "logit_scale": 1 / (hp.logit_scale or 256 / hp.n_embd),
    }


ARCH = Arch(
    neox=False,
    long_factors=True,
    keys=("residual_scale", "embedding_scale", "logit_scale"),
    derived=_derived,
)
