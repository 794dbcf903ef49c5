"""GLM-5-Next: residual streams, Kimi Delta Attention, latent attention with an index of blocks."""

from collections.abc import Mapping
from typing import Any

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.kda import UNREAD, kda, kda_tensors
from tamis.graph.mixers.latent import latent_attention
from tamis.graph.norm import norm
from tamis.graph.streams import (
    begin_streams,
    read_mean,
    read_streams,
    stream_tensors,
    write_streams,
)
from tamis.model.arch import Arch
from tamis.model.hparams import HParams

LENGTH_EPS = 1e-6  # epsilon of the lengths of Kimi Delta Attention's queries and keys


def layer(g: Graph, il: int) -> None:
    """Record layer il; g.x is the input of its parts, and after the last layer that of the head."""
    w = g.weights(il)
    if il == 0:
        begin_streams(g)
    own = read_streams(g, w.hc_attn_fn, w.hc_attn_scale, w.hc_attn_base)
    h = norm(g, g.x, w.attn_norm)
    if il in g.hp.recurrent:
        write_streams(g, own, kda(g, il, h, negated=True, eps=LENGTH_EPS))
    else:
        write_streams(g, own, latent_attention(g, il, h))
    own = read_streams(g, w.hc_ffn_fn, w.hc_ffn_scale, w.hc_ffn_base)
    write_streams(g, own, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))
    if il == g.hp.n_layer - 1:
        read_mean(g)


def _tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    return {**kda_tensors(hp), **stream_tensors(hp, combined=True)}


def _derived(hp: HParams) -> dict[str, Any]:
    return {"attention_scale": hp.latent.n_key**-0.5}


ARCH = Arch(
    neox=False,
    nope_every=1,
    layer=layer,
    tensors=_tensors,
    unread=UNREAD,
    derived=_derived,
    score_experts="sigmoid",
    clamp="before",
    one_device=True,
    nonzero=("attention.indexer.kpool_select_tail",),
    keys=(
        "attention.kv_lora_rank",
        "attention.indexer.top_k",
        "attention.indexer.kpool",
        "kda.gate_lower_bound",
        "hyper_connection.count",
        "swiglu_clamp_exp",
        "swiglu_clamp_shexp",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
