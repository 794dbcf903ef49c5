"""Falcon-H1: attention and Mamba-2 side by side in every layer, then a feed-forward part."""

from tamis.graph.attention import append, attention, rope
from tamis.graph.context import Graph
from tamis.graph.linear import linear, linears
from tamis.graph.mamba import mamba2, mamba2_tensors
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    q, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)
    append(g, il, rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm), v)
    attended = linear(g, attention(g, il, q), w.attn_output)
    mixed = mamba2(g, il, h)  # of the rows before attention is added to them
    add(g, attended)
    add(g, mixed)
    add(g, mlp(g, norm(g, g.x, w.ffn_norm), w))


ARCH = Arch(
    neox=True,
    rope_factors=False,
    unread=("attn_output.bias",),
    layer=layer,
    tensors=mamba2_tensors,
    recurrent=lambda hp: tuple(range(hp.n_layer)),
)
