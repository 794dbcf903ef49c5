"""A layer as most models have it; arch/ has the files of those that differ."""

from dataclasses import replace

import numpy as np

from tamis.graph.attention import append, attention, rope
from tamis.graph.context import Graph
from tamis.graph.experts import experts, limit_of, shared_expert
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.mlp import mlp
from tamis.graph.norm import (
    Branch,
    add,
    mapped,
    norm,
    norm_of,
    normed,
    record_norm,
    record_rows_added,
)
from tamis.graph.recurrent import Part, gated, softplus
from tamis.model.weights import Tensor

NO_NORM = Tensor("")


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x. Norms that the file lacks are left out."""
    w = g.weights(il)
    out: Branch = self_attention(g, il, norm(g, g.x, w.attn_norm))
    add(g, normed(g, out, w.post_attention_norm))
    add(g, normed(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)), w.post_ffw_norm))


def parallel(g: Graph, il: int) -> None:
    """Record a layer whose attention and feed-forward part read the same rows, in parallel.

    If the file has one norm, both read it.
    """
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    own = self_attention(g, il, h)
    out = mlp(g, norm(g, g.x, w.ffn_norm) if w.ffn_norm else h, w)
    add(g, own)
    add(g, out)


def post_normed(g: Graph, il: int) -> None:
    """Record a layer whose parts read g.x without a norm; what they add is normed."""
    w = g.weights(il)
    add(g, norm_of(g, self_attention(g, il, Source(g.x)), w.post_attention_norm))
    add(g, norm_of(g, mlp(g, Source(g.x), w), w.post_ffw_norm))


def self_attention(g: Graph, il: int, h: Source, *, normed_heads: bool = True) -> Product:
    """Attention of the rows h to themselves and earlier rows, with its output projection.

    normed_heads: whether the file's norms of queries and keys apply.
    """
    out = attended(g, il, h, normed_heads=normed_heads)
    return linear(g, out, g.weights(il).attn_output)


def gated_self_attention(g: Graph, il: int, h: Source, activation: str) -> Product:
    """Do what self_attention does; its output is multiplied by a gate per element or per head.

    activation: of the gate.
    """
    w, head_dim = g.weights(il), g.hp.of(il).head_dim
    (gate,) = linears(g, h, w.attn_gate)
    if activation == "softplus":
        gate, activation = softplus(g, gate), "none"
    out = attended(g, il, h)
    n_head = out.shape[1] // head_dim
    each = gate.shape[1] // n_head
    gates, heads = (Part(x, 0, n, n_head, n) for x, n in ((gate, each), (out, head_dim)))
    return linear(g, gated(g, "gated_att", gates, activation, heads), w.attn_output)


def attended(g: Graph, il: int, h: Source, *, normed_heads: bool = True) -> np.ndarray:
    """The output of attention before its projection, f32 [n_tok, n_head * head_dim]."""
    w, limit = g.weights(il), g.hp.clamp_qkv
    q, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)
    if limit:
        for x in (q, k, v):
            mapped(g, x, x, "clamp", inner=1 / limit, outer=limit)
    q_norm, k_norm = (w.attn_q_norm, w.attn_k_norm) if normed_heads else (NO_NORM, NO_NORM)
    queries = replace(rope(g, il, q, q_norm), scaled=g.hp.temperature[0] > 0)
    finished = append(g, il, queries, rope(g, il, k, k_norm), v)
    return attention(g, il, finished, w.attn_sinks)


def feed_forward(g: Graph, il: int, h: Source) -> Branch:
    """The feed-forward part of the rows h: dense, or routed experts with the shared one if any."""
    w = g.weights(il)
    if not w.ffn_gate_inp:
        return mlp(g, h, w, limit_of(g.hp.clamp_shared, il))  # that of an expert for all rows
    x = h.x if h.kind == "rows" else record_norm(g, h, g.ws.rows("ffn_norm", g.hp.n_embd))
    chosen = experts(g, il, x)
    shared = w.ffn_up_shexp or g.model.arch.shares_expert  # an error if the file has none
    return (chosen, shared_expert(g, il, x)) if shared else chosen


def record_layer(g: Graph, il: int) -> None:
    """Record layer il with the function of the model's architecture."""
    (g.model.arch.layer or layer)(g, il)
    if il in g.model.control:
        record_rows_added(g, g.model.control[il])
    g.hooks.end(g, il)
