"""Ling 3 (Bailing): Kimi Delta Attention with bounded decays, gated latent attention, experts."""

from typing import Any

from tamis.graph.context import Graph
from tamis.graph.kda import UNREAD, kda, kda_tensors
from tamis.graph.latent import latent_attended, yarn_scaled
from tamis.graph.layer import feed_forward
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.norm import add, norm
from tamis.graph.recurrent import Part, gated
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, kda(g, il, h) if il in g.hp.recurrent else _gated_latent(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


def _gated_latent(g: Graph, il: int, h: Source) -> Product:
    """Latent attention whose heads have an output gate each."""
    w, n_head, n = g.weights(il), g.hp.n_head, g.hp.latent.n_value
    (gate,) = linears(g, h, w.attn_gate)
    out = latent_attended(g, il, h)
    gates, heads = Part(gate, 0, 1, n_head, 1), Part(out, 0, n, n_head, n)
    return linear(g, gated(g, "gated_att", gates, "sigmoid", heads), w.attn_output)


def _tensors(hp: HParams) -> dict[str, tuple[int | str, ...]]:
    return {**kda_tensors(hp), "attn_gate": (hp.n_head, hp.n_embd)}


def _facts(hp: HParams) -> dict[str, Any]:
    """Sections of rotary positions have pairs half their width apart."""
    return {"neox": sum(hp.rope_sections) > 0}


ARCH = Arch(
    neox=False,
    layer=layer,
    tensors=_tensors,
    unread=UNREAD,
    derived=yarn_scaled,
    facts=_facts,
    keys=(
        "rope.dimension_sections",
        "attention.kv_lora_rank",
        "kda.gate_lower_bound",
        "swiglu_clamp_exp",
        "swiglu_clamp_shexp",
        "expert_shared_count",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
