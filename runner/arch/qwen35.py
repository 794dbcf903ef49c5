"""Qwen3.5: Gated DeltaNet, and attention with an output gate in every fourth layer."""

from tamis.graph.context import Graph
from tamis.graph.mixers.delta_net import (
    delta_net,
    delta_net_layers,
    delta_net_tensors,
    gated_attention,
)
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, delta_net(g, il, h, tiled=True) if il in g.hp.recurrent else gated_attention(g, il, h))
    add(g, mlp(g, norm(g, g.x, w.post_attention_norm), w))


ARCH = Arch(
    neox=True,
    layer=layer,
    tensors=delta_net_tensors,
    recurrent=delta_net_layers,
    interleaved_sections=True,
    keys=("full_attention_interval", "rope.dimension_sections"),
)
