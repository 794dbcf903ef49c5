"""Mixture of experts: routing, the chosen experts' products, their weighted sum."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.linear import Product, linear, linears
from tamis.graph.recurrent import Part, gated, whole
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.weights import Tensor, Tensors


class Mixture(NamedTuple):
    """The chosen experts' outputs, whose weighted sum is recorded where it is known what for."""

    x: np.ndarray  # f32 [n_tok, n_used, n_embd]
    weights: np.ndarray  # f32 [n_tok, n_used]


class _Chosen(NamedTuple):
    ids: np.ndarray  # int32 [n_tok, n_used]
    weights: np.ndarray  # f32 [n_tok, n_used]


def experts(g: Graph, x: np.ndarray, w: Tensors) -> Mixture:
    """The n_expert_used best gated feed-forward parts of each row of x, f32 [n_tok, n_embd]."""
    (logits,) = linears(g, x, w.ffn_gate_inp)
    chosen = _route(g, logits)
    return Mixture(
        _products(g, _gated(g, x, w, chosen.ids), w.ffn_down_exps, chosen.ids), chosen.weights
    )


def shared_expert(g: Graph, x: np.ndarray, w: Tensors) -> Product:
    """The gated feed-forward part that every row of x reads, times the sigmoid of its own gate."""
    gate, up, share = linears(
        g, x, w.ffn_gate_shexp, w.ffn_up_shexp, _as_matrix(w.ffn_gate_inp_shexp)
    )
    hidden = gated(g, "shexp", whole(gate), g.model.arch.activation, whole(up))
    shared = gated(g, "shexp_gated", whole(share), "sigmoid", whole(hidden))
    return linear(g, shared, w.ffn_down_shexp)


def _as_matrix(tensor: Tensor) -> Tensor:
    """A vector as a matrix of one row."""
    row = tensor.vector
    return replace(tensor, data=QTensor(row.view(np.uint8), "F32", 1, len(row)))


def _gated(g: Graph, x: np.ndarray, w: Tensors, ids: np.ndarray) -> np.ndarray:
    """What the chosen experts' last product reads, f32 [n_tok, n_used, n_ff]."""
    if "ffn_gate_up_exps" in w and w.ffn_gate_up_exps:
        both, n = _products(g, x, w.ffn_gate_up_exps, ids), g.hp.n_ff_expert
        n_used = both.shape[1]
        gates, ups = (Part(both, first, n, n_used, 2 * n) for first in (0, n))
        name = w.ffn_gate_exps.label
        return gated(g, name, gates, g.model.arch.activation, ups).reshape(-1, n_used, n)
    gate, up = (_products(g, x, tensor, ids) for tensor in (w.ffn_gate_exps, w.ffn_up_exps))
    g.rec.program.add(
        ops.GATE,
        (g.model.arch.activation,),
        step=g.rec.step,
        gate=gate,
        up=up,
        y=gate,
        n=gate[0].size,
    )
    return gate


def record_sum(g: Graph, mixture: Mixture, y: np.ndarray) -> None:
    """Record that the weighted sum of the experts' outputs is added to y f32 [n_tok, n_embd]."""
    _, n_used, n = mixture.x.shape
    g.rec.program.add(
        ops.MOE_SUM,
        step=g.rec.step,
        x=mixture.x,
        weights=mixture.weights,
        y=y,
        n=n,
        n_used=n_used,
    )


def _route(g: Graph, logits: np.ndarray) -> _Chosen:
    n_used = g.hp.n_expert_used
    chosen = _Chosen(
        g.ws.rows("expert_ids", n_used, dtype=np.int32), g.ws.rows("expert_weights", n_used)
    )
    g.rec.program.add(
        ops.MOE_ROUTE,
        step=g.rec.step,
        logits=logits,
        ids=chosen.ids,
        weights=chosen.weights,
        n_expert=g.hp.n_expert,
        n_used=n_used,
        norm=int(g.model.arch.normalize_experts),
    )
    return chosen


def _products(g: Graph, x: np.ndarray, tensor: Tensor, ids: np.ndarray) -> np.ndarray:
    """y[slot] = x @ w[expert of slot].T; x has one row a token, or one a slot."""
    hp, w = g.hp, tensor.matrix
    n_out = w.n_out // hp.n_expert
    y = g.ws.rows(tensor.label, hp.n_expert_used, n_out)
    g.ws.packed_rows(w.n_in)  # scratch is sized by the widest row
    g.rec.program.add(
        ops.MOE_MATMUL,
        (w.type,),
        label=f"moe_matmul {w.type}",
        cost=_cost(w, hp.n_expert_used / hp.n_expert),
        step=g.rec.step,
        x=x,
        w=w.data,
        ids=ids,
        y=y,
        n_in=w.n_in,
        n_out=n_out,
        n_used=hp.n_expert_used,
        n_expert=hp.n_expert,
        x_per_slot=x.ndim - 2,
        scratch=g.ws.scratch,
    )
    return y


def _cost(w: QTensor, share: float) -> Cost:
    """Each token reads its share of the experts."""
    n_bytes, n_flop = int(share * w.data.nbytes), int(share * 2 * w.n_in * w.n_out)
    return lambda n_tok, pos: (n_tok * n_bytes, n_tok * n_flop)
