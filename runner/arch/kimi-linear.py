"""Kimi Linear: Kimi Delta Attention, or latent attention without positions; experts."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.kda import UNREAD, kda, kda_tensors
from tamis.graph.mixers.latent import key_scaled, latent_attention
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, kda(g, il, h) if il in g.hp.recurrent else latent_attention(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


ARCH = Arch(
    neox=False,
    nope_every=1,
    shares_expert=True,
    layer=layer,
    tensors=kda_tensors,
    unread=UNREAD,
    derived=key_scaled,
    keys=(
        "attention.kv_lora_rank",
        "expert_weights_scale",
        "expert_gating_func",
    ),
)
