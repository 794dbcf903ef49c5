"""Mamba: a norm, a selective scan and a residual; no attention and no feed-forward part."""

from tamis.graph.context import Graph
from tamis.graph.mixers.mamba import mamba, mamba_tensors
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    add(g, mamba(g, il, norm(g, g.x, g.weights(il).attn_norm)))


ARCH = Arch(
    neox=False,
    layer=layer,
    tensors=mamba_tensors,
    recurrent=lambda hp: tuple(range(hp.n_layer)),
)
