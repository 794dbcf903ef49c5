"""Embeddings of each layer's own (Gemma 3n and 4): a table beside that of the tokens."""

import math

import numpy as np

from tamis.graph.attention import norm_heads
from tamis.graph.context import Graph
from tamis.graph.linear import Source, linear, linears
from tamis.graph.norm import mapped, norm_of
from tamis.graph.recurrent import Part, gated, whole
from tamis.jit_kernels.contract import ops
from tamis.model.weights import Tensors


def layer_embeddings(g: Graph, x: np.ndarray) -> None:
    """Record the embeddings of all layers, made of token ids and of x, f32 [n_tok, n_embd]."""
    top, hp = g.model.weights.top, g.hp
    table, n = top.per_layer_token_embd.matrix(), hp.n_layer * hp.n_embd_layer
    (projected,) = linears(g, x, top.per_layer_model_proj)
    mapped(g, projected, projected, outer=hp.n_embd**-0.5)
    norm_heads(g, projected.reshape(len(x), hp.n_layer, -1), top.per_layer_proj_norm.vector())
    own = g.ws.rows("layer_embeddings", n)
    g.rec.program.add(
        ops.EMBED,
        (table.type,),
        step=g.rec.step,
        ids=g.ws.ids,
        table=table.data,
        y=own,
        n=n,
        n_id=1,
        scale=math.sqrt(hp.n_embd_layer),
    )
    mapped(g, projected, own, add=True)
    mapped(g, own, own, outer=0.5**0.5)


def embedded(g: Graph, il: int, x: np.ndarray, w: Tensors) -> Source:
    """The term of layer il's own embeddings, times a gate made of x, f32 [n_tok, n_embd]."""
    hp = g.hp
    own = g.ws.rows("layer_embeddings", hp.n_layer * hp.n_embd_layer)
    (gate,) = linears(g, x, w.inp_gate)
    part = Part(own, il * hp.n_embd_layer, hp.n_embd_layer)
    product = gated(g, "layer_embedding", whole(gate), "gelu", part)
    return norm_of(g, linear(g, product, w.proj), w.post_norm)
