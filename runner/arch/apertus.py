"""Apertus: like llama, with a norm on each head of q and k, and xIELU instead of a gate."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.layer import self_attention
from tamis.graph.linear import linear, linears
from tamis.graph.norm import add, mapped, norm
from tamis.model.arch import Arch
from tamis.model.keys import ArchKeys, key_each_layer


@dataclass(frozen=True, slots=True)
class XieluKeys(ArchKeys):
    """The trained parameters of xIELU in each layer."""

    alpha_n: tuple[float, ...] = key_each_layer("xielu.alpha_n")
    alpha_p: tuple[float, ...] = key_each_layer("xielu.alpha_p")
    beta: tuple[float, ...] = key_each_layer("xielu.beta")
    # a smaller epsilon would change results
    eps: tuple[float, ...] = key_each_layer("xielu.eps", low=-1e-5)

    def constants(self, il: int) -> tuple[float, float, float]:
        """The factors of layer il for exp(x) - 1 - x below 0, for x^2 above 0, and for x."""
        low, high = (float(np.logaddexp(0, x[il])) for x in (self.alpha_n, self.alpha_p))
        return self.beta[il] + low, high, self.beta[il]


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, self_attention(g, il, norm(g, g.x, w.attn_norm)))
    (up,) = linears(g, norm(g, g.x, w.ffn_norm), w.ffn_up)
    add(g, linear(g, xielu(g, up, g.hp.keys(XieluKeys).constants(il)), w.ffn_down))


def xielu(g: Graph, x: Any, constants: tuple[float, float, float]) -> Any:
    """Record the activation of x, f32 [n_tok, n] (Huang and Schlag 2024, arXiv 2411.13010).

    It is high * x^2 + slope * x above 0, and low * (exp(x) - 1 - x) + slope * x below.
    """
    low, high, slope = constants
    y = mapped(g, x, g.ws.rows("xielu", x.shape[1]), outer=slope)
    mapped(g, x, y, "relu2", outer=high, add=True)
    return mapped(g, x, y, "curve", outer=low, add=True)


ARCH = Arch(
    neox=True,
    layer=layer,
    declares=XieluKeys,
    unread=("attn_q_norm.bias", "attn_k_norm.bias"),
)
