"""Laguna: an output gate for each head, sliding-window layers, a shared expert."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, gated_self_attention
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, gated_self_attention(g, il, norm(g, g.x, w.attn_norm), "softplus"))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


ARCH = Arch(
    neox=True,
    layer=layer,
    score_experts="sigmoid",
    keys=(
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "rope.dimension_count_swa",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
    tensors=lambda hp: {"attn_gate": (hp.n_head, hp.n_embd)},
    derived=lambda hp: {"rope_base_swa": hp.rope_base_swa or hp.rope_base},  # unscaled
)
