"""The forward pass, recorded: Programs for prompt chunks, for each decode phase, for the head."""

import math
from typing import NamedTuple

import numpy as np

from tamis.attend import new_recording, record_attention
from tamis.audit import Audit
from tamis.block import (
    Linear,
    normed,
    record_keys,
    record_linear,
    record_products,
    record_update,
)
from tamis.jit_kernels import ops
from tamis.jit_kernels.backend import LinkedProgram, OpCost
from tamis.jit_kernels.program import Program, Runner
from tamis.jit_kernels.types import KVView, zeros
from tamis.jit_kernels.workers import Progress
from tamis.kv.cache import KVCache
from tamis.kv.tier import TieredKV
from tamis.kv.types import KVTypes
from tamis.model import Model
from tamis.rope import RopeFrequencies
from tamis.select.base import Recording, SelectorState
from tamis.select.notation import MethodError
from tamis.workspace import HEAD_ROWS, Workspace


class _Layer(NamedTuple):
    """Where the ops of a layer are in the Program of a chunk."""

    first: int
    multiplied: int  # after its queries, keys and values are computed
    projected: int  # after its own keys and values are in the pages
    ready: int  # after the frozen ones are what they should be
    attended: int  # after attention's output is complete
    end: int


class OwnOps(NamedTuple):
    """The ops of a decode Program that read or write its own sequence only, beside its rows."""

    program: Program
    parts: list[range]  # its angles; of each layer, from its new keys to attention's output
    ws: Workspace  # whose first rows of q, k, v and att they read and write


class _Phase(NamedTuple):
    linked: LinkedProgram
    parts: list[range]  # see OwnOps


class Forward:
    """The recorded Programs of one session over its workspace, pages and selector state."""

    def __init__(
        self,
        model: Model,
        backend: Runner,
        ws: Workspace,
        kv: KVCache | TieredKV,
        state: SelectorState,
        audit: Audit | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._model, self._backend, self._ws = model, backend, ws
        self._kv, self._state, self._audit = kv, state, audit
        self._n_ubatch = len(ws.ids)
        self._frozen = np.zeros(2, np.int64)  # rows of the chunk that the next layer leaves alone
        self._held = zeros(ws.x.shape if state.freezing else 0, np.float32)
        body, self._layers = self._body(self._n_ubatch)
        head = Program()
        record_head(Recording(head, ws.head_step, HEAD_ROWS, 1), model, ws, ws.head_rows)
        phase = state.phase(0)
        decode, parts = self._decode(None)
        _check_readers(body, "--prefill", kv.types)
        _check_readers(decode, "--attn", kv.types)
        checked = set() if audit is None else audit.specs
        backend.load(body.specs | head.specs | decode.specs | checked, progress)
        self._stops: dict[LinkedProgram, list[int]] = {}
        self._prefill, self._head = self._linked(body), backend.link(head)
        self._phases = {(phase, False): _Phase(self._linked(decode), parts)}
        self._counting = False

    @property
    def n_ubatch(self) -> int:
        """Most tokens of a chunk."""
        return self._n_ubatch

    def prefill(self, ids: np.ndarray, pos: int, prompt: range) -> None:
        """Run a chunk of at most n_ubatch tokens from position pos on; its rows stay in ws.x.

        prompt: the positions of all its chunks. Between layers the interpreter looks for signals,
        so Ctrl-C stops a long chunk.
        """
        self._kv.begin(pos, len(ids))
        self._set(ids, pos, prompt)
        for layer, at in enumerate(self._layers):
            frozen = self._state.frozen(layer, prompt.stop)
            rows = np.clip((frozen.start - pos, frozen.stop - pos), 0, len(ids))
            self._frozen[:] = rows
            self._backend.send(self._frozen)
            if rows[1] - rows[0] < len(ids):
                self._run(at.first, at.end)
            else:
                reuse = self._state.freezing == "reuse" and layer > 0
                self._run(at.projected if reuse else at.first, at.ready)
        self._kv.finish(pos, len(ids))

    def _linked(self, program: Program) -> LinkedProgram:
        linked: LinkedProgram = self._backend.link(program)
        self._stops[linked] = self._kv.stops(program)
        return linked

    def _replay(self, linked: LinkedProgram, first: int, last: int) -> None:
        """Run ops first .. last - 1, stopping where keys and values must be brought in."""
        for stop in self._stops[linked]:
            if first <= stop < last:
                self._backend.run(linked, first, stop)
                self._kv.bring(linked.program, stop)
                first = stop
        self._backend.run(linked, first, last)

    def _run(self, first: int, last: int) -> None:
        self._replay(self._prefill, first, last)
        if self._counting:
            n_tok, pos, *_ = self._ws.step.tolist()
            self._prefill.count(n_tok, pos, first, last)

    def decode(self, token_id: int, pos: int, step: int) -> np.ndarray:
        """Run one token; a copy of its logits, f32 [n_vocab].

        Raises AuditError, where a step is audited and a bound does not hold.
        """
        audit = self._audit if self._audit is not None and self._audit.due() else None
        linked = self._phase(step, audit).linked
        self._kv.begin(pos, 1)
        self._set(np.array([token_id], np.int32), pos, range(pos, pos + 1))
        self._replay(linked, 0, len(linked))
        self._kv.finish(pos, 1)
        self._count(linked, 1, pos)
        if audit is not None:
            audit.take(linked.program, self._state, step, pos)
        return self._logits(1)[0]

    def own_step(self, pos: int) -> OwnOps:
        """The ops that a Batch runs of the decode step at pos, whose step record is now set."""
        linked, parts = self._phase(pos, None)
        self._ws.step[:] = 1, pos, 0, pos, pos + 1
        return OwnOps(linked.program, parts, self._ws)

    def _phase(self, step: int, audit: Audit | None) -> _Phase:
        key = self._state.phase(step), audit is not None
        self._backend.send(*self._state.planned)
        if key not in self._phases:
            program, parts = self._decode(audit)
            self._phases[key] = _Phase(self._linked(program), parts)
        return self._phases[key]

    def logits(self, row: int, n_row: int) -> np.ndarray:
        """Logits of n_row <= HEAD_ROWS rows of the last chunk, a copy f32 [n_row, n_vocab]."""
        self._ws.head_rows[:3] = n_row, 0, row
        self._ws.head_step[:3] = n_row, 0, 0
        self._backend.send(self._ws.head_rows, self._ws.head_step)
        self._backend.run(self._head)
        self._count(self._head, n_row, 0)
        return self._logits(n_row)

    def hidden(self, n_row: int) -> np.ndarray:
        """The first n_row rows of the last chunk after the output norm, f32 [n_row, n_embd]."""
        self._backend.fetch(self._ws.x)
        x = self._ws.x[:n_row].astype(np.float64)
        x /= np.sqrt((x * x).mean(axis=1, keepdims=True) + self._model.hp.rms_eps)
        return (x * self._model.weights.output_norm).astype(np.float32)

    def _logits(self, n_row: int) -> np.ndarray:
        found = self._ws.logits[:n_row]
        self._backend.fetch(found)
        return found.copy()

    def start_costs(self) -> None:
        """Count from now on what each op costs; every call then takes a little longer."""
        self._counting = True
        for linked in self._programs():
            linked.reset_costs()

    def take_costs(self) -> list[OpCost]:
        """What the ops of all Programs have cost since `start_costs`; the counting ends."""
        self._counting = False
        return [cost for linked in self._programs() for cost in linked.costs() if cost.n_call]

    def _programs(self) -> list[LinkedProgram]:
        return [self._prefill, self._head, *(phase.linked for phase in self._phases.values())]

    def _count(self, linked: LinkedProgram, n_tok: int, pos: int) -> None:
        if self._counting:
            linked.count(n_tok, pos)

    def _set(self, ids: np.ndarray, pos: int, prompt: range) -> None:
        self._ws.ids[: len(ids)] = ids
        self._ws.step[:] = len(ids), pos, 0, prompt.start, prompt.stop
        self._backend.send(self._ws.ids, self._ws.step, self._kv.table)

    def _body(self, n_tok: int, audit: Audit | None = None) -> tuple[Program, list[_Layer]]:
        """The Program from token ids to ws.x, and where its layers are; the input is layer 0's."""
        rec = new_recording(Program(), self._ws.step, n_tok)
        record_embedding(rec, self._model, self._ws)
        self._record_angles(rec)
        layers, end = [], 0
        for layer in range(self._model.hp.n_layer):
            first, kv = end, self._kv.view(layer)
            freezes = n_tok > 1 and len(self._state.frozen(layer, self._kv.capacity)) > 0
            record_products(rec, self._model, self._ws, layer)
            multiplied = len(rec.program)
            record_keys(rec, self._model, self._ws, layer, kv)
            projected = len(rec.program)
            if freezes and layer > 0 and self._state.freezing == "reuse":
                self._record_reuse(rec, self._kv.view(layer - 1), kv)
            ready = len(rec.program)
            if freezes:
                self._record_copy(rec, self._ws.x, self._held)
            record_attention(rec, self._model, self._ws, self._state, layer, kv, audit)
            attended = len(rec.program)
            record_update(rec, self._model, self._ws, layer)
            if freezes:
                self._record_copy(rec, self._held, self._ws.x)
            end = len(rec.program)
            layers.append(_Layer(first, multiplied, projected, ready, attended, end))
        return rec.program, layers

    def _record_copy(self, rec: Recording, source: np.ndarray, target: np.ndarray) -> None:
        n = self._model.hp.n_embd
        rec.program.add(ops.COPY_ROWS, rows=self._frozen, source=source, target=target, n=n)

    def _record_reuse(self, rec: Recording, before: KVView, own: KVView) -> None:
        rec.program.add(
            ops.COPY_KV,
            (self._model.hp.head_dim, *own.types),
            step=rec.step,
            rows=self._frozen,
            k_from=before.k,
            v_from=before.v,
            k_from_table=before.k_table,
            v_from_table=before.v_table,
            k_to=own.k,
            v_to=own.v,
            k_to_table=own.k_table,
            v_to_table=own.v_table,
            n_head_kv=self._model.hp.n_head_kv,
        )

    def _decode(self, audit: Audit | None) -> tuple[Program, list[range]]:
        """The Program from a token id to its logits, and the parts of OwnOps."""
        program, layers = self._body(1, audit)
        record_head(new_recording(program, self._ws.step, 1), self._model, self._ws, self._ws.step)
        n_table = sum(call.spec.op is ops.ROPE_TABLE for call in program.calls)
        return program, [
            range(1, 1 + n_table),
            *(range(at.multiplied, at.attended) for at in layers),
        ]

    def _record_angles(self, rec: Recording) -> None:
        self._record_table(rec, 0, self._model.rope)
        if self._model.rope_window is not self._model.rope:
            self._record_table(rec, 1, self._model.rope_window)
        elif self._model.hp.sliding_window:
            self._record_table(rec, 1, self._model.rope)

    def _record_table(self, rec: Recording, table: int, rope: RopeFrequencies) -> None:
        rec.program.add(
            ops.ROPE_TABLE,
            step=rec.step,
            inv_freq=rope.inv_freq,
            cos=self._ws.cos[table],
            sin=self._ws.sin[table],
            n_half=len(rope.inv_freq),
            scale_f=rope.scale,
        )


def record_embedding(rec: Recording, model: Model, ws: Workspace) -> None:
    """Record ws.x from ws.ids."""
    table = model.weights.token_embd
    row_bytes = table.data.nbytes // table.n_out
    rec.program.add(
        ops.EMBED,
        (table.type,),
        cost=lambda n_tok, pos: (n_tok * row_bytes, 0),
        step=rec.step,
        ids=ws.ids,
        table=table.data,
        y=ws.x,
        n=model.hp.n_embd,
        scale_f=math.sqrt(model.hp.n_embd) if model.arch.scale_embedding else 1.0,
    )


def record_head(rec: Recording, model: Model, ws: Workspace, rows: np.ndarray) -> None:
    """Record the output norm of the rows that `rows` names, and their logits."""
    source = normed(model, ws.x, model.weights.output_norm, rows)
    record_linear(rec, ws, source, [Linear(model.weights.output, ws.logits, label="output")])


def _check_readers(program: Program, flag: str, types: KVTypes) -> None:
    """Raise MethodError where an op reads keys or values, and not those of this type."""
    for call in program.calls:
        op = call.spec.op
        for name, pages, constant, type in (
            ("keys", "k_pages", "type_k", types.k),
            ("values", "v_pages", "type_v", types.v),
        ):
            if type != "f16" and pages in op.fields and constant not in op.constants:
                raise MethodError(
                    f"the method of {flag} reads {name} as f16 ({op.name}), this cache has {type}: "
                    f"use --cache-{constant.replace('_', '-')} f16, or another method"
                )
