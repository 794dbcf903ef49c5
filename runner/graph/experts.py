"""Mixture of experts: routing, the chosen experts' products, their weighted sum."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.linear import Product, linear, linears
from tamis.graph.recurrent import Part, gate_rows, gated, whole
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.op import N_TOK
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.weights import Tensor

PACKED = ("silu", "gelu")  # activations that GATE supports


class Mixture(NamedTuple):
    """The chosen experts' outputs; their weighted sum is recorded once its use is known."""

    x: np.ndarray  # f32 [n_tok, n_used, n_embd]
    weights: np.ndarray  # f32 [n_tok, n_used]


class Chosen(NamedTuple):
    """The experts of each row, and the weights of their outputs."""

    ids: np.ndarray  # int32 [n_tok, n_used]
    weights: np.ndarray  # f32 [n_tok, n_used]


def experts(g: Graph, il: int, x: np.ndarray) -> Mixture:
    """The n_expert_used best gated feed-forward parts for each row of x, f32 [n_tok, n_embd]."""
    w = g.weights(il)
    (logits,) = linears(g, x, w.ffn_gate_inp)
    table = w.ffn_gate_tid2eid if il < g.hp.n_hash else None
    return chosen_experts(g, il, x, route(g, logits, w.exp_probs_b, table))


def chosen_experts(g: Graph, il: int, x: np.ndarray, chosen: Chosen) -> Mixture:
    """The feed-forward parts chosen for each row of x, f32 [n_tok, n_embd]."""
    w = g.weights(il)
    return Mixture(
        _products(g, _hidden(g, il, x, chosen.ids), w.ffn_down_exps, chosen.ids), chosen.weights
    )


def shared_expert(g: Graph, il: int, x: np.ndarray) -> Product:
    """The shared expert: a gated feed-forward part that every row of x reads.

    It is multiplied by the sigmoid of its own gate, if it has one.
    """
    w, arch = g.weights(il), g.model.arch
    if not arch.gated:
        (up,) = linears(g, x, w.ffn_up_shexp)
        return linear(g, gated(g, "shexp", whole(up), arch.activation), w.ffn_down_shexp)
    limit = limit_of(g.hp.clamp_shared, il)
    if not w.ffn_gate_inp_shexp:
        gate, up = linears(g, x, w.ffn_gate_shexp, w.ffn_up_shexp)
        return linear(g, activated(g, gate, up, limit), w.ffn_down_shexp)
    gate, up, share = linears(
        g, x, w.ffn_gate_shexp, w.ffn_up_shexp, _as_matrix(w.ffn_gate_inp_shexp)
    )
    hidden = activated(g, gate, up, limit)
    shared = gated(g, "shexp_gated", whole(share), "sigmoid", whole(hidden))
    return linear(g, shared, w.ffn_down_shexp)


def _as_matrix(tensor: Tensor) -> Tensor:
    """A vector as a matrix of one row."""
    row = tensor.vector()
    return replace(tensor, data=QTensor(row.view(np.uint8), "F32", 1, len(row)))


def _hidden(g: Graph, il: int, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The input of the chosen experts' last product, f32 [n_tok, n_used, n_ff]."""
    w, limit = g.weights(il), limit_of(g.hp.clamp_experts, il)
    if w.ffn_gate_up_exps:
        both, n = _products(g, x, w.ffn_gate_up_exps, ids), g.hp.n_ff_expert
        n_used = both.shape[1]
        gates, ups = (Part(both, first, n, n_used, 2 * n) for first in (0, n))
        name = w.ffn_gate_exps.label
        if not limit and not g.model.arch.clamp_always:
            hidden = gated(g, name, gates, g.model.arch.activation, ups)
            return hidden.reshape(-1, n_used, n)
        gate, up = gated(g, name, gates, "none"), gated(g, w.ffn_up_exps.label, ups, "none")
        return activated(g, gate, up, limit).reshape(-1, n_used, n)
    if not g.model.arch.gated:
        up = _products(g, x, w.ffn_up_exps, ids)
        hidden = gated(g, w.ffn_gate_exps.label, whole(up), g.model.arch.activation)
        return hidden.reshape(up.shape)
    gate, up = (_products(g, x, tensor, ids) for tensor in (w.ffn_gate_exps, w.ffn_up_exps))
    return activated(g, gate, up, limit)


def limit_of(clamps: tuple[float, ...], il: int) -> float:
    """Of layer il: what its gates are clamped to; 0: nothing."""
    return clamps[il] if clamps else 0.0


def activated(g: Graph, gate: np.ndarray, up: np.ndarray, limit: float) -> np.ndarray:
    """The gate's activation times up, both f32 [n_tok, ...]; it overwrites the gate."""
    arch = g.model.arch
    limit = limit or arch.clamp_always
    fields: dict[str, Any] = {
        "step": g.rec.step,
        "gate": gate,
        "up": up,
        "y": gate,
        "n": gate[0].size,
    }
    if limit:
        g.rec.program.add(ops.GATE_CLAMPED, (arch.clamp,), **fields, limit=limit)
    elif arch.activation in PACKED:
        g.rec.program.add(ops.GATE, (arch.activation,), **fields)
    else:
        gate_rows(g, whole(gate), arch.activation, whole(up), whole(gate))
    return gate


def record_sum(g: Graph, mixture: Mixture, y: np.ndarray, *, add: bool) -> None:
    """Record that y (+)= the weighted sum of the experts' outputs, f32 [n_tok, n_embd]."""
    _, n_used, n = mixture.x.shape
    g.rec.program.add(
        ops.MOE_SUM,
        step=g.rec.step,
        x=mixture.x,
        weights=mixture.weights,
        y=y,
        n=n,
        n_used=n_used,
        add=int(add),
    )


def route(g: Graph, logits: np.ndarray, bias: Tensor, table: Tensor | None = None) -> Chosen:
    """The experts of each row: the best by logits, or by scores plus a bias.

    table: int32 [n_vocab, n_expert_used], the experts of each token, if they depend only on it.
    """
    n_used, routing, arch = g.hp.n_expert_used, g.hp.routing, g.model.arch
    chosen = Chosen(
        g.ws.rows("expert_ids", n_used, dtype=np.int32), g.ws.rows("expert_weights", n_used)
    )
    added = bias.bias()
    if added is None and bias:
        added = bias.vector()
    has_keys = added is not None or routing.n_group > 1
    norm = arch.normalize_experts if routing.norm is None else routing.norm
    g.rec.program.add(
        ops.MOE_ROUTE,
        (routing.score or arch.score_experts,),
        step=g.rec.step,
        logits=logits,
        bias=added,
        keys=g.ws.rows("expert_keys", g.hp.n_expert) if has_keys else None,
        tokens=None if table is None else g.ws.ids,
        table=None if table is None else table.vector(),
        ids=chosen.ids,
        weights=chosen.weights,
        n_expert=g.hp.n_expert,
        n_used=n_used,
        n_group=routing.n_group,
        n_group_used=routing.n_group_used,
        norm=int(norm),
        scale=routing.scale,
    )
    return chosen


def weighed(g: Graph, chosen: Chosen, factors: np.ndarray) -> Chosen:
    """The same choice with each expert's weight times its own factor; factors f32 [n_expert]."""
    own = _factors(g, factors, chosen.ids)
    return chosen._replace(
        weights=gated(g, "expert_shares", whole(own), "none", whole(chosen.weights))
    )


def _factors(g: Graph, factors: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The factor of each slot, f32 [n_tok, n_used]; factors f32 [n_expert]."""
    n_used = ids.shape[1]
    own = g.ws.rows("expert_factors", n_used)
    fields: dict[str, Any] = {"step": g.rec.step, "y": own}
    g.rec.program.add(ops.MAP_ROWS, ("none", 0), x=own, n=n_used, inner=0.0, outer=0.0, **fields)
    g.rec.program.add(ops.MOE_BIAS, bias=factors, ids=ids, n=1, n_used=n_used, **fields)
    return own


def _products(g: Graph, x: np.ndarray, tensor: Tensor, ids: np.ndarray) -> np.ndarray:
    """The products y[slot] = x @ w[expert of slot].T + its bias.

    `x` has one row per token or slot.
    """
    y = products(g, x, tensor, ids, g.hp.n_expert)
    if (bias := tensor.bias()) is not None:
        g.rec.program.add(
            ops.MOE_BIAS,
            step=g.rec.step,
            bias=bias,
            ids=ids,
            y=y,
            n=y.shape[2],
            n_used=y.shape[1],
        )
    return y


def products(g: Graph, x: np.ndarray, tensor: Tensor, ids: np.ndarray, n_matrix: int) -> np.ndarray:
    """The products y[slot] = x @ w[ids of slot].T, f32 [n_tok, n_used, n_out].

    w: n_matrix matrices. x has one row per token or per slot; ids int32 [n_tok, n_used].
    """
    w, n_used = tensor.matrix(), ids.shape[1]
    n_out = w.n_out // n_matrix
    y = g.ws.rows(tensor.label, n_used, n_out)
    watch = tensor.watch
    if watch is not None:

        def show() -> None:
            n = int(g.rec.step[N_TOK])
            watch(tensor.whole, np.asarray(x)[:n], np.asarray(ids)[:n])

        g.rec.program.pause(show)
    g.rec.program.add(
        ops.MOE_MATMUL,
        (w.type,),
        label=f"moe_matmul {w.type}",
        cost=_cost(w, n_used / n_matrix),
        step=g.rec.step,
        x=x,
        w=w.data,
        ids=ids,
        y=y,
        n_in=w.n_in,
        n_out=n_out,
        n_used=n_used,
        n_expert=n_matrix,
        x_per_slot=x.ndim - 2,
        scratch=g.ws.experts(w.n_in, n_used, n_matrix),
    )
    if (scale := tensor.scale()) is not None:
        each = scale if scale.size == n_matrix else np.repeat(scale, n_matrix)
        rows = Part(y, 0, n_out, n_used, n_out)
        gate_rows(g, Part(_factors(g, each, ids), 0, 1, n_used, 1), "none", rows, rows)
    return y


def _cost(w: QTensor, share: float) -> Cost:
    """The cost of products: each token reads its share of the matrices."""
    n_bytes, n_flop = int(share * w.data.nbytes), int(share * 2 * w.n_in * w.n_out)
    return lambda n_tok, pos: (n_tok * n_bytes, n_tok * n_flop)
