"""Seed-OSS: like llama; the norm before the feed-forward part has another name."""

from tamis.graph.context import Graph
from tamis.graph.layer import self_attention
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, self_attention(g, il, norm(g, g.x, w.attn_norm)))
    add(g, mlp(g, norm(g, g.x, w.post_attention_norm), w))


ARCH = Arch(neox=True, layer=layer)
