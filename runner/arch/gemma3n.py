"""Gemma 3n: streams that a layer predicts and corrects (AltUp), LAuReL, sparse gates.

AltUp: Baykal et al. 2023, arXiv 2301.13310. LAuReL: Menghani et al. 2024, arXiv 2411.07501.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from tamis.arch.gemma4 import attended
from tamis.graph.context import Graph
from tamis.graph.experts import Mixture, record_sum
from tamis.graph.layer_embedding import embedded, layer_embeddings
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.norm import add, mapped, norm, norm_of, record_layer_norm, record_norm, summed
from tamis.graph.recurrent import Part, copied, gate_rows, gated, l2_normed, whole
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.arch import Arch
from tamis.model.hparams import HParams
from tamis.model.weights import Tensor, Tensors

N_STREAM = 4  # AltUp's streams; a layer computes the first, and predicts the others
N_RANK = 64  # of LAuReL
N_SPARSE = 10  # layers with sparse gates
# a gate above mean + this many standard deviations is kept: 5 % of a normal distribution
DEVIATIONS = 1.6448533535003662


def layer(g: Graph, il: int) -> None:
    """Record layer il, from streams to streams; the last layer leaves their mean in g.x."""
    w, n = g.weights(il), g.hp.n_embd
    if il == 0:
        layer_embeddings(g, g.x)
        _begin(g)
    predicted = _predict(g, w)
    copied(g, _stream(predicted, 0), whole(g.x))
    h = record_norm(g, norm(g, g.x, w.attn_norm), g.ws.rows("attn_norm", n))
    add(g, norm_of(g, attended(g, il, Source(h)), w.post_attention_norm))
    (low,) = linears(g, h, w.laurel_l)
    add(g, norm_of(g, linear(g, low, w.laurel_r), w.laurel_post_norm))
    add(g, Source(h))
    mapped(g, g.x, g.x, outer=0.5**0.5)
    add(g, norm_of(g, _mlp(g, il, norm(g, g.x, w.ffn_norm)), w.post_ffw_norm))
    streams = _correct(g, w, predicted)
    scale = Part(w.altup_correct_scale.vector(), 0, n)
    scaled = gated(g, "altup_scaled", scale, "none", _stream(streams, 0))
    own = summed(g, embedded(g, il, scaled, w), g.ws.rows("branch", n))
    _add_each(g, streams, Part(np.array([0, 1, 1, 1], np.float32), 0, 1, N_STREAM, 1), own)
    if il == g.hp.n_layer - 1:
        _end(g, streams)


def _stream(streams: np.ndarray, i: int) -> Part:
    """One of the streams f32 [n_tok, N_STREAM, n_embd]."""
    n = streams.shape[2]
    return Part(streams, n * i, n)


def _add_each(g: Graph, streams: np.ndarray, weights: Part, x: np.ndarray) -> None:
    """Record streams += x f32 [n_tok, n_embd], times one weight for each stream."""
    n = g.hp.n_embd
    terms = gated(g, "altup_terms", weights, "none", Part(x, 0, n, N_STREAM, 0))
    mapped(g, terms, streams, add=True)


def _begin(g: Graph) -> None:
    """Record the first streams: the embeddings, and products of them, scaled to the same length."""
    n, streams = g.hp.n_embd, _streams(g, "altup")
    copied(g, whole(g.x), _stream(streams, 0))
    (others,) = linears(g, g.x, g.model.weights.top.altup_proj)
    length = _length(g, g.x)
    for i in range(N_STREAM - 1):
        l2_normed(g, Part(others, n * i, n))
        gate_rows(g, length, "none", Part(others, n * i, n), _stream(streams, i + 1))


def _end(g: Graph, streams: np.ndarray) -> None:
    """Record g.x: the mean of the first stream and the others' products, scaled to its length."""
    n, both = g.hp.n_embd, g.model.weights.top.altup_unembd_proj
    copied(g, _stream(streams, 0), whole(g.x))
    length = _length(g, g.x)
    for i in range(N_STREAM - 1):
        one = gated(g, "altup_scaled", _stream(streams, i + 1), "none")
        (out,) = linears(g, one, both.rows("altup_unembd", n * i, n * (i + 1)))
        l2_normed(g, whole(out))
        gate_rows(g, length, "none", whole(out), whole(one))
        mapped(g, one, g.x, add=True)
    mapped(g, g.x, g.x, outer=1 / N_STREAM)


def _predict(g: Graph, w: Tensors) -> np.ndarray:
    """Record the predicted streams: each plus a mixture of all, with coefficients of the first."""
    streams, found = _streams(g, "altup"), _streams(g, "altup_predicted")
    first = gated(g, "altup_scaled", _stream(streams, 0), "none")
    coefs = _coefficients(g, w, first, w.altup_predict_coef)
    mapped(g, streams, found)
    for i in range(N_STREAM):
        one = gated(g, "altup_scaled", _stream(streams, i), "none")
        _add_each(g, found, Part(coefs, i, 1, N_STREAM, N_STREAM), one)
    return found


def _correct(g: Graph, w: Tensors, predicted: np.ndarray) -> np.ndarray:
    """Record the corrected streams.

    Each predicted stream gets its share of what g.x adds to the first one.
    """
    streams = _streams(g, "altup")
    coefs = _coefficients(g, w, g.x, w.altup_correct_coef)
    more = gated(g, "altup_scaled", _stream(predicted, 0), "none")
    mapped(g, more, more, outer=-1.0)
    mapped(g, g.x, more, add=True)
    mapped(g, predicted, streams)
    _add_each(g, streams, Part(np.ones(N_STREAM, np.float32), 0, 1, N_STREAM, 1), more)
    _add_each(g, streams, Part(coefs, 0, 1, N_STREAM, 1), more)
    return streams


def _streams(g: Graph, name: str) -> np.ndarray:
    return g.ws.rows(name, N_STREAM, g.hp.n_embd)


def _coefficients(g: Graph, w: Tensors, x: np.ndarray, matrix: Tensor) -> np.ndarray:
    """Record the product of the matrix and the router's output for x; f32 [n_tok, n_out]."""
    (routed,) = linears(g, norm(g, x, w.altup_router_norm), w.altup_router)
    mapped(g, routed, routed, "tanh", inner=1 / g.hp.n_embd)
    columns = np.ascontiguousarray(matrix.vector().T)  # product kernels need longer rows than these
    n = columns.size
    each = g.ws.rows("altup_columns", N_STREAM, n // N_STREAM)
    copied(g, Part(columns.reshape(-1), 0, n), Part(each, 0, n))
    found = g.ws.rows("altup_coefs", n // N_STREAM)
    record_sum(g, Mixture(each, routed), found, add=False)
    return found


def _mlp(g: Graph, il: int, h: Source) -> Product:
    """Record the gated feed-forward part; the gates of the first N_SPARSE layers are sparse."""
    w = g.weights(il)
    gate, up = linears(g, h, w.ffn_gate, w.ffn_up)
    if il < N_SPARSE:
        _drop_low(g, gate)
    return linear(g, Source(gate, "gelu", up), w.ffn_down)


def _drop_low(g: Graph, x: np.ndarray) -> None:
    """Record x = relu(x - (mean + DEVIATIONS * standard deviation)) for each row, in place."""
    n = x.shape[1]
    bias = np.full(n, -DEVIATIONS * math.sqrt(n / (n - 1)), np.float32)
    unit = g.ws.rows("gate_normed", n)
    record_layer_norm(g, x, unit, None)
    deviation = _dot(g, x, unit)
    mapped(g, deviation, deviation, outer=1 / n)
    record_layer_norm(g, x, unit, None, bias)
    mapped(g, unit, unit, "relu")
    gate_rows(g, whole(deviation), "none", whole(unit), whole(x))


def _length(g: Graph, x: np.ndarray) -> Part:
    """Record the Euclidean length of each row, f32 [n_tok, 1], which a row is divided by."""
    unit = gated(g, "altup_unit", whole(x), "none")
    l2_normed(g, whole(unit))
    return whole(_dot(g, x, unit))


def _dot(g: Graph, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Record the dot product of each row of x and y, f32 [n_tok, 1]."""
    n = x.shape[1]
    terms = gated(g, f"dot.{n}", whole(x), "none", whole(y))
    (found,) = linears(g, terms, _ones(n))
    return found


@cache
def _ones(n: int) -> Tensor:
    """A matrix of one row of ones, whose product is a sum."""
    return Tensor("dot", QTensor(np.ones(n, np.float32).view(np.uint8), "F32", 1, n))


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {
        "inp_gate": (hp.n_embd_layer, hp.n_embd),
        "proj": (hp.n_embd, hp.n_embd_layer),
        "post_norm": (hp.n_embd,),
        "altup_router": (N_STREAM, hp.n_embd),
        "altup_router_norm": (hp.n_embd,),
        "altup_predict_coef": (N_STREAM * N_STREAM, N_STREAM),
        "altup_correct_coef": (N_STREAM, N_STREAM),
        "altup_correct_scale": (hp.n_embd,),
        "laurel_l": (N_RANK, hp.n_embd),
        "laurel_r": (hp.n_embd, N_RANK),
        "laurel_post_norm": (hp.n_embd,),
    }


def _derived(hp: HParams) -> dict[str, Any]:
    return {
        "attention_scale": 1.0,
        "logit_softcap": 30.0,
        "n_embd_layer": hp.n_embd_layer or 256,
        # as in llama.cpp, whatever number of shared layers the file names
        "n_layer_kv": min(20, hp.n_layer),
    }


ARCH = Arch(
    neox=True,
    activation="gelu",
    scale_embedding=True,
    full_attention_every=5,
    rope_base_window=10000.0,
    layer=layer,
    tensors=tensors,
    keys=(
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "attention.shared_kv_layers",
        "embedding_length_per_layer_input",
    ),
    derived=_derived,
    unread=("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"),
    one_device=True,
)
