"""DeepSeek-V2, V3 and R1, GLM-4.7-Flash, Kimi-K2: latent attention, groups of experts."""

from typing import Any

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.latent import latent_attention, latent_tensors, yarn_scaled
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, latent_attention(g, il, norm(g, g.x, w.attn_norm)))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


def _facts(hp: HParams) -> dict[str, Any]:
    """The facts of a file.

    GLM-4.7-Flash routes by another score than the first files, which name none.
    """
    is_glm = hp.n_layer in (47, 48) and hp.n_vocab == 154880
    return {"score_experts": "sigmoid" if is_glm else "softmax"}


ARCH = Arch(
    neox=False,
    layer=layer,
    tensors=latent_tensors,
    derived=yarn_scaled,
    facts=_facts,
    keys=(
        "attention.kv_lora_rank",
        "rope.scaling.yarn_log_multiplier",
        "attention.temperature_scale",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
