"""Attention of a layer: rotate and append, select, attend, correct, observe; if asked, audit."""

import math

import numpy as np

from tamis.graph.audit import Audit, Queries
from tamis.graph.context import Graph, Heads
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import ATTEND, AUDIT, SELECT, Cost
from tamis.jit_kernels.contract.types import KVView
from tamis.model.weights import Tensor
from tamis.select.base import Recording, Rows, SelectorState

PREFILL_Q_BLOCK = 16  # queries that share a row of a Selection in prefill


def rope(g: Graph, layer: int, x: np.ndarray, w_norm: Tensor) -> Heads:
    """Heads of x f32 [n_tok, n_head * head_dim], normed where there is such a norm, and rotated.

    Not rotated in the layers that the architecture leaves without positions. `append` does both.
    """
    heads, nope_every = x.reshape(len(x), -1, g.hp.head_dim), g.model.arch.nope_every
    norm = w_norm.vector if w_norm else None
    if nope_every and (layer + 1) % nope_every == 0:
        return Heads(heads, norm)
    return Heads(heads, norm, g.angles(g.model.rope_of(layer)))


def append(g: Graph, layer: int, q: Heads, k: Heads, v: np.ndarray) -> None:
    """Finish queries and keys, in place, and append keys and values to the layer's KV cache.

    The ops from here to `attention` are of the sequence's side: see Program.hop.
    """
    values = Heads(v.reshape(k.x.shape))
    g.rec.program.hop(g.rec.step, q.x, k.x, values.x)
    g.hooks.append(g, layer, q, k, values)


def attention(g: Graph, layer: int, q: np.ndarray) -> np.ndarray:
    """Attention of q to the layer's keys and values; both f32 [n_tok, n_head * head_dim]."""
    heads = q.reshape(len(q), -1, g.hp.head_dim)
    out = g.ws.rows("att", *heads.shape[1:])
    g.hooks.attend(g, layer, heads, out)
    g.rec.program.hop(g.rec.step, out)
    g.hooks.attended(g, layer)
    return out.reshape(q.shape)


def record_append(g: Graph, kv: KVView, q: Heads, k: Heads, v: Heads) -> None:
    """Record norm and rotation of q and k, in place, and that k and v go to the pages."""
    cos, sin = (None, None) if q.angles is None else (q.angles.cos, q.angles.sin)
    g.rec.program.add(
        ops.ROPE_APPEND,
        (g.hp.head_dim, int(g.model.arch.neox), *kv.types),
        step=g.rec.step,
        q=q.x,
        k=k.x,
        v=v.x,
        q_norm=q.norm,
        k_norm=k.norm,
        cos=cos,
        sin=sin,
        k_pages=kv.k,
        v_pages=kv.v,
        k_table=kv.k_table,
        v_table=kv.v_table,
        n_head=q.x.shape[1],
        n_head_kv=k.x.shape[1],
        n_half=0 if cos is None else cos.shape[1],
        eps=g.hp.rms_eps,
    )


def record_attention(
    g: Graph, state: SelectorState, queries: Queries, kv: KVView, audit: Audit | None = None
) -> None:
    """Record the ops from q and the pages to out; audit, at decode, checks these."""
    rec, (layer, q, out) = g.rec, queries
    program = rec.program
    program.part = SELECT
    choose = state.decode if rec.n_tok == 1 else state.prefill
    selection = choose(rec, layer, q, kv)
    chosen = Rows(rec.step, 1, selection, out)
    for rows in (chosen, *state.also_dense(rec, layer, selection)):
        program.part = ATTEND
        _record_attend(g, queries, kv, rows)
        program.part = SELECT
    state.correct(rec, layer, q, kv, selection, out)
    state.observe(rec, layer, q, kv, selection)
    if audit is not None:
        program.part = AUDIT
        audit.record(rec, queries, kv, selection)
    program.part = ""


def n_split(n_row: int, n_part: int) -> int:
    """Parts that the keys of each row are cut into, so that all rows are a multiple of n_part.

    Or, of many, up to a 32nd fewer than n_part: each part has a start and an end of its own.
    """
    few = n_part // n_row
    return few if 32 * few * n_row >= 31 * n_part else n_part // math.gcd(n_row, n_part)


def _record_attend(g: Graph, queries: Queries, kv: KVView, rows: Rows) -> None:
    hp, ws, rec, sel = g.hp, g.ws, g.rec, rows.sel
    partial, split, group = ws.partial, 1, hp.n_head // sel.n_row
    if rec.n_tok == 1:
        split = n_split(sel.n_row, ws.partial.shape[1])
    elif rows.partial is not None:
        partial, split = rows.partial, rows.partial.shape[2]
    rec.program.add(
        ops.ATTEND,
        (hp.head_dim, group, sel.q_block, *kv.types),
        cost=attend_cost(rows, group, hp.head_dim, kv.row_bytes),
        step=rows.step,
        q=queries.q,
        k_pages=kv.k,
        v_pages=kv.v,
        k_table=kv.k_table,
        v_table=kv.v_table,
        indptr=sel.indptr,
        indices=sel.indices,
        log_weight=sel.log_weight,
        block=sel.block,
        n_row=sel.n_row,
        heads_per_kv=hp.group,
        n_head_kv=hp.n_head_kv,
        window=g.model.window(queries.layer),
        n_split=split,
        stride=rows.stride,
        partial=partial,
        out=rows.out,
        lse=rows.lse,
        scratch=ws.scratch,
        scale=hp.scale,
    )
    if split > 1:
        _record_merge(rec, rows, partial, split)


def attend_cost(rows: Rows, group: int, head_dim: int, row_bytes: int) -> Cost:
    """What ATTEND reads, from the Selection as its call has left it.

    Each row reads the keys and values of its blocks, row_bytes for both, once for all of its
    queries; the part of the last block that no query may see is left out.
    """
    sel, step = rows.sel, rows.step

    def cost(_n_tok: int, _pos: int) -> tuple[int, int]:
        n_tok, pos = int(step[0]), int(step[1])
        first = np.arange(0, n_tok, sel.q_block)
        n_query = np.minimum(n_tok - first, sel.q_block)
        n_block = np.diff(sel.indptr[: len(first) * sel.n_row + 1]).reshape(len(first), sel.n_row)
        seen = (pos + rows.stride * (first + n_query - 1) + 1)[:, None]
        keys = np.minimum(n_block * sel.block, seen)
        n_product = int((keys * n_query[:, None]).sum()) * group
        return row_bytes * int(keys.sum()), 2 * 2 * head_dim * n_product

    return cost


def _record_merge(rec: Recording, rows: Rows, partial: np.ndarray, split: int) -> None:
    _, n_head, head_dim = rows.out.shape
    rec.program.add(
        ops.ATTEND_MERGE,
        (head_dim, rows.sel.q_block),
        step=rows.step,
        partial=partial,
        out=rows.out,
        lse=rows.lse,
        n_head=n_head,
        n_split=split,
    )


def new_recording(program, step: np.ndarray, n_tok: int) -> Recording:
    """A Recording for chunks of up to n_tok tokens; one query a row at decode."""
    return Recording(program, step, n_tok, 1 if n_tok == 1 else PREFILL_Q_BLOCK)
