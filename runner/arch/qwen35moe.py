"""Qwen3.5 mixture of experts: Gated DeltaNet, gated attention, experts and a shared one."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.delta_net import (
    delta_net,
    delta_net_layers,
    delta_net_tensors,
    gated_attention,
)
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch

TILED = True  # heads of values that share a key head are n_key_head apart


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, delta_net(g, il, h, tiled=TILED) if il in g.hp.recurrent else gated_attention(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.post_attention_norm)))


ARCH = Arch(
    neox=True,
    shared_ff=True,
    layer=layer,
    tensors=delta_net_tensors,
    recurrent=delta_net_layers,
    interleaved_sections=True,
    keys=("full_attention_interval", "rope.dimension_sections"),
)
