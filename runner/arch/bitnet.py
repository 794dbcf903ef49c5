"""BitNet b1.58: like llama, with norms before the last product of each part; ternary weights."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.layer import attended
from tamis.graph.linear import linear, linears
from tamis.graph.norm import add, norm
from tamis.graph.recurrent import gated, whole
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    out = attended(g, il, norm(g, g.x, w.attn_norm))
    add(g, linear(g, norm(g, out, w.attn_sub_norm), w.attn_output))
    gate, up = linears(g, norm(g, g.x, w.ffn_norm), w.ffn_gate, w.ffn_up)
    hidden = gated(g, "gated", whole(gate), "silu", whole(up))
    add(g, linear(g, norm(g, hidden, w.ffn_sub_norm), w.ffn_down))


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {"attn_sub_norm": (hp.n_embd,), "ffn_sub_norm": (hp.n_ff,)}


ARCH = Arch(neox=True, layer=layer, tensors=tensors, rope_factors=False)
