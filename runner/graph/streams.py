"""Several residual streams, and a mix of earlier residuals.

Hyper-connections (Zhu et al. 2024, arXiv 2409.19606; manifold-constrained: arXiv 2512.24880): a
token has some streams of n_embd elements. A part of a layer reads a weighted sum of them and its
output is added to each; the weights of both are made from the streams themselves.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tamis.graph.attention import norm_heads
from tamis.graph.context import Graph
from tamis.graph.experts import Mixture, record_sum
from tamis.graph.linear import Source, linears
from tamis.graph.norm import Branch, mapped, ones, written
from tamis.graph.recurrent import Part, copied, gate_rows, gated, whole
from tamis.jit_kernels.contract import ops
from tamis.model.hparams import HParams
from tamis.model.weights import Tensor


def stream_tensors(hp: HParams, *, combined: bool) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors; combined: whether streams are also mixed with each other."""
    n = hp.hyper.n_stream
    n_mix = n * (2 + n * combined)
    return {
        f"hc_{part}_{name}": shape
        for part in ("attn", "ffn")
        for name, shape in (
            ("fn", (n_mix, n * hp.n_embd)),
            ("base", (n_mix,)),
            ("scale", (2 + combined,)),
        )
    }


class Streams(NamedTuple):
    """A layer's part in progress: the streams, and the weights that add its output to them."""

    x: np.ndarray  # f32 [n_tok, n_stream, n_embd]
    post: np.ndarray  # f32 [n_tok, n_stream]
    comb: np.ndarray | None  # f32 [n_tok, n_stream, n_stream]: from one stream to another


def streams(g: Graph, name: str = "streams") -> np.ndarray:
    """The streams, f32 [n_tok, n_stream, n_embd]."""
    return g.ws.rows(name, g.hp.hyper.n_stream, g.hp.n_embd)


def begin_streams(g: Graph) -> None:
    """Record that all streams are g.x."""
    x, n = streams(g), g.hp.n_embd
    for i in range(x.shape[1]):
        copied(g, whole(g.x), Part(x, i * n, n))


def read_streams(g: Graph, fn: Tensor, scale: Tensor, base: Tensor) -> Streams:
    """Record g.x as the input of a part of a layer: a weighted sum of the streams."""
    hyper, x = g.hp.hyper, streams(g)
    n = hyper.n_stream
    has_post, has_comb = fn.matrix().n_out > n, fn.matrix().n_out > 2 * n
    flat = x.reshape(len(x), -1)
    (mixes,) = linears(g, Source(flat, "norm", ones(flat.shape[1]), g.hp.rms_eps), fn)
    pre, post = g.ws.rows("stream_pre", n), g.ws.rows("stream_post", n)
    comb = g.ws.rows("stream_comb", n, n) if has_comb else None
    g.rec.program.add(
        ops.STREAM_WEIGHTS,
        step=g.rec.step,
        mixes=mixes,
        scale=scale.vector(),
        base=base.vector(),
        pre=pre,
        post=post if has_post else None,
        comb=comb,
        n_mix=fn.matrix().n_out,
        n=n,
        n_turn=hyper.n_turn,
        eps=hyper.eps,
        magnitude=hyper.magnitude,
        post_eps=0.0 if has_comb else hyper.eps,
    )
    record_sum(g, Mixture(x, pre), g.x, add=False)
    return Streams(x, post, comb)


def read_mean(g: Graph) -> None:
    """Record that g.x is the mean of the streams."""
    x = streams(g)
    even = np.full(x.shape[:2], 1 / x.shape[1], np.float32)
    record_sum(g, Mixture(x, even), g.x, add=False)


def write_streams(g: Graph, own: Streams, branch: Branch) -> None:
    """Record the addition of a part's output to its streams."""
    _, n_stream, n = own.x.shape
    to = own.x if own.comb is None else streams(g, "streams_new")
    g.rec.program.add(
        ops.STREAM_MIX,
        step=g.rec.step,
        x=own.x,
        b=written(g, branch),
        post=own.post,
        comb=own.comb,
        y=to,
        n=n,
        n_stream=n_stream,
    )
    if to is not own.x:
        mapped(g, to, own.x)


def record_residual_mix(g: Graph, rows: np.ndarray, n_row: int, w: Tensor) -> None:
    """Record g.x = a mean of the first n_row of rows, weighted by scores.

    rows: f32 [n_tok, n, n_embd].
    """
    g.rec.program.add(
        ops.RESIDUAL_MIX,
        step=g.rec.step,
        x=rows,
        w=w.vector(),
        y=g.x,
        n=rows.shape[2],
        n_row=n_row,
        stride=rows.shape[1] * rows.shape[2],
        eps=g.hp.rms_eps,
    )


def gated_stream_tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of a layer's tensors if each element of the streams has a gate."""
    n_stream, n_embd, n_low = hp.hyper.n_stream, hp.n_embd, hp.hyper.n_low
    n = n_stream * n_embd
    return {
        f"hc_{part}_{name}": shape
        for part in ("attn", "ffn")
        for name, shape in (
            ("norm", (f"{n_stream}|1", f"{n_embd}|{n}")),
            ("down", (n_low, n)),
            ("up", (n, n_low)),
            ("inject", (n_stream, n)),
        )
    }


def normed_streams(g: Graph, x: np.ndarray, w: Tensor, name: str) -> np.ndarray:
    """The norm of each stream of x, by weights of its own, f32 [n_tok, n_stream * n_embd]."""
    n, n_stream, y = g.hp.n_embd, g.hp.hyper.n_stream, g.ws.rows(name, x[0].size)
    copied(g, whole(x), Part(y, 0, x[0].size))
    norm_heads(g, y.reshape(len(y), n_stream, n), ones(n))
    gate_rows(g, Part(w.vector().reshape(-1), 0, x[0].size), "none", whole(y), whole(y))
    return y


def read_gated_streams(
    g: Graph, w_norm: Tensor, down: Tensor, up: Tensor, inject: Tensor | None = None
) -> Streams:
    """Record g.x as the mean of the normed streams, each element times its gate.

    inject: makes the weights by which each stream is written.
    """
    x, n_stream = streams(g), g.hp.hyper.n_stream
    rows = normed_streams(g, x, w_norm, "streams_normed")
    low, *others = linears(g, rows, down, *([] if inject is None else [inject]))
    mapped(g, low, low, "silu", inner=1 / n_stream)
    (gates,) = linears(g, low, up)
    mixed = gated(g, "streams_gated", whole(gates), "sigmoid", whole(rows)).reshape(x.shape)
    even = np.full(x.shape[:2], 1 / n_stream, np.float32)
    record_sum(g, Mixture(mixed, even), g.x, add=False)
    for post in others:
        mapped(g, post, post, "sigmoid", inner=1 / n_stream, outer=2.0)
    return Streams(x, others[0] if others else x, None)
