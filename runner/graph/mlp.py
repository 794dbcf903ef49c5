"""The dense feed-forward part."""

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.experts import activated
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.norm import mapped
from tamis.graph.recurrent import gated, whole
from tamis.model.weights import Tensors

PACKED = ("silu", "gelu")  # gates that products apply as they read them


def mlp(g: Graph, x: Source | np.ndarray, w: Tensors) -> Product:
    """The part down(activation(gate(x)) * up(x)); without a gate down(activation(up(x)))."""
    activation = g.model.arch.activation
    if not g.model.arch.gated:
        (up,) = linears(g, x, w.ffn_up)
        return linear(g, mapped(g, up, up, activation), w.ffn_down)
    gate, up = linears(g, x, w.ffn_gate, w.ffn_up)
    if g.model.arch.clamp_always:
        return linear(g, activated(g, gate, up, 0.0), w.ffn_down)
    if activation in PACKED:
        return linear(g, Source(gate, activation, up), w.ffn_down)
    return linear(g, gated(g, "gated", whole(gate), activation, whole(up)), w.ffn_down)
