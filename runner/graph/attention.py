"""Attention of a layer: rotate and append, select, attend, correct, observe; if asked, audit."""

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tamis.graph.audit import Audit, Queries
from tamis.graph.context import Angles, Finished, Graph, Heads, Index
from tamis.graph.experts import products
from tamis.graph.norm import norm_rows
from tamis.graph.recurrent import Part, copied
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import ATTEND, AUDIT, SELECT, Cost
from tamis.jit_kernels.contract.types import KVView
from tamis.jit_kernels.contract.values import note_read, note_written, recorded_at, shown
from tamis.model.hparams import HParams
from tamis.model.key_basis import KeyBasis
from tamis.model.rope import RopeFrequencies
from tamis.model.weights import Tensor
from tamis.select.base import Attended, Recording, SelectorState

PREFILL_Q_BLOCK = 16  # queries that share a row of a Selection in prefill


def rope(g: Graph, layer: int, x: np.ndarray, w_norm: Tensor) -> Heads:
    """Return the heads of x, f32 [n_tok, n_head * head_dim], with the norm and rotation they need.

    `append` does both. Only a norm of all heads together, or one by mean and variance, is recorded
    here. There is no rotation in layers that the architecture leaves without positions.
    """
    arch, head_dim = g.model.arch, g.hp.of(layer).head_dim
    heads = x.reshape(len(x), -1, head_dim)
    norm = w_norm.vector() if w_norm else None
    is_joint = norm is not None and norm.shape == (x.shape[1],) != (head_dim,)
    if norm is not None and (arch.norm == "layer" or is_joint):
        norm_rows(g, x, norm, w_norm.bias())
        norm = None
    angles = None if g.model.is_nope(layer) else g.angles(g.model.rope_of(layer))
    return Heads(heads, norm, angles, arch.norm_after_rope)


def norm_heads(g: Graph, x: np.ndarray, w: np.ndarray) -> None:
    """Record the norm of each head of x f32 [n_tok, n_head, head_dim], in place."""
    _, n_head, head_dim = x.shape
    g.rec.program.add(
        ops.RMS_NORM,
        (0,),
        step=g.rec.step,
        x=x,
        w=w,
        y=x,
        n=head_dim,
        rows_per_tok=n_head,
        x_stride=n_head * head_dim,
        y_stride=n_head * head_dim,
        eps=g.hp.rms_eps,
    )


def append(
    g: Graph,
    layer: int,
    q: Heads,
    k: Heads | None = None,
    v: np.ndarray | None = None,
    index: Index | None = None,
) -> Finished:
    """Append K and V to the layer's KV cache, and return the finished queries for `attention`.

    Queries and keys are normed and rotated in place, so other views of them are stale afterwards.
    Without k the layer attends to the keys of another layer. v may be k itself; the values are then
    the finished keys. With an index, its keys are stored behind k's, and it chooses the keys that
    the layer attends to. The ops from here to `attention` run on the device of the KV cache: see
    Program.transfer.
    """
    values = None if k is None or v is None else _values(k, v)
    rows = [heads.x for heads in (q, k, values) if heads]
    rows += [] if index is None else [index.q.x, index.k.x]
    rows += [] if index is None or index.weights is None else [index.weights]
    for row in rows:
        note_read(row, "append")
    g.rec.program.transfer(g.rec.step, *rows)
    if g.hp.padded:
        head_map = HeadMap.of(g.hp, layer)
        q = _in_cache_heads(g, "q_placed", q, head_map.queries)
        k = k and _in_cache_heads(g, "k_placed", k, head_map.keys)
        values = values and _in_cache_heads(g, "v_placed", values, head_map.keys)
    if index is not None and k is not None:
        g.hooks.index(g, index, k.x)
    finished = g.hooks.append(g, layer, q, k, values)
    for heads in (q, k):
        if heads is not None:
            # the buffer counts as overwritten even if the hooks record nothing
            note_written(heads.x, "append")
    note_written(finished, "append")
    return Finished(layer, finished)


def _values(k: Heads, v: np.ndarray) -> Heads:
    """Return v as heads of k's shape, or k itself where v is a view of it."""
    return k if np.shares_memory(k.x, v) else Heads(v.reshape(k.x.shape))


def _finished(layer: int, q: Finished) -> np.ndarray:
    """Return the heads of queries that `append` finished for this layer.

    Raises TypeError for anything else, ValueError for queries of another layer.
    """
    if not isinstance(q, Finished):
        raise TypeError(
            f"{shown(recorded_at())}: attention takes the queries that append returns, not "
            f"{type(q).__name__}: write q = append(g, il, queries, keys, v), then attention(g, il, "
            "q)"
        )
    if q.layer != layer:
        raise ValueError(
            f"{shown(recorded_at())}: attention of layer {layer} takes queries that append has "
            f"finished for it, these are of layer {q.layer}"
        )
    return q.x


def attention(g: Graph, layer: int, q: Finished, sinks: Tensor | None = None) -> np.ndarray:
    """Attention of finished queries over the layer's KV cache, f32 [n_tok, n_head * head_dim].

    sinks: a score of each head for a key without a value. Raises TypeError where q is not what
    `append` returned, ValueError where it is of another layer.
    """
    hp, own = g.hp, g.hp.of(layer)
    heads = _finished(layer, q)
    note_read(heads, "attention")
    out = g.ws.rows("att", *heads.shape[1:])
    lse = g.ws.rows("lse", heads.shape[1]) if sinks else None
    g.hooks.attend(g, layer, heads, out, lse)
    note_written(out, "attention")
    g.rec.program.transfer(g.rec.step, out, *([] if lse is None else [lse]))
    g.hooks.attended(g, layer)
    if sinks:
        own_sinks = sinks.vector()
        if hp.padded:  # all elements of a head that the layer lacks
            own_sinks = own_sinks[HeadMap.of(hp, layer).queries]
        g.rec.program.add(
            ops.ATTEND_SINK,
            step=g.rec.step,
            sinks=own_sinks,
            lse=lse,
            out=out,
            n_head=heads.shape[1],
            head_dim=heads.shape[2],
            n_part=1,
        )
    if hp.padded:
        found = g.ws.rows("att_own", own.n_head, own.head_dim)
        out = _record_head_map(g, out, found, HeadMap.of(hp, layer).outputs)
    return out.reshape(len(out), -1)


class HeadMap(NamedTuple):
    """The mapping of a layer's heads to those of a padded KV cache, for PLACE_HEADS."""

    queries: np.ndarray  # int32 [n_head]: the layer's head in each head of the cache, or -1
    keys: np.ndarray  # int32 [n_head_kv]
    outputs: np.ndarray  # int32 [n_head of the layer]: the cache's head of each head

    @staticmethod
    @cache
    def of(hp: HParams, layer: int) -> "HeadMap":
        """Return the map of a layer whose KV heads serve at least as many query heads."""
        own, n_row = hp.of(layer), hp.group
        queries, keys = np.full(hp.n_head, -1, np.int32), np.full(hp.n_head_kv, -1, np.int32)
        times = -(-own.group // n_row)  # the cache's KV heads for one of the layer
        outputs = np.zeros(own.n_head, np.int32)
        for head in range(own.n_head):
            kv, i = divmod(head, own.group)
            slot = kv * times + i // n_row
            keys[slot] = kv
            outputs[head] = slot * n_row + i % n_row
            queries[outputs[head]] = head
        return HeadMap(queries, keys, outputs)


def _in_cache_heads(g: Graph, name: str, heads: Heads, source: np.ndarray) -> Heads:
    """Copy heads to the wider heads of a padded KV cache, after the norm of their own width."""
    rotated = heads.norm_last and heads.norm is not None  # here the norm comes after the rotation
    if heads.norm is not None:
        own = heads if rotated else replace(heads, angles=None)
        heads = replace(heads, x=record_norm_rope(g, own))
    to = g.ws.rows(name, len(source), g.hp.head_dim)
    x = _record_head_map(g, heads.x, to, source)
    return replace(heads, x=x, norm=None, angles=None if rotated else heads.angles)


def _record_head_map(g: Graph, x: np.ndarray, y: np.ndarray, source: np.ndarray) -> np.ndarray:
    g.rec.program.add(
        ops.PLACE_HEADS,
        step=g.rec.step,
        x=x,
        source=source,
        y=y,
        n_x=x.shape[1],
        n_y=y.shape[1],
        x_dim=x.shape[2],
        y_dim=y.shape[2],
    )
    return y


def record_append(
    g: Graph,
    kv: KVView,
    q: Heads,
    k: Heads | None,
    v: Heads | None,
    basis: KeyBasis | None = None,
) -> np.ndarray:
    """Record norm and rotation of q and k, in place, and the append of k and v to the pages.

    basis: of the stored keys; the queries are then brought into it, too. Returns the queries.
    """
    if basis is not None:
        q, k = _in_basis(g, q, k, basis)
    if k is None or v is None:
        return _ready(g, q, now=True).x
    scaled = q.scaled
    is_latent = np.shares_memory(k.x, v.x)  # whichever thread appends v, k must be finished before
    q, k = _ready(g, q, now=is_latent), _ready(g, k, now=is_latent)
    cos, sin = (None, None) if q.angles is None else (q.angles.cos, q.angles.sin)
    g.rec.program.add(
        ops.ROPE_APPEND,
        (k.x.shape[2], int(g.model.arch.neox), *kv.types),
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
    if scaled:
        length, scale, offset = g.hp.temperature
        g.rec.program.add(
            ops.SCALE_BY_POSITION,
            step=g.rec.step,
            x=q.x,
            n=q.x[0].size,
            length=length,
            scale=scale,
            offset=offset,
        )
    return q.x


def _in_basis(g: Graph, q: Heads, k: Heads | None, basis: KeyBasis) -> tuple[Heads, Heads | None]:
    """Finish heads, and multiply them by the matrices of a basis."""
    n_head_kv, scaled = len(basis.centre), q.scaled
    q, k = _ready(g, q, now=True), k and _ready(g, k, now=True)
    of_kv = _kv_heads(len(q.x), q.x.shape[1], n_head_kv)
    rows = products(g, q.x, Tensor("q_basis", basis.queries), of_kv, n_head_kv)
    queries = Heads(rows, scaled=scaled)
    if k is None:
        return queries, None
    own = _kv_heads(len(k.x), n_head_kv, n_head_kv)
    rows = products(g, k.x, Tensor("k_basis", basis.keys), own, n_head_kv)
    if basis.shift is not None:
        g.rec.program.add(
            ops.ADD_POSITIONS,
            step=g.rec.step,
            x=rows,
            table=basis.shift,
            n=basis.shift.size,
            stride=0,
        )
    return queries, Heads(rows)


@cache
def _kv_heads(n_tok: int, n_head: int, n_head_kv: int) -> np.ndarray:
    """The KV head of each head, for each token: int32 [n_tok, n_head]."""
    heads = np.arange(n_head, dtype=np.int32) // (n_head // n_head_kv)
    return np.tile(heads, (n_tok, 1))


def measure_basis(g: Graph, q: Heads, k: Heads | None) -> None:
    """Note the buffers that heads in another basis need."""
    for name, heads in (("q_basis", q), ("k_basis", k)):
        if heads is not None:
            _, n_head, head_dim = heads.x.shape
            g.ws.rows(name, n_head, head_dim)
            g.ws.experts(head_dim, n_head, n_head)


def _ready(g: Graph, heads: Heads, *, now: bool) -> Heads:
    """Return heads that ROPE_APPEND can finish.

    It has one norm of head_dim elements, before the rotation. Other norms are recorded here,
    together with the rotation; with `now` every norm and rotation is.
    """
    norm, angles = heads.norm, heads.angles
    if norm is None and angles is None:
        return heads
    if not now and (norm is None or (norm.ndim == 1 and not heads.norm_last)):
        return heads
    return Heads(record_norm_rope(g, heads))


def record_index(g: Graph, index: Index, k: np.ndarray) -> None:
    """Record the rotation of an indexer's heads, and copy its keys to the end of k's rows.

    k: f32 [n_tok, 1, head_dim].
    """
    n_tok, _, n_key = index.k.x.shape
    for heads in (index.q, index.k):
        if heads.angles is not None or heads.norm is not None:
            record_norm_rope(g, heads, neox=index.neox)
    rows = k.reshape(n_tok, -1)
    copied(g, Part(index.k.x, 0, n_key), Part(rows, rows.shape[1] - n_key, n_key))


def record_norm_rope(g: Graph, heads: Heads, *, neox: bool | None = None) -> np.ndarray:
    """Record the norm and the rotation of heads, and return them: f32 [n_tok, n_head, head_dim].

    Both work in place. neox: whether the elements of a rotary pair lie half of the rotated elements
    apart; None stands for the architecture's rule.
    """
    norm, angles = heads.norm, heads.angles
    is_neox = g.model.arch.neox if neox is None else neox
    g.rec.program.add(
        ops.ROPE_HEADS,
        (heads.x.shape[2], int(is_neox), "rope" if heads.norm_last else "norm"),
        step=g.rec.step,
        x=heads.x,
        norm=norm,
        cos=None if angles is None else angles.cos,
        sin=None if angles is None else angles.sin,
        n_head=heads.x.shape[1],
        norm_step=norm.shape[-1] if norm is not None and norm.ndim == 2 else 0,
        n_half=0 if angles is None else angles.cos.shape[1],
        eps=g.hp.rms_eps,
    )
    return heads.x


def rotated_by(frequencies: RopeFrequencies, n_tok: int, by: int) -> Angles:
    """Angles that rotate each of n_tok rows by the same number of positions."""
    return _rotated_by(frequencies.inv_freq.tobytes(), n_tok, by)


@cache
def _rotated_by(inv_freq: bytes, n_tok: int, by: int) -> Angles:
    angles = np.tile(by * np.frombuffer(inv_freq), (n_tok, 1))
    return Angles(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def record_attention(
    g: Graph,
    state: SelectorState,
    queries: Queries,
    kv: KVView,
    audit: Audit | None = None,
    *,
    both_ways: bool = False,
) -> None:
    """Record selection, attention and a method's later hooks; an audit checks a decode step.

    both_ways: the rows of a chunk see each other, later ones, too.
    """
    rec, (layer, q, out, lse) = g.rec, queries
    program = rec.program
    program.part = SELECT
    choose = state.select_decode if rec.n_tok == 1 else state.select_prefill
    if g.model.arch.is_encoder:
        selection = state.everything(rec)
    else:
        selection = choose(rec, layer, q, kv)  # also where it is not read: methods take notes
        selection = state.everything(rec) if both_ways else selection
    program.selections[layer] = selection
    if lse is None and rec.n_tok == 1:
        lse = state.lse
    chosen = Attended(rec.step, 1, selection, out, lse=lse)
    program.part = ATTEND
    _record_attend(g, queries, kv, chosen, both_ways=both_ways)
    program.part = SELECT
    for rows in state.also_attend(rec, layer, chosen):
        program.part = ATTEND
        _record_attend(g, queries, kv, rows)
        program.part = SELECT
    state.correct(rec, layer, q, kv, selection, out)
    state.observe(rec, layer, q, kv, selection)
    if audit is not None:
        program.part = AUDIT
        state.bracket(rec, layer, q, selection)
        audit.record(rec, queries, kv, selection)
    program.part = ""


def n_split(n_row: int, n_part: int) -> int:
    """The number of parts that each row's keys are split into: all parts fill n_part workers.

    With many rows it may leave up to a 32nd of n_part idle, as each part has its own start and end.
    """
    few = n_part // n_row
    return few if 32 * few * n_row >= 31 * n_part else n_part // math.gcd(n_row, n_part)


def _record_attend(
    g: Graph, queries: Queries, kv: KVView, rows: Attended, *, both_ways: bool = False
) -> None:
    hp = g.hp.of_cache(queries.layer)
    ws, rec, sel = g.ws, g.rec, rows.sel
    partial, split, group = ws.partial, 1, hp.n_head // sel.n_row
    score_mod: dict[str, Any] = {}
    window, ahead = g.model.window(queries.layer), 0
    if g.model.arch.is_encoder:  # a window is centred on its token
        ahead = window // 2 if window else hp.n_ctx_train
        window = window // 2 + 1 if window else 0
    elif both_ways:
        ahead = rec.n_tok
    if g.model.has_score_mod or ahead:
        score_mod = {"cap": hp.attention_softcap, "slopes": g.model.slopes, "ahead": ahead}
    elif rec.n_tok == 1:
        split = n_split(sel.n_row, ws.partial.shape[1])
    elif rows.partial is not None:
        partial, split = rows.partial, rows.partial.shape[2]
    rec.program.add(
        ops.ATTEND_SCORE_MOD if score_mod else ops.ATTEND,
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
        window=window,
        n_split=split,
        stride=rows.stride,
        partial=partial,
        out=rows.out,
        lse=rows.lse,
        scratch=ws.scratch,
        scale=hp.scale,
        **score_mod,
    )
    if split > 1:
        _record_merge(rec, rows, partial, split)


def attend_cost(rows: Attended, group: int, head_dim: int, row_bytes: int) -> Cost:
    """The cost of ATTEND, computed from the Selection that its call has left.

    Each row reads the K and V of its blocks, row_bytes for both, once for all of its queries.
    Positions of the last block that no query may see do not count.
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


def _record_merge(rec: Recording, rows: Attended, partial: np.ndarray, split: int) -> None:
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
