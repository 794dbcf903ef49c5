"""DeepSeek-V4: residual streams, attention to a window and to compressed entries, experts."""

from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.compressed import (
    OVERLAPPING,
    compressed_attention,
    compressed_tensors,
)
from tamis.graph.norm import norm
from tamis.graph.streams import begin_streams, read_streams, stream_tensors, write_streams
from tamis.model.arch import Arch
from tamis.model.hparams import LEAST_HEAD_DIM, HParams, UnsupportedKey


def layer(g: Graph, il: int) -> None:
    """Record layer il; g.x is the input of its parts, and after the last layer that of the head."""
    w, top = g.weights(il), g.model.weights.top
    if il == 0:
        begin_streams(g)
    own = read_streams(g, w.hc_attn_fn, w.hc_attn_scale, w.hc_attn_base)
    write_streams(g, own, compressed_attention(g, il, norm(g, g.x, w.attn_norm)))
    own = read_streams(g, w.hc_ffn_fn, w.hc_ffn_scale, w.hc_ffn_base)
    write_streams(g, own, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))
    if il == g.hp.n_layer - 1:
        read_streams(g, top.output_hc_fn, top.output_hc_scale, top.output_hc_base)


def _tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    return {**compressed_tensors(hp), **stream_tensors(hp, combined=True)}


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: the KV cache's heads are one for positions and one for entries.

    All query heads share both. Rows end with an indexer's key. Layers without entries have plain
    rotary frequencies.
    """
    c, scaling = hp.compressed, hp.rope_scaling
    for ratio in c.ratios:
        if ratio not in (0, OVERLAPPING, 128):
            raise UnsupportedKey("attention.compress_ratios", f"has {ratio}, expected 0, 4 or 128")
    # YaRN's factor of the cosines is divided out.
    stretch = 1.0 + 0.1 * log(scaling.factor) if scaling.kind == "yarn" else 1.0
    return {
        "attention_scale": c.width**-0.5,
        "n_head": 2 * c.n_head,
        "n_head_kv": 2,
        "head_dim": -(-(c.width + hp.indexer.n_key) // LEAST_HEAD_DIM) * LEAST_HEAD_DIM,
        "n_rot": hp.n_rot_swa or hp.n_rot,  # all layers have a window
        "indexer": replace(hp.indexer, block=OVERLAPPING),
        "swa_layers": tuple(int(ratio == 0) for ratio in c.ratios),
        "rope_base": c.rope_base,
        "rope_base_swa": hp.rope_base,
        "rope_scaling": replace(scaling, attn_factor=1.0 / stretch),
    }


ARCH = Arch(
    neox=False,
    index_neox=False,
    layer=layer,
    tensors=_tensors,
    derived=_derived,
    clamp="before",
    one_device=True,
    unread=("exp_probs_b_vl.bias",),  # of images
    keys=(
        "hash_layer_count",
        "attention.indexer.top_k",
        "attention.compress_ratios",
        "attention.output_group_count",
        "attention.output_lora_rank",
        "attention.compress_rope_freq_base",
        "hyper_connection.count",
        "swiglu_clamp_exp",
        "swiglu_clamp_shexp",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
