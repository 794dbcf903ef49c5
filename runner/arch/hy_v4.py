"""Hunyuan 4: residual streams, gated latent attention, with an indexer in some layers, experts."""

from collections.abc import Mapping
from typing import Any

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.latent import gated_latent_attention, latent_tensors
from tamis.graph.norm import norm
from tamis.graph.streams import begin_streams, read_streams, stream_tensors, write_streams
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il; g.x is the input of its parts, and after the last layer that of the head."""
    w, top = g.weights(il), g.model.weights.top
    if il == 0:
        begin_streams(g)
    own = read_streams(g, w.hc_attn_fn, w.hc_attn_scale, w.hc_attn_base)
    write_streams(g, own, gated_latent_attention(g, il, norm(g, g.x, w.attn_norm)))
    own = read_streams(g, w.hc_ffn_fn, w.hc_ffn_scale, w.hc_ffn_base)
    write_streams(g, own, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))
    if il == g.hp.n_layer - 1:
        read_streams(g, top.output_hc_fn, top.output_hc_scale, top.output_hc_base)


def _tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    return {**latent_tensors(hp), **stream_tensors(hp, combined=False)}


def _derived(hp: HParams) -> dict[str, Any]:
    return {"attention_scale": hp.latent.n_key**-0.5, "index_eps": hp.rms_eps, "index_last": True}


ARCH = Arch(
    neox=False,
    index_neox=False,
    layer=layer,
    tensors=_tensors,
    derived=_derived,
    clamp="before",
    one_device=True,
    keys=(
        "attention.kv_lora_rank",
        "attention.indexer.top_k",
        "hyper_connection.count",
        "swiglu_clamp_exp",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
