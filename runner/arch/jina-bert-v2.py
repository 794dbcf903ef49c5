"""Jina Embeddings 2: BERT with ALiBi instead of learned positions, and with gates."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.encoder import begin, read
from tamis.graph.layer import self_attention
from tamis.graph.linear import Source
from tamis.graph.norm import add, mapped, norm_rows
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il; if there is a second norm, its input is added again to what it reads."""
    w = g.weights(il)
    # Biases of norms that the file lacks have no effect.
    for each in (w.attn_q_norm, w.attn_k_norm, w.attn_norm_2):
        if not each:
            each.leave_bias()
    if il == 0:
        begin(g)
    before = mapped(g, g.x, g.ws.rows("before", g.hp.n_embd)) if w.attn_norm_2 else None
    add(g, self_attention(g, il, Source(g.x)))
    norm_rows(g, g.x, w.attn_output_norm.vector(), w.attn_output_norm.bias())
    if before is not None:
        mapped(g, before, g.x, add=True)
        norm_rows(g, g.x, w.attn_norm_2.vector(), w.attn_norm_2.bias())
    read(g, il)


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {
        "attn_norm_2": (hp.n_embd,),
        "attn_q_norm": (hp.n_embd_q,),
        "attn_k_norm": (hp.n_embd_kv,),
    }


ARCH = Arch(
    neox=False,
    is_encoder=True,
    norm="layer",
    activation="gelu",
    nope_every=1,
    layer=layer,
    tensors=tensors,
    derived=lambda hp: {"max_alibi_bias": 8.0},
)
