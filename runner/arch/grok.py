"""Grok: soft-capped scores, a dense part beside the experts, norms around each part."""

from typing import Any

from tamis.graph.context import Graph
from tamis.graph.experts import experts
from tamis.graph.layer import self_attention
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, mapped, norm, norm_of, record_norm, summed
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, norm_of(g, self_attention(g, il, norm(g, g.x, w.attn_norm)), w.attn_output_norm))

    x = record_norm(g, norm(g, g.x, w.ffn_norm), g.ws.rows("ffn_norm", g.hp.n_embd))
    out = experts(g, il, x)
    mixed = g.ws.rows("branch", g.hp.n_embd)
    if w.ffn_up:
        summed(g, (mlp(g, x, w), out), mixed)
        mapped(g, mixed, mixed, outer=0.5**0.5)
    else:
        summed(g, out, mixed)
    add(g, norm(g, mixed, w.layer_output_norm or w.post_ffw_norm))


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: defaults of keys that the first files lack."""
    return {
        "attention_scale": hp.attention_scale or 0.08838834764831845,
        "attention_softcap": hp.attention_softcap or 30.0,
        "embedding_scale": hp.embedding_scale or 78.38367176906169,
        "logit_scale": hp.logit_scale or 0.5773502691896257,
    }


ARCH = Arch(
    neox=True,
    activation="gelu",
    layer=layer,
    keys=(
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "attention.output_scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "embedding_scale",
        "logit_scale",
    ),
    refused=("attention.temperature_length",),
    tensors=lambda hp: {"attn_output_norm": (hp.n_embd,), "layer_output_norm": (hp.n_embd,)},
    derived=_derived,
)
