"""Qwen4: gated residual streams, n-gram embeddings, Gated DeltaNet, an index, experts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tamis.graph.attention import record_norm_rope, rotated_by
from tamis.graph.context import Graph, Heads, Index
from tamis.graph.layer import feed_forward
from tamis.graph.linear import Source, linears
from tamis.graph.mixers.delta_net import (
    delta_net,
    delta_net_layers,
    delta_net_tensors,
    gated_attention,
)
from tamis.graph.mixers.ngrams import add_ngrams, ngram_tensors
from tamis.graph.recurrent import pooled
from tamis.graph.streams import (
    begin_streams,
    gated_stream_tensors,
    read_gated_streams,
    write_streams,
)
from tamis.model.arch import Arch
from tamis.model.hparams import HParams, LayerShape, UnsupportedKey


def layer(g: Graph, il: int) -> None:
    """Record layer il; g.x is the input of its parts, and after the last layer that of the head."""
    w, top = g.weights(il), g.model.weights.top
    if il == 0:
        begin_streams(g)
    if il == g.hp.ngrams.layer:
        add_ngrams(g, il)
    own = read_gated_streams(g, w.hc_attn_norm, w.hc_attn_down, w.hc_attn_up, w.hc_attn_inject)
    h = Source(g.x)
    if il in g.hp.recurrent:
        write_streams(g, own, delta_net(g, il, h, tiled=True, activation="sigmoid"))
    else:
        index = partial(_index, g, il, h) if g.hp.indexer.top_k else lambda: None
        write_streams(g, own, gated_attention(g, il, h, index))
    own = read_gated_streams(g, w.hc_ffn_norm, w.hc_ffn_down, w.hc_ffn_up, w.hc_ffn_inject)
    write_streams(g, own, feed_forward(g, il, Source(g.x)))
    if il == g.hp.n_layer - 1:
        read_gated_streams(g, top.output_hc_norm, top.output_hc_down, top.output_hc_up)


def _index(g: Graph, il: int, h: Source) -> Index:
    """Record the index's queries and its keys, which are the normed means of blocks' keys.

    A mean has the position of its block's first key. Keys as wide as a row of the KV cache are
    rotated with it.
    """
    w, indexer, angles = g.weights(il), g.hp.indexer, g.angles(g.model.rope_of(il))
    n, block = indexer.n_key, indexer.block
    q, k = linears(g, h, w["indexer.q_proj"], w["indexer.k_proj"])
    if block > 1:
        k = pooled(g, il, "index_pooled", k, None, np.zeros((block, n), np.float32), block)
    keys = Heads(k.reshape(len(k), 1, n), w["indexer.k_norm"].vector())
    if block > 1:
        back = rotated_by(g.frequencies(g.model.rope_of(il)), len(k), 1 - block)
        keys = replace(keys, angles=back)
    normed = record_norm_rope(g, keys)
    queries = Heads(q.reshape(len(q), -1, n), w["indexer.q_norm"].vector(), angles)
    even = np.ones((len(q), indexer.n_head), np.float32)
    keys = Heads(normed, angles=angles if n < g.hp.head_dim else None)
    return Index(queries, keys, even, g.ws.scratch, g.model.arch.index_neox)


def _tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    n, n_key = hp.indexer.n_head, hp.indexer.n_key
    return {
        **delta_net_tensors(hp),
        **gated_stream_tensors(hp),
        **ngram_tensors(hp),
        "indexer.q_proj": (n * n_key, hp.n_embd),
        "indexer.k_proj": (n_key, hp.n_embd),
        "indexer.q_norm": (n_key,),
        "indexer.k_norm": (n_key,),
    }


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: the KV cache has one head more than attention, for index keys."""
    full = set(range(hp.n_layer)) - set(hp.recurrent or delta_net_layers(hp))
    blocks = {hp.compressed.ratios[il] for il in full}
    if len(blocks) > 1:
        what = f"is {hp.compressed.ratios}, expected the same in all layers with attention"
        raise UnsupportedKey("attention.compress_ratios", what)
    block = max(blocks, default=0)
    if block and hp.indexer.top_k % block:
        what = f"is {hp.indexer.top_k}, expected a multiple of {block}: blocks are chosen whole"
        raise UnsupportedKey("attention.indexer.top_k", what)
    _check_sections(hp)
    n_wide = hp.ngrams.n_each * (hp.ngrams.n_gram - 1) * hp.n_embd_layer
    if hp.ngrams.layer >= 0 and n_wide != hp.n_embd:
        what = f"is {hp.n_embd_layer}: rows of all hashes have {n_wide} elements, not {hp.n_embd}"
        raise UnsupportedKey("embedding_length_per_layer_input", what)
    dense = blocks <= {0}
    own = LayerShape(hp.n_head, hp.n_head_kv, hp.head_dim, hp.n_ff)
    return {
        "rope_sections": (),
        "attention_scale": hp.head_dim**-0.5,
        "indexer": replace(hp.indexer, top_k=0) if dense else replace(hp.indexer, block=block),
        "layers": () if dense else (own,) * hp.n_layer,
        "n_head": hp.n_head + hp.group * (not dense),
        "n_head_kv": hp.n_head_kv + (not dense),
        "head_dim": hp.head_dim if dense else hp.head_dim_indexed,
    }


def _check_sections(hp: HParams) -> None:
    """Raise UnsupportedKey if a rotary pair belongs to no section in which text has positions."""
    sections = hp.rope_sections
    for pair in range(hp.n_rot // 2 if sum(sections) else 0):
        at = pair % sum(sections)
        if at >= 3 * sections[at % 3]:
            what = f"is {sections}: pair {pair} is of none of the first three"
            raise UnsupportedKey("rope.dimension_sections", what)


ARCH = Arch(
    neox=True,
    shared_ff=True,
    layer=layer,
    tensors=_tensors,
    derived=_derived,
    recurrent=delta_net_layers,
    norms_output=False,
    one_device=True,
    unread=("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    keys=(
        "attention.indexer.top_k",
        "attention.compress_ratios",
        "embedding_length_per_layer_input",
        "full_attention_interval",
        "hyper_connection.count",
        "hyper_connection.low_rank",
        "ple.layers",
        "rope.dimension_sections",
    ),
)
