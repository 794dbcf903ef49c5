"""Granite 4 hybrid: Mamba-2 or attention, dense parts or experts; granite's scales."""

from typing import Any

from tamis.arch.granite import ARCH as GRANITE
from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, self_attention
from tamis.graph.mixers.mamba import mamba2, mamba2_tensors
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, mamba2(g, il, h) if il in g.hp.recurrent else self_attention(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


def _derived(hp: HParams) -> dict[str, Any]:
    return {"logit_scale": 1 / hp.logit_scale if hp.logit_scale else 0.0}


ARCH = Arch(
    neox=False,
    layer=layer,
    tensors=mamba2_tensors,
    keys=GRANITE.keys,
    derived=_derived,
)
