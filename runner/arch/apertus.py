"""Apertus: as llama, a norm on each head of q and k, xIELU instead of a gate."""

from typing import Any

from tamis.graph.context import Graph
from tamis.graph.layer import self_attention
from tamis.graph.linear import linear, linears
from tamis.graph.norm import add, mapped, norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, self_attention(g, il, norm(g, g.x, w.attn_norm)))
    (up,) = linears(g, norm(g, g.x, w.ffn_norm), w.ffn_up)
    add(g, linear(g, xielu(g, up, g.hp.xielu[il]), w.ffn_down))


def xielu(g: Graph, x: Any, constants: tuple[float, float, float]) -> Any:
    """The activation of x, f32 [n_tok, n] (Huang and Schlag 2024, arXiv 2411.13010).

    high * x^2 + slope * x above 0, low * (exp(x) - 1 - x) + slope * x below.
    """
    low, high, slope = constants
    y = mapped(g, x, g.ws.rows("xielu", x.shape[1]), outer=slope)
    mapped(g, x, y, "relu2", outer=high, add=True)
    return mapped(g, x, y, "curve", outer=low, add=True)


ARCH = Arch(
    neox=True,
    layer=layer,
    keys=("xielu.alpha_n",),
    unread=("attn_q_norm.bias", "attn_k_norm.bias"),
)
