"""Norms, and what a layer adds to the residual stream."""

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.experts import Mixture, record_sum
from tamis.graph.linear import Product, Source, added, stored
from tamis.jit_kernels.contract import ops
from tamis.model.weights import Tensor

Branch = Product | Source | Mixture  # a layer's part, before it is added to the residual stream


def norm(g: Graph, x: np.ndarray, w: Tensor, step: np.ndarray | None = None) -> Source:
    """The rows rms_norm(x) * w, computed by whatever reads them.

    step: which rows of x; all of the recording's where None.
    """
    return Source(x, "norm", w.vector, g.hp.rms_eps, step)


def normed(g: Graph, branch: Branch, w: Tensor) -> Branch:
    """The norm of a layer's part; the part itself where the model has no such norm."""
    if not w and w.optional:
        return branch
    assert isinstance(branch, Product), "only a product's norm is written"
    return norm(g, stored(g, branch, g.ws.rows("branch", g.hp.n_embd)), w)


def add(g: Graph, branch: Branch) -> None:
    """Record g.x += branch."""
    if isinstance(branch, Product):
        added(g, branch, g.x)
    elif isinstance(branch, Mixture):
        record_sum(g, branch, g.x)
    else:
        record_norm(g, branch, g.x, add=True)


def record_norm(g: Graph, rows: Source, y: np.ndarray, *, add: bool = False) -> np.ndarray:
    """Y = (y +) rows, which are a norm."""
    assert rows.kind == "norm"
    assert rows.other is not None
    g.rec.program.add(
        ops.RMS_NORM,
        (int(add),),
        step=g.rec.step,
        x=rows.x,
        w=rows.other,
        y=y,
        n=len(rows.other),
        rows_per_tok=1,
        eps=rows.eps,
    )
    return y
