"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, or a feed-forward part."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, self_attention
from tamis.graph.mixers.mamba import mamba2, mamba2_tensors
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    if w.ssm_in:
        add(g, mamba2(g, il, h))
    elif w.attn_output:
        add(g, self_attention(g, il, h))
    else:
        add(g, feed_forward(g, il, h))


ARCH = Arch(
    neox=False,
    shared_ff=True,
    nope_every=1,
    gated=False,
    activation="relu2",
    score_experts="sigmoid",
    layer=layer,
    tensors=mamba2_tensors,
    keys=("expert_weights_scale", "expert_weights_norm"),
    refused=("moe_latent_size",),
)
