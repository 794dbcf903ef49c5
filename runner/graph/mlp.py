"""The dense feed-forward part."""

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.experts import activated
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.norm import mapped
from tamis.graph.recurrent import gated, whole
from tamis.model.weights import Tensors

PACKED = ("silu", "gelu")  # gates that products apply as they read them


def mlp(g: Graph, x: Source | np.ndarray, w: Tensors, limit: float = 0.0) -> Product:
    """The part down(activation(gate(x)) * up(x)); without a gate down(activation(up(x))).

    limit: the bound of the gate and of the product's other factor, as for experts; 0: none.
    """
    activation = g.model.arch.activation
    if not g.model.arch.gated:
        (up,) = linears(g, x, w.ffn_up)
        return linear(g, mapped(g, up, up, activation), w.ffn_down)
    gate, up = linears(g, x, w.ffn_gate, w.ffn_up)
    if limit or g.model.arch.clamp_always:
        return linear(g, activated(g, gate, up, limit), w.ffn_down)
    if activation in PACKED:
        return linear(g, Source(gate, activation, up), w.ffn_down)
    return linear(g, gated(g, "gated", whole(gate), activation, whole(up)), w.ffn_down)
