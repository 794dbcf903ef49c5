"""Arctic: a dense feed-forward part, and in parallel experts that read the input of attention."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.experts import experts
from tamis.graph.layer import self_attention
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm, record_norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    before = record_norm(g, norm(g, g.x, w.ffn_norm_exps), g.ws.rows("ffn_norm", g.hp.n_embd))
    add(g, self_attention(g, il, norm(g, g.x, w.attn_norm)))
    add(g, mlp(g, norm(g, g.x, w.ffn_norm), w))
    add(g, experts(g, il, before))


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors: the dense part is n_embd wide."""
    n = hp.n_embd
    return {
        "ffn_norm_exps": (n,),
        **{f"ffn_{name}": (n, n) for name in ("gate", "up", "down")},
    }


ARCH = Arch(neox=False, layer=layer, tensors=tensors)
