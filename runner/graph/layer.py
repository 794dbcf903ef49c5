"""One transformer block, recorded: norm, products, keys; residual, norm, feed-forward, residual."""

import itertools
from typing import NamedTuple

import numpy as np

from tamis.graph.workspace import Workspace
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import KVView, QTensor
from tamis.model.model import Model
from tamis.model.weights import Dense, Experts, Layer
from tamis.select.base import Recording


class Linear(NamedTuple):
    """One matrix product of a group that reads the same rows."""

    w: QTensor
    y: np.ndarray
    bias: np.ndarray | None = None
    add: bool = False
    label: str = ""


class Source(NamedTuple):
    """The rows that products read: x itself, its norm, or x as a gate; see PACK_ROWS."""

    x: np.ndarray
    kind: str = "rows"
    other: np.ndarray | None = None  # the norm's weights, or the branch that is gated
    eps: float = 0.0
    step: np.ndarray | None = None  # which rows of x; all of the recording's where None


def record_linear(rec: Recording, ws: Workspace, rows: Source, products: list[Linear]) -> None:
    """Record y (+)= rows @ w.T + bias for each product; they may run at the same time."""
    for form, group in itertools.groupby(products, lambda p: ops.packed_form(p.w.type)):
        _record_products(rec, ws, rows, form, list(group))


def _record_products(
    rec: Recording, ws: Workspace, rows: Source, form: str, products: list[Linear]
) -> None:
    n_in = products[0].w.n_in
    rec.program.add(
        ops.PACK_ROWS,
        (form, rows.kind),
        step=rec.step if rows.step is None else rows.step,
        x=rows.x,
        other=rows.other,
        packed=ws.packed,
        n=n_in,
        scratch=ws.scratch,
        eps_f=rows.eps,
    )
    for i, p in enumerate(products):
        assert p.w.n_in == n_in
        rec.program.add(
            ops.MATMUL,
            (p.w.type,),
            sync=i == len(products) - 1,
            label=f"matmul {p.w.type} {p.label}".strip(),
            cost=_product_cost(p.w),
            step=rec.step,
            packed=ws.packed,
            w=p.w.data,
            bias=p.bias,
            y=p.y,
            n_in=n_in,
            n_out=p.w.n_out,
            y_stride=p.w.n_out,
            add=int(p.add),
            scratch=ws.scratch,
        )


def _product_cost(w: QTensor) -> Cost:
    """All weights are read once a call."""
    return lambda n_tok, pos: (w.data.nbytes, 2 * w.n_in * w.n_out * n_tok)


def _expert_cost(w: QTensor, share: float) -> Cost:
    """Each token reads its share of the experts."""
    n_bytes, n_flop = int(share * w.data.nbytes), int(share * 2 * w.n_in * w.n_out)
    return lambda n_tok, pos: (n_tok * n_bytes, n_tok * n_flop)


def record_norm(
    rec: Recording,
    model: Model,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    *,
    rows_per_tok: int = 1,
    add: bool = False,
) -> None:
    """Y = (y +) rms_norm(x) * w, over rows of len(w) elements."""
    rec.program.add(
        ops.RMS_NORM,
        (int(add),),
        step=rec.step,
        x=x,
        w=w,
        y=y,
        n=len(w),
        rows_per_tok=rows_per_tok,
        eps_f=model.hp.rms_eps,
    )


def normed(model: Model, x: np.ndarray, w: np.ndarray, step: np.ndarray | None = None) -> Source:
    """The rows rms_norm(x) * w."""
    return Source(x, "norm", w, model.hp.rms_eps, step)


def record_products(rec: Recording, model: Model, ws: Workspace, layer: int) -> None:
    """Record layer `layer` from ws.x to ws.q, ws.k and ws.v."""
    w = model.weights.blk[layer]
    products = [
        Linear(w.attn_q, ws.q, w.attn_q_bias, label="attn_q"),
        Linear(w.attn_k, ws.k, w.attn_k_bias, label="attn_k"),
        Linear(w.attn_v, ws.v, w.attn_v_bias, label="attn_v"),
    ]
    record_linear(rec, ws, normed(model, ws.x, w.attn_norm), products)


def record_keys(rec: Recording, model: Model, ws: Workspace, layer: int, kv: KVView) -> None:
    """Record norm and turn of ws.q and ws.k, and that ws.k and ws.v go to the pages."""
    hp, w = model.hp, model.weights.blk[layer]
    table = 1 if model.window(layer) else 0
    rec.program.add(
        ops.ROPE_APPEND,
        (hp.head_dim, int(model.arch.neox), *kv.types),
        step=rec.step,
        q=ws.q,
        k=ws.k,
        v=ws.v,
        q_norm=w.attn_q_norm,
        k_norm=w.attn_k_norm,
        cos=ws.cos[table],
        sin=ws.sin[table],
        k_pages=kv.k,
        v_pages=kv.v,
        k_table=kv.k_table,
        v_table=kv.v_table,
        n_head=hp.n_head,
        n_head_kv=hp.n_head_kv,
        n_half=hp.n_rot // 2,
        eps_f=hp.rms_eps,
    )


def record_update(rec: Recording, model: Model, ws: Workspace, layer: int) -> None:
    """Record layer `layer` from attention's output in ws.att on, which adds to ws.x."""
    w = model.weights.blk[layer]
    closed = w.post_attention_norm
    out = Linear(
        w.attn_output, ws.x if closed is None else ws.branch, w.attn_output_bias, closed is None
    )
    record_linear(rec, ws, Source(ws.att), [out._replace(label="attn_output")])
    if closed is not None:
        record_norm(rec, model, ws.branch, closed, ws.x, add=True)
    if isinstance(w.ffn, Dense):
        _record_dense(rec, model, ws, w, w.ffn)
    else:
        _record_experts(rec, model, ws, w, w.ffn)


def _record_dense(rec: Recording, model: Model, ws: Workspace, layer: Layer, ffn: Dense) -> None:
    products = [
        Linear(ffn.gate, ws.gate, label="ffn_gate"),
        Linear(ffn.up, ws.up, label="ffn_up"),
    ]
    record_linear(rec, ws, normed(model, ws.x, layer.ffn_norm), products)
    closed = layer.post_ffw_norm
    down = Linear(ffn.down, ws.x if closed is None else ws.branch, add=closed is None)
    gated = Source(ws.gate, model.arch.activation, ws.up)
    record_linear(rec, ws, gated, [down._replace(label="ffn_down")])
    if closed is not None:
        record_norm(rec, model, ws.branch, closed, ws.x, add=True)


def _record_experts(
    rec: Recording, model: Model, ws: Workspace, layer: Layer, ffn: Experts
) -> None:
    hp = model.hp
    record_norm(rec, model, ws.x, layer.ffn_norm, ws.xn)
    record_linear(rec, ws, Source(ws.xn), [Linear(ffn.router, ws.route, label="router")])
    rec.program.add(
        ops.MOE_ROUTE,
        step=rec.step,
        logits=ws.route,
        ids=ws.expert_ids,
        weights=ws.expert_weights,
        n_expert=hp.n_expert,
        n_used=hp.n_expert_used,
        norm=int(model.arch.normalize_experts),
    )
    _record_expert_linear(rec, model, ws, ws.xn, [(ffn.gate, ws.gate), (ffn.up, ws.up)])
    n = hp.n_expert_used * hp.n_ff_expert
    rec.program.add(
        ops.GATE, (model.arch.activation,), step=rec.step, gate=ws.gate, up=ws.up, y=ws.gate, n=n
    )
    _record_expert_linear(rec, model, ws, ws.gate, [(ffn.down, ws.down)])
    rec.program.add(
        ops.MOE_SUM,
        step=rec.step,
        x=ws.down,
        weights=ws.expert_weights,
        y=ws.x,
        n=hp.n_embd,
        n_used=hp.n_expert_used,
    )


def _record_expert_linear(
    rec: Recording,
    model: Model,
    ws: Workspace,
    x: np.ndarray,
    products: list[tuple[QTensor, np.ndarray]],
) -> None:
    """y[slot] = x @ w[expert of slot].T; x has one row a token, or one a slot (ws.gate)."""
    hp, per_slot = model.hp, x is ws.gate
    for w, y in products:
        rec.program.add(
            ops.MOE_MATMUL,
            (w.type,),
            label=f"moe_matmul {w.type}",
            cost=_expert_cost(w, hp.n_expert_used / hp.n_expert),
            step=rec.step,
            x=x,
            w=w.data,
            ids=ws.expert_ids,
            y=y,
            n_in=w.n_in,
            n_out=w.n_out // hp.n_expert,
            n_used=hp.n_expert_used,
            n_expert=hp.n_expert,
            x_per_slot=int(per_slot),
            scratch=ws.scratch,
        )
