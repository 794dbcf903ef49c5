"""MiniMax-M3: an index head for each KV head selects its blocks; clamped gates, experts."""

from collections.abc import Mapping
from typing import Any

from tamis.graph.attention import append, attention, rope
from tamis.graph.context import Graph, Heads, Index
from tamis.graph.layer import feed_forward, self_attention
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams, LayerShape, UnsupportedKey


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, _attention(g, il, h) if il >= g.hp.indexer.first else self_attention(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


def _attention(g: Graph, il: int, h: Source) -> Product:
    """Record attention.

    The index's queries and keys are normed and rotated like those of attention.

    Its keys are a further head of the KV cache, as wide as the others, and rotated with them.
    """
    w, n = g.weights(il), g.hp.indexer.n_key
    names = "attn_q", "attn_k", "attn_v", "indexer.q_proj", "indexer.k_proj"
    q, k, v, index_q, index_k = linears(g, h, *(w[name] for name in names))
    angles = g.angles(g.model.rope_of(il))
    queries = Heads(index_q.reshape(len(q), -1, n), w["indexer.q_norm"].vector(), angles)
    apart = angles if n < g.hp.head_dim else None
    keys = Heads(index_k.reshape(len(q), -1, n), w["indexer.k_norm"].vector(), apart)
    index = Index(queries, keys, None, g.ws.scratch, g.model.arch.index_neox)
    queries, keys = rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm)
    finished = append(g, il, queries, keys, v, index)
    return linear(g, attention(g, il, finished), w.attn_output)


def _tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    n, n_key = hp.indexer.n_head, hp.indexer.n_key
    return {
        "indexer.q_proj": (n * n_key, hp.n_embd),
        "indexer.k_proj": (n_key, hp.n_embd),
        "indexer.q_norm": (n_key,),
        "indexer.k_norm": (n_key,),
    }


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: the KV cache has one head more than attention, for index keys."""
    index, n_head_kv = hp.indexer, hp.n_head_kv
    if index.n_head != n_head_kv:
        what = f"is {index.n_head}, expected {n_head_kv}, as many as KV heads"
        raise UnsupportedKey("attention.indexer.head_count", what)
    own = LayerShape(hp.n_head, n_head_kv, hp.head_dim, hp.n_ff)
    wide = hp.head_dim_indexed
    return {
        "layers": (own,) * hp.n_layer,
        "n_head": hp.group * (n_head_kv + 1),
        "n_head_kv": n_head_kv + 1,
        "head_dim": wide,
        "attention_scale": 0.0 if wide == hp.head_dim else hp.head_dim**-0.5,
    }


ARCH = Arch(
    neox=True,
    layer=layer,
    tensors=_tensors,
    derived=_derived,
    clamp="gpt_oss",
    clamp_always=7.0,
    nonzero=("attention.indexer.local_blocks",),
    keys=(
        "attention.indexer.top_k",
        "attention.indexer.block_size",
        "attention.indexer.local_blocks",
        "leading_dense_block_count",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
