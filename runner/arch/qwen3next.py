"""Qwen3-Next: Gated DeltaNet, gated attention in every fourth layer, experts and a shared one."""

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

TILED = False  # heads of values that share a key head are neighbours


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, delta_net(g, il, h, tiled=TILED) if il in g.hp.recurrent else gated_attention(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.post_attention_norm)))


# Files with attn_qkv and attn_gate may also have the older fused matrix, which llama.cpp ignores.
UNREAD = ("ssm_in.weight",)
ARCH = Arch(
    neox=True,
    shared_ff=True,
    layer=layer,
    tensors=delta_net_tensors,
    recurrent=delta_net_layers,
    keys=("full_attention_interval",),
    unread=UNREAD,
)
