"""AFMoE (Trinity): gated attention output, norms after each part, sliding-window layers."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, gated_self_attention
from tamis.graph.norm import add, norm, normed
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    attended = gated_self_attention(g, il, norm(g, g.x, w.attn_norm), "sigmoid")
    add(g, normed(g, attended, w.post_attention_norm))
    add(g, normed(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)), w.post_ffw_norm))


ARCH = Arch(
    neox=True,
    layer=layer,
    scale_embedding=True,
    full_attention_every=4,
    nope_every=4,
    window_scaled=True,
    score_experts="sigmoid",
    keys=(
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
    tensors=lambda hp: {"attn_gate": (hp.n_embd_q, hp.n_embd)},
)
