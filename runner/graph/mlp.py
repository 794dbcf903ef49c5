"""The dense feed-forward part."""

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.linear import Product, Source, linear, linears
from tamis.model.weights import Tensors


def mlp(g: Graph, x: Source | np.ndarray, w: Tensors) -> Product:
    """Gated: down(activation(gate(x)) * up(x))."""
    gate, up = linears(g, x, w.ffn_gate, w.ffn_up)
    return linear(g, Source(gate, g.model.arch.activation, up), w.ffn_down)
