"""One place's part of a forward pass, recorded: Programs for prompt chunks and decode phases."""

import math
from typing import NamedTuple

import numpy as np

from tamis.graph.attention import new_recording, record_attention
from tamis.graph.audit import Audit
from tamis.graph.layer import (
    Linear,
    normed,
    record_keys,
    record_linear,
    record_products,
    record_update,
)
from tamis.graph.workspace import Workspace
from tamis.jit_kernels.backends.cpu import LinkedProgram
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.jit_kernels.contract.types import KVView, zeros
from tamis.kv.placed import Cache
from tamis.kv.types import KVTypes
from tamis.model.model import Model
from tamis.model.placement import Place
from tamis.model.rope import RopeFrequencies
from tamis.select.base import Recording, SelectorState
from tamis.select.notation import MethodError


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


class Own(NamedTuple):
    """What a session has at a place."""

    ws: Workspace
    kv: Cache  # of the place's layers, counted from 0
    state: SelectorState  # asked for these layers only, by their numbers in the model


class Stage:
    """The recorded Programs of one place over a session's workspace, pages and selector state.

    `open` must be called before any runs.
    """

    def __init__(self, model: Model, place: Place, own: Own, audit: Audit | None) -> None:
        self.place, self.backend, self.layers = place, place.backend, place.layers
        self.ws, self.kv, self.state = own
        self._model, self._audit = model, audit
        if self.state.sharing and 0 < len(self.layers) < model.hp.n_layer:
            raise MethodError(
                "layers share sets, which are on one device only: leave out -ngl, or choose "
                "another --attn"
            )
        self._frozen = np.zeros(2, np.int64)  # rows of the chunk that the next layer leaves alone
        self._held = zeros(self.ws.x.shape if self.state.freezing else 0, np.float32)
        self._stops: dict[LinkedProgram, list[int]] = {}
        self._table = b""  # of pages, as it was shown to kernels
        self._body_program, self._at = self._body(len(self.ws.ids))
        phase = self.state.phase(0)
        self._decoding = phase, *self._decode(None, None)
        _check_readers(self._body_program, "--prefill", self.kv.types)
        _check_readers(self._decoding[1], "--attn", self.kv.types)
        self._phases: dict[tuple[str, bool, int], _Phase] = {}

    @property
    def specs(self) -> tuple[set[KernelSpec], set[KernelSpec]]:
        """The kernels that it is sure to need: of either side of its Programs' hops."""
        (rows, own), (decoding, decoding_own) = (
            program.sides() for program in (self._body_program, self._decoding[1])
        )
        return rows.specs | decoding.specs, own.specs | decoding_own.specs

    def open(self) -> None:
        """Link what was recorded; the backend has loaded the kernels."""
        phase, decode, parts = self._decoding
        self._prefill = self._linked(self._body_program)
        self._phases = {(phase, False, 0): _Phase(self._linked(decode), parts)}

    def news(self) -> list[np.ndarray]:
        """The page table, where it is not what was told the last time."""
        table = self.kv.table.tobytes()
        if table == self._table:
            return []
        self._table = table
        return [self.kv.table]

    @property
    def programs(self) -> list[LinkedProgram]:
        """All that may run, for profiles."""
        return [self._prefill, *(phase.linked for phase in self._phases.values())]

    @property
    def ends(self) -> bool:
        """Whether its decode Programs go on to the logits."""
        return self.place.output and self.layers.stop == self._model.hp.n_layer

    def prefill(self, pos: int, n_tok: int, prompt: range, counting: bool) -> None:
        """Run a chunk through the layers; prompt: the positions of all its chunks."""
        self.kv.begin(pos, n_tok)
        if not self.layers:
            self._run(0, len(self._prefill), counting)
        for layer, at in zip(self.layers, self._at, strict=True):
            frozen = self.state.frozen(layer, prompt.stop)
            rows = np.clip((frozen.start - pos, frozen.stop - pos), 0, n_tok)
            self._frozen[:] = rows
            self.backend.send(self._frozen)
            if rows[1] - rows[0] < n_tok:
                self._run(at.first, at.end, counting)
            else:
                reuse = self.state.freezing == "reuse" and layer > 0
                self._run(at.projected if reuse else at.first, at.ready, counting)
        self.kv.finish(pos, n_tok)

    def decode(self, pos: int, phase: _Phase) -> None:
        """Run one token."""
        self.kv.begin(pos, 1)
        self._replay(phase.linked, 0, len(phase.linked))
        self.kv.finish(pos, 1)

    def own_step(self, pos: int) -> OwnOps:
        """The ops that a Batch runs of the decode step at pos, whose step record is now set."""
        linked, parts = self.phase(pos, None, None)
        self.ws.step[:] = 1, pos, 0, pos, pos + 1
        return OwnOps(linked.program, parts, self.ws)

    def phase(self, step: int, audit: Audit | None, answer: np.ndarray | None) -> _Phase:
        """The decode Program of a step, recorded where there is none.

        answer: f32 [n_vocab], one of few, where logits go instead of to the workspace.
        """
        where = 0 if answer is None else answer.ctypes.data
        key = self.state.phase(step), audit is not None, where
        if self.state.planned:
            self.backend.send(*self.state.planned)
        if key not in self._phases:
            program, parts = self._decode(audit, answer)
            self._phases[key] = _Phase(self._linked(program), parts)
        return self._phases[key]

    def _linked(self, program: Program) -> LinkedProgram:
        linked: LinkedProgram = self.backend.link(program)
        self._stops[linked] = self.kv.stops(program)
        return linked

    def _replay(self, linked: LinkedProgram, first: int, last: int) -> None:
        """Run ops first .. last - 1, stopping where keys and values must be brought in."""
        for stop in self._stops[linked]:
            if first <= stop < last:
                self.backend.run(linked, first, stop)
                self.kv.bring(linked.program, stop)
                first = stop
        self.backend.run(linked, first, last)

    def _run(self, first: int, last: int, counting: bool) -> None:
        self._replay(self._prefill, first, last)
        if counting:
            n_tok, pos, *_ = self.ws.step.tolist()
            self._prefill.count(n_tok, pos, first, last)

    def _body(self, n_tok: int, audit: Audit | None = None) -> tuple[Program, list[_Layer]]:
        """The Program from what comes in (token ids, or ws.x) to ws.x, and where its layers are.

        What comes before the first layer is part of it.
        """
        rec = new_recording(self.kv.program(self.ws.step), self.ws.step, n_tok)
        if self.place.embedding:
            record_embedding(rec, self._model, self.ws)
        if self.layers:
            rec.program.hop(rec.step)
            self._record_angles(rec)
            self.kv.record_begin(rec.program, rec.step)
            rec.program.hop(rec.step)
        layers, end, ws = [], 0, self.ws
        for layer in self.layers:
            first, kv = end, self._view(layer)
            freezes = n_tok > 1 and len(self.state.frozen(layer, self.kv.capacity)) > 0
            record_products(rec, self._model, ws, layer)
            multiplied = len(rec.program)
            rec.program.hop(rec.step, ws.q, ws.k, ws.v)
            record_keys(rec, self._model, ws, layer, kv)
            projected = len(rec.program)
            if freezes and layer > 0 and self.state.freezing == "reuse":
                self._record_reuse(rec, self._view(layer - 1), kv)
            if layer == self.layers[-1]:
                self.kv.record_end(rec.program, rec.step)
            ready = len(rec.program)
            record_attention(rec, self._model, ws, self.state, layer, kv, audit)
            attended = len(rec.program)
            rec.program.hop(rec.step, ws.att)
            if freezes:
                self._record_copy(rec, ws.x, self._held)
            record_update(rec, self._model, ws, layer)
            if freezes:
                self._record_copy(rec, self._held, ws.x)
            end = len(rec.program)
            layers.append(_Layer(first, multiplied, projected, ready, attended, end))
        return rec.program, layers

    def _view(self, layer: int) -> KVView:
        if layer < self.layers.start:
            raise MethodError(
                f"--prefill copies keys of layer {layer} to the next, which is on another device: "
                "use kv=project, or leave out -ngl"
            )
        return self.kv.view(layer - self.layers.start)

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

    def _decode(
        self, audit: Audit | None, answer: np.ndarray | None
    ) -> tuple[Program, list[range]]:
        """The Program of one token, to its logits where it `ends`, and the parts of OwnOps."""
        program, layers = self._body(1, audit)
        if self.ends:
            rec = new_recording(program, self.ws.step, 1)
            logits = self.ws.logits if answer is None else answer[None]
            record_head(rec, self._model, self.ws, self.ws.step, logits)
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
            cos=self.ws.cos[table],
            sin=self.ws.sin[table],
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


def record_head(
    rec: Recording, model: Model, ws: Workspace, rows: np.ndarray, logits: np.ndarray
) -> None:
    """Record the output norm of the rows that `rows` names, and their logits f32 [n, n_vocab]."""
    source = normed(model, ws.x, model.weights.output_norm, rows)
    record_linear(rec, ws, source, [Linear(model.weights.output, logits, label="output")])


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
