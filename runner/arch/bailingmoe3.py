"""Ling 3 (Bailing): Kimi Delta Attention with bounded decays, gated latent attention, experts."""

from typing import Any

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.kda import UNREAD, kda, kda_tensors
from tamis.graph.mixers.latent import gated_latent_attention, key_scaled
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, kda(g, il, h) if il in g.hp.recurrent else gated_latent_attention(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


def _facts(hp: HParams) -> dict[str, Any]:
    """The facts of a file: rotary pairs of sections are half the rotary width apart."""
    return {"neox": sum(hp.rope_sections) > 0}


ARCH = Arch(
    neox=False,
    layer=layer,
    tensors=kda_tensors,
    unread=UNREAD,
    derived=key_scaled,
    facts=_facts,
    keys=(
        "rope.dimension_sections",
        "attention.kv_lora_rank",
        "kda.gate_lower_bound",
        "swiglu_clamp_exp",
        "swiglu_clamp_shexp",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
