"""GLM-4.5 to 4.7: dense first layers, shared experts, a bias in the selection of experts."""

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
    shared_ff=True,
    shares_expert=True,
    layer=layer,
    score_experts="sigmoid",
    keys=(
        "rope.dimension_sections",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
