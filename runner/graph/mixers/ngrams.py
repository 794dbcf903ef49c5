"""Embeddings of n-grams of tokens, added to each residual stream.

Hashes of the last 2, 3 and more tokens select rows of a table; keys and a value are made from
these. A stream adds the value times its own gate, and a convolution of that.
"""

from collections.abc import Mapping

import numpy as np

from tamis.graph.context import Graph, State
from tamis.graph.linear import linears
from tamis.graph.norm import mapped
from tamis.graph.recurrent import Part, convolved, gated, recurrence, whole
from tamis.graph.streams import normed_streams, streams
from tamis.jit_kernels.contract import ops
from tamis.model.hparams import HParams
from tamis.model.weights import Tensor

LEAST = 1e-6  # the least absolute value of scores


def ngram_tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of a layer's tensors."""
    n, n_stream = hp.n_embd, hp.hyper.n_stream
    norms: tuple[int | str, ...] = (f"{n_stream}|1", f"{n}|{n_stream * n}")
    return {
        "ple_key": (n_stream * n, n),
        "ple_value": (n, n),
        "ple_norm_key": norms,
        "ple_norm_query": norms,
        "ple_norm_conv": norms,
        "ple_conv1d": (n_stream * n, hp.ngrams.n_tap),
    }


def add_ngrams(g: Graph, il: int) -> None:
    """Record the term that is added to all streams before layer il."""
    w, x, n, n_stream = g.weights(il), streams(g), g.hp.n_embd, g.hp.hyper.n_stream
    keys, value = linears(g, _embedded(g, il), w.ple_key, w.ple_value)
    scores = g.ws.rows("ngram_gates", n_stream)
    g.rec.program.add(
        ops.STREAM_GATE,
        step=g.rec.step,
        key=normed_streams(g, keys, w.ple_norm_key, "ngram_keys"),
        query=normed_streams(g, x, w.ple_norm_query, "ngram_queries"),
        y=scores,
        n=n,
        n_stream=n_stream,
        scale=n**-0.5,
        least=LEAST,
    )
    values = Part(value, 0, n, n_stream, 0)  # each stream has the same values
    own = gated(g, "ngram_values", Part(scores, 0, 1, n_stream, 1), "none", values)
    rows = normed_streams(g, own, w.ple_norm_conv, "ngram_normed")
    taps = _spread(w.ple_conv1d, g.hp.ngrams.n_gram)
    out = convolved(g, il, whole(rows), taps, name="ngram_conv")
    flat = x.reshape(len(x), -1)
    mapped(g, own, flat, add=True)
    mapped(g, out, flat, add=True)


def _spread(w: Tensor, apart: int) -> Tensor:
    """Convolution taps that are `apart` positions apart, with zeros in between."""
    taps = w.vector()
    n_tap = (taps.shape[1] - 1) * apart + 1
    spread = np.zeros((len(taps), n_tap), np.float32)
    spread[:, ::apart] = taps
    return Tensor(w.name, spread)


def _embedded(g: Graph, il: int) -> np.ndarray:
    """The table's rows of the n-grams, f32 [n_tok, n_embd]."""
    own, table = g.hp.ngrams, g.model.weights.top.per_layer_token_embd.matrix()
    n_id = (own.n_gram - 1) * own.n_each
    ids, rows = g.ws.ids[:, None], g.ws.rows("ngram_rows", n_id, dtype=np.int32)

    def record(state: State) -> None:
        g.rec.program.add(
            ops.HASH_NGRAMS,
            step=g.rec.step,
            ids=ids,
            state=state("tokens", own.n_gram - 1).view(np.int32),
            rows=rows,
            factors=np.array(own.factors, np.uint64),
            sizes=np.array(own.sizes, np.int64),
            first=np.array(own.first, np.int64),
            n_gram=own.n_gram,
            n_each=own.n_each,
            eos=own.eos,
        )

    recurrence(g, il, [ids], rows, record)
    y = g.ws.rows("ngram_embd", n_id * table.n_in)
    g.rec.program.add(
        ops.EMBED,
        (table.type,),
        step=g.rec.step,
        ids=rows,
        table=table.data,
        y=y,
        n=table.n_in,
        n_id=n_id,
        scale=1.0,
    )
    return y
