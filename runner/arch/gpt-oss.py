"""gpt-oss: attention sinks, alternating windows, experts with biases and clamped gates."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, self_attention
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, self_attention(g, il, norm(g, g.x, w.attn_norm)))
    add(g, feed_forward(g, il, norm(g, g.x, w.post_attention_norm)))


ARCH = Arch(
    neox=True,
    layer=layer,
    full_attention_every=2,
    window_scaled=True,
    score_experts="chosen",
    normalize_experts=False,
    clamp="gpt_oss",
    clamp_always=7.0,
    keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
)
