"""MiniCPM3: latent attention, with scales of embeddings, residuals and logits."""

from typing import Any

from tamis.arch.deepseek2 import layer
from tamis.graph.mixers.latent import key_scaled, latent_tensors
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: scales for which files have no key."""
    return key_scaled(hp) | {
        "embedding_scale": 12.0,
        "residual_scale": 1.4 / hp.n_layer**0.5,
        "logit_scale": 256 / hp.n_embd,
    }


ARCH = Arch(
    neox=True,
    long_factors=True,
    layer=layer,
    tensors=latent_tensors,
    keys=("attention.kv_lora_rank",),
    derived=_derived,
)
