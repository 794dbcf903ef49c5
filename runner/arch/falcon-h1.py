"""Falcon-H1: attention and Mamba-2 in parallel in every layer, then a feed-forward part."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, self_attention
from tamis.graph.mixers.mamba import mamba2, mamba2_tensors
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    attended = self_attention(g, il, h)
    mixed = mamba2(g, il, h)  # the input is the rows before attention's output is added
    add(g, attended)
    add(g, mixed)
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


ARCH = Arch(
    neox=True,
    rope_factors=False,
    unread=("attn_output.bias",),
    layer=layer,
    tensors=mamba2_tensors,
    recurrent=lambda hp: tuple(range(hp.n_layer)),
)
