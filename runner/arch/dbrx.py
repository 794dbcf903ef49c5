"""DBRX: LayerNorm, clamped Q, K and V, experts."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, self_attention
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, self_attention(g, il, norm(g, g.x, w.attn_norm)))
    add(g, feed_forward(g, il, norm(g, g.x, w.attn_output_norm)))


ARCH = Arch(
    neox=True,
    norm="layer",
    layer=layer,
    keys=("attention.clamp_kqv",),
    tensors=lambda hp: {"attn_output_norm": (hp.n_embd,)},
)
