"""Falcon: parallel parts; if the file has a second norm, it is that of attention."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.layer import self_attention
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    attended = self_attention(g, il, norm(g, g.x, w.attn_norm_2) if w.attn_norm_2 else h)
    out = mlp(g, h, w)
    add(g, attended)
    add(g, out)


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {"attn_norm_2": (hp.n_embd,)}


ARCH = Arch(neox=True, norm="layer", gated=False, activation="gelu", layer=layer, tensors=tensors)
