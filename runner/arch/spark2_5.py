"""Spark 2.5: a gate for each attention head, GELU gates, a window if the file has one."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.layer import gated_self_attention
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, gated_self_attention(g, il, norm(g, g.x, w.attn_norm), "sigmoid"))
    add(g, mlp(g, norm(g, g.x, w.ffn_norm), w))


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {"attn_gate": (hp.n_head, hp.n_embd)}


ARCH = Arch(
    neox=True,
    activation="gelu",
    layer=layer,
    tensors=tensors,
    window_scaled=True,
    keys=(
        "attention.head_count",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "rope.dimension_count_swa",
    ),
)
