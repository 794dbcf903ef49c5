"""Jamba: Mamba with norms, or attention without positions; dense parts or experts."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, self_attention
from tamis.graph.mixers.mamba import mamba, mamba_tensors
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, mamba(g, il, h) if il in g.hp.recurrent else self_attention(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


ARCH = Arch(neox=False, nope_every=1, normalize_experts=False, layer=layer, tensors=mamba_tensors)
