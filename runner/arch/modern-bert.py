"""ModernBERT (Warner et al. 2024, arXiv 2412.13663): norms before each part, windows, gates."""

from tamis.graph.context import Graph
from tamis.graph.layer import self_attention
from tamis.graph.linear import Source
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch

GATES = {"silu": "silu", "swish": "silu", "swiglu": "silu", "relu": "relu", "reglu": "relu"}


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x; the first one reads the embeddings, which are normed."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm) if w.attn_norm else Source(g.x)
    add(g, self_attention(g, il, h))
    add(g, mlp(g, norm(g, g.x, w.ffn_norm), w))


ARCH = Arch(
    neox=True,
    is_encoder=True,
    norm="layer",
    norm_embedding="weighted",
    full_attention_every=3,
    full_first=True,
    rope_base_window=10000.0,
    layer=layer,
    keys=("attention.sliding_window_pattern", "rope.freq_base_swa", "hidden_activation"),
    facts=lambda hp: {"activation": GATES.get(hp.activation, "gelu")},
)
