"""Talkie: norms without weights; each layer adds the normed embeddings, scaled."""

from collections.abc import Mapping

import numpy as np

from tamis.graph.attention import append, attention
from tamis.graph.context import Graph, Heads
from tamis.graph.linear import linear, linears
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, mapped, norm, ones
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w, head_dim = g.weights(il), g.hp.of(il).head_dim
    embedded = g.ws.rows("embedded", g.hp.n_embd)
    if il == 0:
        mapped(g, g.x, embedded)
    q, k, v = linears(g, norm(g, g.x, w.attn_norm), w.attn_q, w.attn_k, w.attn_v)
    gains = np.repeat(w.attn_q_norm.vector(), head_dim, axis=1)  # one number for each head
    queries, keys = (x.reshape(len(x), -1, head_dim) for x in (q, k))
    angles = g.angles(0)
    finished = append(
        g,
        il,
        Heads(queries, np.ascontiguousarray(gains), angles, norm_last=True),
        Heads(keys, ones(head_dim), angles, norm_last=True),
        v,
    )
    add(g, linear(g, attention(g, il, finished), w.attn_output))
    add(g, mlp(g, norm(g, g.x, w.ffn_norm), w))
    mapped(g, embedded, g.x, outer=float(w.layer_output_scale.vector()[0]), add=True)


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {"attn_q_norm": (hp.n_head, 1), "layer_output_scale": (1,)}


ARCH = Arch(
    neox=True,
    weighted=False,
    norm_embedding="plain",
    layer=layer,
    tensors=tensors,
    keys=("logit_scale",),
    one_device=True,
)
