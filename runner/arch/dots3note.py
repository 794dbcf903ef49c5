"""dots3-note: latent attention, selected by an indexer or in a window; a gate per head."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.latent import gated_latent_attention, latent_tensors
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, gated_latent_attention(g, il, norm(g, g.x, w.attn_norm)))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


ARCH = Arch(
    neox=False,
    layer=layer,
    tensors=latent_tensors,
    window_scaled=True,
    derived=lambda hp: {"attention_scale": hp.latent.n_key**-0.5, "index_eps": 1e-6},
    keys=(
        "attention.kv_lora_rank",
        "attention.indexer.top_k",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
