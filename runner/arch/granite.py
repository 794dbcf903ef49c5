"""Granite 3 and 4, dense: as llama, embeddings, scores, residuals and logits have scales."""

from tamis.model.arch import Arch

SCALES = "attention.scale", "residual_scale", "embedding_scale", "logit_scale"
ARCH = Arch(
    neox=False,
    long_factors=True,
    keys=(*SCALES, "rope.scaling.finetuned"),
    refused=("deepstack_mapping",),
    derived=lambda hp: {"logit_scale": 1 / hp.logit_scale},
)
