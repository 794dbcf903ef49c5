"""Laguna: an output gate for each head, sliding-window layers, a shared expert."""

from typing import Any

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, gated_self_attention
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams, UnsupportedKey


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, gated_self_attention(g, il, norm(g, g.x, w.attn_norm), "softplus"))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


def _derived(hp: HParams) -> dict[str, Any]:
    """Layers with a window are unscaled. Raises UnsupportedKey for two widths, the first its own.

    llama.cpp then rotates that width in all layers, which no file of the model asks for.
    """
    window_first = hp.swa_layers and hp.swa_layers[0] and not all(hp.swa_layers)
    if window_first and hp.n_rot_swa not in (0, hp.n_rot):
        what = f"is {hp.n_rot_swa}, expected {hp.n_rot} where the first layer has a window"
        raise UnsupportedKey("rope.dimension_count_swa", what)
    return {"rope_base_swa": hp.rope_base_swa or hp.rope_base}


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
    derived=_derived,
)
