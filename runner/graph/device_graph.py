"""One device's part of a forward pass, recorded: Programs for prompt chunks and decode phases."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tamis.graph.attention import (
    measure_basis,
    new_recording,
    record_append,
    record_attention,
    record_index,
)
from tamis.graph.audit import Audit, Queries
from tamis.graph.context import Graph, Heads, Hooks, Index, State
from tamis.graph.entries import indexer_state
from tamis.graph.indexer import IndexerState
from tamis.graph.layer import record_layer
from tamis.graph.linear import Source, linear, stored
from tamis.graph.norm import mapped, norm, norm_rows, ones, record_rows_added
from tamis.graph.workspace import Measured, Workspace
from tamis.jit_kernels.backends.base import LinkedProgram
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.jit_kernels.contract.types import KVView, zeros
from tamis.kv.cache import KVCache
from tamis.kv.recurrent import RecurrentStates
from tamis.kv.types import KVTypes
from tamis.model.key_basis import KeyBasis, has_basis
from tamis.model.model import Model, Needs
from tamis.model.placement import Place
from tamis.select.base import Recording, SelectorState, with_heads
from tamis.select.notation import MethodError


class _Layer(NamedTuple):
    """The numbers of a layer's ops in the Program of a chunk."""

    first: int
    projected: int  # the op after its own K and V are in the pages
    ready: int  # the op after the frozen rows are corrected
    end: int


class Rows(NamedTuple):
    """The rows of a chunk that are given in place of token ids: those of a picture.

    values: f32 [n, n_embd], and n_embd more for each of the first layers that get further rows.
    """

    values: np.ndarray
    causal: bool = True  # whether each sees only itself and earlier ones


class Kind(NamedTuple):
    """What differs between Programs of the same method: see Stage.prefill and Stage.phase."""

    given: bool = False  # rows are given, not token ids
    both_ways: bool = False  # rows see later ones
    n_deep: int = 0  # layers that get further rows
    placed: bool = False  # the angles of positions are given


TEXT = Kind()


class Own(NamedTuple):
    """What a session owns on a device."""

    ws: Workspace
    kv: KVCache  # of the device's layers, counted from 0
    state: SelectorState  # used for these layers only, by their numbers in the model
    states: RecurrentStates  # of all layers
    bases: Mapping[int, KeyBasis] = MappingProxyType({})  # of stored keys, by layer of the model


class Stage:
    """The recorded Programs of one device over a session's workspace, pages and selector state.

    `open` must be called before any Program runs.
    """

    def __init__(self, model: Model, place: Place, own: Own, audit: Audit | None) -> None:
        self.place, self.backend, self.layers = place, place.backend, place.layers
        self.ws, self.kv, self.state, self.states, self.bases = own
        if model.hp.indexer.top_k:
            if type(self.state) is not SelectorState:
                raise MethodError(
                    "this model chooses the keys that it attends to: leave out attn and prefill"
                )
            self.state = indexer_state(self.state.shape, model.hp)
        # For layers that a method cannot serve, as their heads differ.
        shapes = [with_heads(self.state.shape, hp) for hp in model.hp.kinds[1:]]
        self._plain = [SelectorState(shape) for shape in shapes]
        self._model, self._audit = model, audit
        self.kv.expect(choosing=self.state.chooses)
        if self.state.sharing and 0 < len(self.layers) < model.hp.n_layer:
            raise MethodError(
                "layers share sets, which are on one device only: leave out n_gpu_layers, or "
                "choose another attn"
            )
        if self.state.freezing == "reuse" and self.bases:
            raise MethodError(
                "prefill copies keys of a layer to the next, which quantised keys do not allow: "
                "use kv=project, or type_k f16"
            )
        if self.state.freezing and model.hp.recurrent:
            raise MethodError(
                "prefill freezes tokens, but this model has recurrent layers, whose state every "
                "token must pass: choose another prefill, or cpe:psi=1"
            )
        if self.state.freezing and (model.hp.n_layer_kv or self._plain):
            raise MethodError(
                "prefill freezes tokens, but layers of this model share their KV cache, or have "
                "heads of other widths: choose another prefill, or cpe:psi=1"
            )
        self.frozen = np.zeros(2, np.int64)  # rows of the chunk that the next layer does not change
        self.held = zeros(self.ws.x.shape if self.state.freezing else 0, np.float32)
        self._stops: dict[LinkedProgram, list[int]] = {}
        self.decoded: tuple[int, Program] = -1, Program()  # position and Program of the last step
        self._tables = b""  # the page tables that kernels have seen last
        # For the last position first: a method's kernels for long prompts are then loaded in time.
        last = self.state.prompt_phase(self.kv.capacity)
        self._chunks = {last: self._body(len(self.ws.ids))}
        self._prefills: dict[tuple[str, Kind], tuple[LinkedProgram, list[_Layer]]] = {}
        self._deep: list[np.ndarray] = []  # f32 [n_tok, n_embd]: further rows of the first layers
        phase = self.state.phase(0)
        self._decoding = phase, self._decode(None, None)
        first = self.state.prompt_phase(0)
        if first not in self._chunks:
            self._chunks[first] = self._body(len(self.ws.ids))
        for program, _ in self._chunks.values():
            _check_readers(program, "prefill", self.kv.types)
        _check_readers(self._decoding[1], "attn", self.kv.types)
        self._phases: dict[tuple[str, bool, int, bool], LinkedProgram] = {}

    @property
    def specs(self) -> tuple[set[KernelSpec], set[KernelSpec]]:
        """The kernels that it certainly needs, for either side of its Programs' transfers."""
        chunks = [program for program, _ in self._chunks.values()]
        sides = [program.sides() for program in (*chunks, self._decoding[1])]
        rows, own = zip(*sides, strict=True)
        return set().union(*(s.specs for s in rows)), set().union(*(s.specs for s in own))

    def open(self) -> None:
        """Link the recorded Programs, once the backend has loaded the kernels."""
        phase, decode = self._decoding
        for name, (program, at) in self._chunks.items():
            self._prefills[name, TEXT] = self._linked(program), at
        self._chunks = {}
        self._preparing = self._linked(self._prepare()) if self.state.prepares else None
        self._phases = {(phase, False, 0, False): self._linked(decode)}

    @property
    def pauses(self) -> bool:
        """Whether its decode steps call Python between ops."""
        return bool(self._decoding[1].pauses)

    def news(self) -> list[np.ndarray]:
        """The page tables, if they have changed since the last call."""
        tables = b"".join(table.tobytes() for table in self.kv.tables)
        if tables == self._tables:
            return []
        self._tables = tables
        return [*self.kv.tables]

    @property
    def programs(self) -> list[LinkedProgram]:
        """All Programs that may run, for profiles."""
        preparing = [] if self._preparing is None else [self._preparing]
        chunks = [program for program, _ in self._prefills.values()]
        return [*chunks, *preparing, *self._phases.values()]

    @property
    def ends(self) -> bool:
        """Whether its decode Programs end with the logits."""
        return self.place.output and self.layers.stop == self._model.hp.n_layer

    def prefill(
        self,
        pos: int,
        n_tok: int,
        prompt: range,
        counting: bool,
        *,
        lasting: bool = True,
        kind: Kind = TEXT,
    ) -> None:
        """Run a chunk through the layers; prompt: the positions of all its chunks.

        lasting: whether its K and V will stay, so that methods may prepare them. kind: TEXT, or
        that of a chunk whose rows or angles are given: see `give` and `set_angles`.
        """
        self.kv.begin(pos, n_tok)
        program, layers = self._chunk(self.state.prompt_phase(pos), kind)
        if not self.layers:
            self._run(program, range(len(program)), counting)
        for layer, at in zip(self.layers, layers, strict=True):
            frozen = self.state.frozen(layer, prompt.stop)
            rows = np.clip((frozen.start - pos, frozen.stop - pos), 0, n_tok)
            self.frozen[:] = rows
            self.backend.send(self.frozen)
            if rows[1] - rows[0] < n_tok:
                self._run(program, range(at.first, at.end), counting)
            else:
                reuse = self.state.freezing == "reuse" and layer > 0
                first = at.projected if reuse else at.first
                self._run(program, range(first, at.ready), counting)
        if lasting and self._preparing is not None and self.state.prepare_due(pos + n_tok):
            self.backend.send(*self.state.planned)
            self._replay(self._preparing, 0, len(self._preparing))
        self.kv.finish(pos, n_tok)

    def _chunk(self, phase: str, kind: Kind) -> tuple[LinkedProgram, list[_Layer]]:
        """The Program of a chunk, recorded if there is none."""
        if (phase, kind) not in self._prefills:
            if (frozen := self.state.freezing) and kind.given:
                raise MethodError(
                    f"prefill freezes tokens (kv={frozen}), which pictures do not allow: choose "
                    "another prefill"
                )
            program, layers = self._body(len(self.ws.ids), kind=kind)
            self._prefills[phase, kind] = self._linked(program), layers
        return self._prefills[phase, kind]

    def give(self, deep: Sequence[np.ndarray]) -> None:
        """Set the further rows of the first layers, f32 [n, n_embd] each."""
        while len(self._deep) < len(deep):
            self._deep.append(zeros(self.ws.x.shape, np.float32))
        for to, values in zip(self._deep, deep, strict=False):
            to[: len(values)] = values
            self.backend.send(to)

    def set_angles(self, rope: int, cos: np.ndarray, sin: np.ndarray) -> None:
        """Set the angles of a chunk's positions, f32 [n, n_half] each."""
        for name, values in (("cos", cos), ("sin", sin)):
            rows = self.ws.rows(f"{name}.{rope}", values.shape[1])
            rows[: len(values)] = values
            self.backend.send(np.asarray(rows))

    def decode(self, pos: int, phase: LinkedProgram) -> None:
        """Run one token."""
        self.kv.begin(pos, 1)
        self._replay(phase, 0, len(phase))
        self.kv.finish(pos, 1)
        self.decoded = pos, phase.program

    def own_step(self, pos: int) -> Program:
        """The Program of the decode step at pos, for a Batch.

        Updates the page tables of kernels.
        """
        program = self.phase(pos, None, None).program
        self.decoded = pos, program
        if not self.backend.on_host and (news := self.news()):
            self.backend.send(*news)
        return program

    def phase(
        self,
        step: int,
        audit: Audit | None,
        answer: np.ndarray | None,
        *,
        placed: bool = False,
    ) -> LinkedProgram:
        """The decode Program of a step, recorded if there is none.

        answer: f32 [n_vocab], one of few buffers, receives the logits in place of the workspace.
        placed: the angles of its position are given: see `set_angles`.
        """
        where = 0 if answer is None else answer.ctypes.data
        key = self.state.phase(step), audit is not None, where, placed
        if self.state.planned:
            self.backend.send(*self.state.planned)
        if key not in self._phases:
            kind = TEXT._replace(placed=placed)
            self._phases[key] = self._linked(self._decode(audit, answer, kind))
        return self._phases[key]

    def _linked(self, program: Program) -> LinkedProgram:
        linked: LinkedProgram = self.backend.link(program)
        if program.pauses and not self.backend.on_host:
            raise MethodError("attn is a function of NumPy arrays, which runs on the CPU only")
        self._stops[linked] = self.kv.stops(program)
        return linked

    def _replay(self, linked: LinkedProgram, first: int, last: int) -> None:
        """Run ops first .. last - 1, stopping where pages of the KV cache must be fetched."""
        pauses, stops = dict(linked.program.pauses), self._stops[linked]
        if stops:
            stops = self.kv.due(linked.program, stops)
        for stop in sorted({*stops, *pauses}):
            if first <= stop < last:
                self.backend.run(linked, first, stop)
                if stop in pauses:
                    pauses[stop]()
                if stop in stops:
                    self.kv.fetch(linked.program, stop)
                first = stop
        self.backend.run(linked, first, last)

    def _run(self, program: LinkedProgram, part: range, counting: bool) -> None:
        self._replay(program, part.start, part.stop)
        if counting:
            n_tok, pos, *_ = self.ws.step.tolist()
            program.count(n_tok, pos, part.start, part.stop)

    def _body(
        self, n_tok: int, audit: Audit | None = None, kind: Kind = TEXT
    ) -> tuple[Program, list[_Layer]]:
        """Record this device's layers, from token ids or ws.x to ws.x.

        Returns also their op numbers.

        The embedding is recorded before the first layer, if this device has it.
        """
        rec = new_recording(self.kv.program(self.ws.step), self.ws.step, n_tok)
        around = _Around(self, audit, kind)
        g = Graph(self._model, self.ws, rec, around)
        if self.place.embedding and not kind.given:
            record_embedding(g)
        if self.layers:
            record_begin(g, self.layers, self.kv, placed=kind.placed)
        layers, end = [], 0
        for layer in self.layers:
            first = end
            record_layer(g, layer)
            end = len(rec.program)
            layers.append(_Layer(first, around.projected, around.ready, end))
        return rec.program, layers

    def _prepare(self) -> Program:
        """The Program that prepares a method's data once a part of a prompt is complete."""
        rec = new_recording(self.kv.program(self.ws.step), self.ws.step, len(self.ws.ids))
        rec.program.transfer(self.ws.step)  # without rows: all ops belong to the sequence's side
        for layer in self.layers:
            if (source := self._model.kv_layer(layer)) in self._model.kv_layers:
                self.state_of(layer).prepare(rec, layer, self.view(source))
        return rec.program

    def view(self, layer: int) -> KVView:
        """The pages of a layer of the model, by its number there. Raises MethodError."""
        if layer < self.layers.start:
            raise MethodError(
                f"prefill copies keys of layer {layer} to the next, which is on another device: "
                "use kv=project, or leave out n_gpu_layers"
            )
        before = sum(own < self.layers.start for own in self._model.kv_layers)
        return self.kv.view(self._model.kv_layers.index(layer) - before)

    def state_of(self, layer: int) -> SelectorState:
        """The method's state for a layer that it serves; for others one that selects nothing."""
        return self._plain[0] if self._model.hp.has_own_heads(layer) else self.state

    def record_copy(self, rec: Recording, source: np.ndarray, target: np.ndarray) -> None:
        """Record a copy of the frozen rows from target to source."""
        n = self._model.hp.n_embd
        rec.program.add(ops.COPY_ROWS, rows=self.frozen, source=source, target=target, n=n)

    def deep(self, layer: int, kind: Kind) -> np.ndarray | None:
        """The further rows that are added to what a layer has made, if it gets any."""
        return self._deep[layer] if layer < kind.n_deep else None

    def _decode(self, audit: Audit | None, answer: np.ndarray | None, kind: Kind = TEXT) -> Program:
        """The Program of one token, which includes the logits if it `ends`."""
        program, _ = self._body(1, audit, kind)
        if self.ends:
            rec = new_recording(program, self.ws.step, 1)
            logits = self.ws.logits if answer is None else answer[None]
            record_head(Graph(self._model, self.ws, rec, Hooks()), self.ws.step, logits)
        return program


class _Around(Hooks):
    """The KV cache, attention and token freezing of a stage, as hooks of the layers."""

    def __init__(self, stage: Stage, audit: Audit | None, kind: Kind) -> None:
        self._stage, self._audit, self._kind = stage, audit, kind
        self.projected = self.ready = 0  # see _Layer

    def append(
        self, g: Graph, layer: int, q: Heads, k: Heads | None, v: Heads | None
    ) -> np.ndarray:
        stage, program, source = self._stage, g.rec.program, g.model.kv_layer(layer)
        kv = stage.view(source)
        queries = record_append(g, kv, q, k, v, stage.bases.get(source))
        self.projected = len(program)
        if self._freezes(g, layer) and layer > 0 and stage.state.freezing == "reuse":
            self._record_reuse(g, stage.view(layer - 1), kv)
        if layer == stage.layers[-1]:
            stage.kv.record_end(program, g.rec.step)
        self.ready = len(program)
        return queries

    def index(self, g: Graph, index: Index, k: np.ndarray) -> None:
        record_index(g, index, k)
        assert isinstance(self._stage.state, IndexerState)
        self._stage.state.index = index

    def attend(
        self, g: Graph, layer: int, q: np.ndarray, out: np.ndarray, lse: np.ndarray | None
    ) -> None:
        stage = self._stage
        kv = stage.view(g.model.kv_layer(layer))
        state = stage.state_of(layer)
        both_ways = self._kind.both_ways
        queries = Queries(layer, q, out, lse)
        record_attention(g, state, queries, kv, self._audit, both_ways=both_ways)
        if isinstance(stage.state, IndexerState):
            stage.state.index = None

    def attended(self, g: Graph, layer: int) -> None:
        if self._freezes(g, layer):
            self._stage.record_copy(g.rec, g.x, self._stage.held)

    def recur(self, g: Graph, layer: int, record: Callable[[State], None]) -> None:
        states = self._stage.states
        record(lambda name, *shape: states.view(layer, name).reshape(shape))
        if layer == self._stage.layers[-1]:
            self._stage.kv.record_end(g.rec.program, g.rec.step)
        self.projected = self.ready = len(g.rec.program)

    def end(self, g: Graph, layer: int) -> None:
        if (rows := self._stage.deep(layer, self._kind)) is not None:
            mapped(g, rows, g.x, add=True)
        if self._freezes(g, layer):
            self._stage.record_copy(g.rec, self._stage.held, g.x)

    def _freezes(self, g: Graph, layer: int) -> bool:
        stage = self._stage
        return g.rec.n_tok > 1 and len(stage.state.frozen(layer, stage.kv.capacity)) > 0

    def _record_reuse(self, g: Graph, before: KVView, own: KVView) -> None:
        g.rec.program.add(
            ops.COPY_KV,
            (g.hp.head_dim, *own.types),
            step=g.rec.step,
            rows=self._stage.frozen,
            k_from=before.k,
            v_from=before.v,
            k_from_table=before.k_table,
            v_from_table=before.v_table,
            k_to=own.k,
            v_to=own.v,
            k_to_table=own.k_table,
            v_to_table=own.v_table,
            n_head_kv=g.hp.n_head_kv,
        )


def record_rows(g: Graph) -> None:
    """Record a decode step without the hooks and the head: from ws.ids to ws.x."""
    record_embedding(g)
    record_begin(g, range(0), None)
    for layer in range(g.hp.n_layer):
        record_layer(g, layer)


class _Noting(Hooks):
    """Notes the recurrent states that layers ask for, and the layers that append keys."""

    def __init__(self, ws: Measured) -> None:
        self._ws = ws

    def append(
        self, g: Graph, layer: int, q: Heads, k: Heads | None, v: Heads | None
    ) -> np.ndarray:
        if k is not None:
            self._ws.kv_layers.add(layer)
        if has_basis(g.model, g.model.kv_layer(layer)):
            measure_basis(g, q, k)
        return q.x

    def recur(self, g: Graph, layer: int, record: Callable[[State], None]) -> None:
        def state(name: str, *shape: int) -> np.ndarray:
            self._ws.states[layer, name] = shape
            return np.zeros(shape, np.float32)

        record(state)


def measure(model: Model) -> Needs:
    """The buffers that the model's graph needs of a workspace. Raises MissingTensor."""
    ws = Measured(model.hp)
    g = Graph(model, ws, new_recording(Program(), ws.step, 1), _Noting(ws))
    record_rows(g)
    record_head(g, ws.step, ws.logits)
    return ws.needs


def record_begin(g: Graph, layers: range, kv: KVCache | None, *, placed: bool = False) -> None:
    """Record the beginning of a pass over these layers of a sequence: its angles and pages.

    placed: the angles are given.
    """
    table, learned = g.model.weights.top.position_embd, None
    if g.model.arch.positions == "all" or (g.model.arch.positions and table):
        learned = table.vector()
    rows = [] if learned is None else [g.x]
    g.rec.program.transfer(g.rec.step, *rows)
    # Angles that no layer reads have no buffers.
    ropes = {g.model.rope_of(layer) for layer in layers}
    for rope in sorted(r for r in ropes if f"cos.{r}" in g.model.needs.rows and not placed):
        angles, found = g.angles(rope), g.frequencies(rope).of(kv.capacity if kv else 0)
        g.rec.program.add(
            ops.ROPE_TABLE,
            step=g.rec.step,
            inv_freq=found.inv_freq,
            cos=angles.cos,
            sin=angles.sin,
            n_half=len(found.inv_freq),
            scale=found.scale,
        )
    if kv is not None:
        kv.record_begin(g.rec.program, g.rec.step)
        if learned is not None and layers.start == 0:
            record_rows_added(g, learned)
    g.rec.program.transfer(g.rec.step, *rows)


def record_embedding(g: Graph) -> None:
    """Record g.x from the token ids."""
    table = g.model.weights.token_embd.matrix()
    row_bytes = table.data.nbytes // table.n_out
    g.rec.program.add(
        ops.EMBED,
        (table.type,),
        cost=lambda n_tok, pos: (n_tok * row_bytes, 0),
        step=g.rec.step,
        ids=g.ws.ids,
        table=table.data,
        y=g.x,
        n=g.hp.n_embd,
        n_id=1,
        scale=math.sqrt(g.hp.n_embd)
        if g.model.arch.scale_embedding
        else g.hp.embedding_scale or 1.0,
    )
    if g.model.arch.norm_embedding:
        w = g.model.weights.top.token_embd_norm
        plain = g.model.arch.norm_embedding == "plain"
        norm_rows(g, g.x, ones(g.hp.n_embd) if plain else w.vector(), w.bias())


def record_head(g: Graph, rows: np.ndarray, logits: np.ndarray) -> None:
    """Record the output norm of the rows that `rows` selects, and their logits f32 [n, n_vocab]."""
    weights, hp = g.model.weights, g.hp
    if not g.model.norms_output:
        normed = Source(g.x, step=rows)
    else:
        normed = norm(g, g.x, weights.output_norm, rows)
    stored(g, linear(g, normed, weights.output), logits)
    scale, cap = hp.logit_scale or 1.0, hp.logit_softcap
    if cap:
        mapped(g, logits, logits, "tanh", inner=scale / cap, outer=cap)
    elif scale != 1.0:
        mapped(g, logits, logits, outer=scale)


def _check_readers(program: Program, role: str, types: KVTypes) -> None:
    """Raise MethodError if an op reads K or V but not of this type."""
    for call in program.calls:
        op = call.spec.op
        for name, pages, constant, type in (
            ("keys", "k_pages", "type_k", types.k),
            ("values", "v_pages", "type_v", types.v),
        ):
            if type != "f16" and pages in op.fields and constant not in op.constants:
                raise MethodError(
                    f"the method of {role} reads {name} as f16, this cache has {type}: "
                    f"use {constant} f16, or another method"
                )
