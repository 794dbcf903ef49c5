"""Granite 3 and 4, dense: like llama, with scales of embeddings, scores, residuals and logits."""

from tamis.model.arch import Arch

SCALES = "attention.scale", "residual_scale", "embedding_scale", "logit_scale"
ARCH = Arch(
    neox=False,
    long_factors=True,
    keys=(*SCALES, "rope.scaling.finetuned"),
    refused=("deepstack_mapping",),
    derived=lambda hp: {"logit_scale": 1 / hp.logit_scale},
)
