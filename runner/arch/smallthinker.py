"""SmallThinker: the router reads the input of attention; positions in sliding-window layers."""

from typing import Any

from tamis.graph.context import Graph
from tamis.graph.experts import chosen_experts, route
from tamis.graph.layer import self_attention
from tamis.graph.linear import linears
from tamis.graph.norm import add, norm, record_norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams

NOPE_EVERY = 4


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    (logits,) = linears(g, g.x, w.ffn_gate_inp)
    chosen = route(g, logits, w.exp_probs_b)
    add(g, self_attention(g, il, norm(g, g.x, w.attn_norm)))
    x = record_norm(g, norm(g, g.x, w.ffn_norm), g.ws.rows("ffn_norm", g.hp.n_embd))
    add(g, chosen_experts(g, il, x, chosen))


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: with windows, every fourth layer has no positions.

    In a model of four layers llama.cpp rotates all.
    """
    if not hp.sliding_window:
        return {}
    nope = () if hp.n_layer == NOPE_EVERY else range(0, hp.n_layer, NOPE_EVERY)
    return {"sliding_window": 4096, "nope_layers": tuple(nope)}


ARCH = Arch(
    neox=True,
    activation="relu",
    layer=layer,
    window_scaled=True,
    full_attention_every=NOPE_EVERY,
    full_first=True,
    keys=("attention.sliding_window_pattern", "rope.freq_base_swa", "expert_gating_func"),
    derived=_derived,
)
