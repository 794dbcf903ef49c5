"""Norms, and the additions to the residual stream."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.experts import Mixture, record_sum
from tamis.graph.linear import Product, Source, added, stored
from tamis.jit_kernels.contract import ops
from tamis.model.weights import Tensor

# A layer's part, before it is added to the residual stream; a tuple is the sum of several.
Branch = Product | Source | Mixture | tuple[Product | Source | Mixture, ...]


def norm(
    g: Graph, x: np.ndarray, w: Tensor, step: np.ndarray | None = None, *, eps: float = 0.0
) -> Source:
    """The rows norm(x) * w; an RMS norm is computed by the ops that read them.

    step: which rows of x; None: all of the recording's. A LayerNorm, and a norm with a bias, is
    computed now, into a buffer of the tensor's name. eps: 0: the model's.
    """
    arch, n = g.model.arch, x.shape[1]
    if arch.norm == "layer":
        y = g.ws.rows(w.label, n)
        record_layer_norm(g, x, y, w.vector() if arch.weighted else None, w.bias(), step=step)
        return Source(y)
    weights = w.vector() if arch.weighted else ones(n)
    rows = Source(x, "norm", weights, eps or g.hp.rms_eps, step)
    if not arch.norm_bias or (bias := w.bias()) is None:
        return rows
    y = record_norm(g, rows, g.ws.rows(w.label, n))
    record_row_added(g, y, bias, step)
    return Source(y)


@cache
def ones(n: int) -> np.ndarray:
    """The weights of a norm without weights."""
    return np.ones(n, np.float32)


def norm_rows(g: Graph, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> None:
    """Record the norm of x f32 [n_tok, n], in place; w f32 [n], or one for each run of a row."""
    if g.model.arch.norm == "layer":
        record_layer_norm(g, x, x, w, bias)
    else:
        record_norm(g, Source(x, "norm", w, g.hp.rms_eps), x)


def record_layer_norm(
    g: Graph,
    x: np.ndarray,
    y: np.ndarray,
    w: np.ndarray | None,
    bias: np.ndarray | None = None,
    *,
    step: np.ndarray | None = None,
    eps: float | None = None,
) -> None:
    """Record y = LayerNorm of x; w f32 [n], or [runs of a row, n]."""
    n = x.shape[1] if w is None else w.shape[-1]
    g.rec.program.add(
        ops.LAYER_NORM,
        step=g.rec.step if step is None else step,
        x=x,
        w=w,
        bias=bias,
        y=y,
        n=n,
        rows_per_tok=x.shape[1] // n,
        w_step=0 if w is None or w.ndim == 1 else n,
        eps=g.hp.rms_eps if eps is None else eps,
    )


def record_rows_added(g: Graph, table: np.ndarray) -> None:
    """Record g.x += the table's rows at its positions.

    A table f32 [1, n_embd] is one row for all.
    """
    n = table.shape[1]
    g.rec.program.add(
        ops.ADD_POSITIONS, step=g.rec.step, x=g.x, table=table, n=n, stride=n * (len(table) > 1)
    )


def record_row_added(
    g: Graph, x: np.ndarray, row: np.ndarray, step: np.ndarray | None = None
) -> None:
    """Record x += one row, for all rows of x; f32 [n_tok, n] and [n]."""
    step = g.rec.step if step is None else step
    g.rec.program.add(ops.ADD_POSITIONS, step=step, x=x, table=row, n=row.size, stride=0)


def mapped(
    g: Graph, x: np.ndarray, y: np.ndarray, activation: str = "none", *,
    inner: float = 1.0, outer: float = 1.0, add: bool = False,
) -> np.ndarray:  # fmt: skip
    """Record y = (y +) outer * activation(inner * x); both f32 [n_tok, n], y may be x."""
    g.rec.program.add(
        ops.MAP_ROWS,
        (activation, int(add)),
        step=g.rec.step,
        x=x,
        y=y,
        n=x[0].size,
        inner=inner,
        outer=outer,
    )
    return y


def normed(g: Graph, branch: Branch, w: Tensor) -> Branch:
    """The norm of a layer's branch; unchanged if the model has no such norm."""
    if not w and w.optional:
        return branch
    return norm_of(g, branch, w)


def norm_of(g: Graph, branch: Branch, w: Tensor, *, eps: float = 0.0) -> Source:
    """The norm of a layer's part; eps 0: the model's."""
    return norm(g, summed(g, branch, g.ws.rows("branch", g.hp.n_embd)), w, eps=eps)


def written(g: Graph, branch: Branch) -> np.ndarray:
    """The rows of a layer's part, f32 [n_tok, n_embd], stored in a buffer."""
    if isinstance(branch, Source) and branch.kind == "rows":
        return branch.x
    return summed(g, branch, g.ws.rows("written", g.hp.n_embd))


def add(g: Graph, branch: Branch) -> None:
    """Record g.x += branch, times the model's residual scale."""
    scale = g.hp.residual_scale
    for part in _parts(branch):
        if isinstance(part, Mixture):
            if scale:
                mapped(g, part.weights, part.weights, outer=scale)
            record_sum(g, part, g.x, add=True)
        elif scale:
            mapped(g, written(g, part), g.x, outer=scale, add=True)
        else:
            _record_add(g, part, g.x)


def summed(g: Graph, branch: Branch, y: np.ndarray) -> np.ndarray:
    """Record y, f32 [n_tok, n_embd], as the sum of a layer's part."""
    for i, part in enumerate(_parts(branch)):
        if isinstance(part, Mixture):
            record_sum(g, part, y, add=i > 0)
        elif i > 0:
            _record_add(g, part, y)
        elif isinstance(part, Product):
            stored(g, part, y)
        else:
            record_norm(g, part, y)
    return y


def _parts(branch: Branch) -> Sequence[Any]:
    return [branch] if isinstance(branch, Product | Source | Mixture) else branch


def _record_add(g: Graph, part: Product | Source, y: np.ndarray) -> None:
    if isinstance(part, Product):
        added(g, part, y)
    elif part.kind == "rows":
        mapped(g, part.x, y, add=True)
    else:
        record_norm(g, part, y, add=True)


def record_norm(g: Graph, rows: Source, y: np.ndarray, *, add: bool = False) -> np.ndarray:
    """Record y = (y +) rows, which are a norm."""
    assert rows.kind == "norm"
    assert rows.other is not None
    g.rec.program.add(
        ops.RMS_NORM,
        (int(add),),
        step=g.rec.step if rows.step is None else rows.step,
        x=rows.x,
        w=rows.other,
        y=y,
        n=len(rows.other),
        rows_per_tok=1,
        x_stride=len(rows.other),
        y_stride=len(rows.other),
        eps=rows.eps,
    )
    return y
