"""The layers of encoders (BERT, Devlin et al. 2018, arXiv 1810.04805): norms after each part."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, self_attention
from tamis.graph.linear import Source
from tamis.graph.norm import add, norm_rows, record_rows_added


def encoder_layer(g: Graph, il: int) -> None:
    """Record layer il: each part is added to g.x, which is then normed."""
    w = g.weights(il)
    if il == 0:
        begin(g)
    add(g, self_attention(g, il, Source(g.x)))
    norm_rows(g, g.x, w.attn_output_norm.vector(), w.attn_output_norm.bias())
    read(g, il)


def read(g: Graph, il: int) -> None:
    """Record the feed-forward part of layer il, and the norm after it."""
    w = g.weights(il)
    add(g, feed_forward(g, il, Source(g.x)))
    norm_rows(g, g.x, w.layer_output_norm.vector(), w.layer_output_norm.bias())


def begin(g: Graph) -> None:
    """Record the sum of the embeddings of tokens and of the first token type, and its norm."""
    top = g.model.weights.top
    if top.token_types:
        record_rows_added(g, top.token_types.vector()[:1])
    norm_rows(g, g.x, top.token_embd_norm.vector(), top.token_embd_norm.bias())
