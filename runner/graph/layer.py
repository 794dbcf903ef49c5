"""A layer as most models have it: arch/ has the files of those that differ."""

from tamis.graph.attention import append, attention, rope
from tamis.graph.context import Graph
from tamis.graph.experts import experts
from tamis.graph.linear import linear, linears
from tamis.graph.mlp import mlp
from tamis.graph.norm import Branch, add, norm, normed, record_norm


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x. Norms that the file has not are left out."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    q, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)
    append(g, il, rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm), v)
    out: Branch = linear(g, attention(g, il, q), w.attn_output)
    add(g, normed(g, out, w.post_attention_norm))

    h = norm(g, g.x, w.ffn_norm)
    if w.ffn_gate or not g.hp.n_expert:
        out = mlp(g, h, w)
    else:
        out = experts(g, record_norm(g, h, g.ws.rows("ffn_norm", g.hp.n_embd)), w)
    add(g, normed(g, out, w.post_ffw_norm))


def record_layer(g: Graph, il: int) -> None:
    """Record layer il as the model's architecture has it."""
    (g.model.arch.layer or layer)(g, il)
    g.hooks.end(g, il)
