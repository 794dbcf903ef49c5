"""Decode steps of several sequences at once: each weight is read once for all of them.

A step's products run over one row a sequence. All else (RoPE angles, append, selection, attention)
are the ops of each session's own decode Program, between its transfers: on its own pages and
selector state, with the row's addresses. So methods are independent of batches, and every session
may have another one.
"""

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tamis.engine.engine import MOST_ADAPTED, Engine
from tamis.engine.session import Session
from tamis.graph.context import Graph, Hooks
from tamis.graph.device_graph import record_rows
from tamis.graph.workspace import HEAD_ROWS, Chunk, Workspace
from tamis.jit_kernels.backends.base import Backend, LinkedProgram
from tamis.jit_kernels.contract.program import Call, Program
from tamis.model.model import Model
from tamis.select.base import Recording

MAX_ROWS = HEAD_ROWS  # sequences of one Program; more run in groups


class _Segments(NamedTuple):
    linked: LinkedProgram
    parts: list[range]


class _Rows:
    """Steps of sessions of one model: its products are of all of their rows."""

    def __init__(self, model: Model, backend: Backend) -> None:
        self.model, self._backend = model, backend
        self._shared: _Segments | None = None
        # Of each session's decode Program, by row: its own ops, pointed at that row.
        self._placed: weakref.WeakKeyDictionary[Program, dict[int, _Segments]]
        self._placed = weakref.WeakKeyDictionary()
        self._rows: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
        self._joined: tuple[list[_Segments], Any] | None = None  # of the last step

    @cached_property
    def _ws(self) -> Workspace:
        return Workspace(self.model, self._backend, Chunk(self.model.hp, MAX_ROWS))

    def step(self, tokens: dict[Session, int]) -> dict[Session, np.ndarray]:
        """Append a token to each session, of at most MAX_ROWS; their logits."""
        sessions = self._in_rows(list(tokens))
        if self._shared is None:
            self._shared = self._recorded()
        shared = self._shared
        own = [self._at_row(session.own_step(), shared, i) for i, session in enumerate(sessions)]
        self._ws.ids[: len(sessions)] = [tokens[session] for session in sessions]
        self._ws.step[:3] = len(sessions), 0, 0
        self._backend.run(self._join(shared, own))
        logits = self._ws.logits[: len(sessions)].copy()
        for session in sessions:
            session.end_step(tokens[session])
        return dict(zip(sessions, logits, strict=True))

    def _in_rows(self, sessions: list[Session]) -> list[Session]:
        """The sessions in the order of their rows: as many as can be stay where they were."""
        n = len(sessions)
        stay = {row: s for s in sessions if (row := self._rows.get(s, n)) < n}
        rest = iter([s for s in sessions if s not in stay.values()])
        order = [stay[row] if row in stay else next(rest) for row in range(n)]
        for row, session in enumerate(order):
            self._rows[session] = row
        return order

    def _join(self, shared: _Segments, own: list[_Segments]) -> Any:
        """The Program of these sessions' step."""
        if self._joined is not None and self._joined[0] == own:
            return self._joined[1]
        steps = []
        for i, part in enumerate(shared.parts):
            steps.append([(shared.linked, part)])
            if i < len(own[0].parts):
                steps.append([(each.linked, each.parts[i]) for each in own])
        self._joined = own, self._backend.join(steps)
        return self._joined[1]

    def _recorded(self) -> _Segments:
        """What all rows share: the ops of a decode step over rows."""
        ws = self._ws
        rec = Recording(Program(), ws.step, MAX_ROWS, 1)
        record_rows(Graph(self.model, ws, rec, Hooks()), ws.logits)
        return _Segments(self._backend.link(rec.program), rec.program.segments[::2])

    def _at_row(self, own: Program, shared: _Segments, row: int) -> _Segments:
        """A session's own ops, reading and writing row `row` of this workspace."""
        by_row = self._placed.setdefault(own, {})
        if row not in by_row:
            moves, program, parts = set(), Program(), []
            program.arrays = dict(own.arrays)
            for transfer, to_transfer in zip(
                own.transfers, shared.linked.program.transfers, strict=True
            ):
                for old, new in zip(transfer.rows, to_transfer.rows, strict=True):
                    begin, to = old.ctypes.data, new[row].ctypes.data
                    moves.add((begin, begin + old[0].nbytes, to - begin))
                    program.arrays[to] = new[row]
            for part in own.segments[1::2]:
                first = len(program)
                program.calls += [_moved(call, moves) for call in own.calls[part.start : part.stop]]
                parts.append(range(first, len(program)))
            by_row[row] = _Segments(self._backend.link(program), parts)
        return by_row[row]


class Batch:
    """Steps the sessions of an engine together; those that cannot be are stepped one by one.

    These are sessions with an audit or with a KV cache on disk, those on a CUDA device, and
    one alone of its adapters. Logits differ from `Session.decode`'s by rounding: products of
    several rows are summed in another order.
    """

    def __init__(self, engine: Engine) -> None:
        self._backend = engine.backend
        self._of: dict[int, _Rows] = {}  # by their models' ids, which they keep

    def step(self, tokens: Mapping[Session, int]) -> dict[Session, np.ndarray]:
        """Append a token to each session; the logits of each, f32 [n_vocab].

        Raises what `Session.decode` does; no session then holds its token.
        """
        held = {session: session.n_past for session in tokens}
        together = [s for s in tokens if s.batchable and self._backend.joins]
        alike: dict[int, list[Session]] = {}  # by their model: products are of one
        for session in together:
            alike.setdefault(id(session.model), []).append(session)
        groups = [
            sessions[i : i + MAX_ROWS]
            for sessions in alike.values()
            for i in range(0, len(sessions), MAX_ROWS)
        ]
        groups = [group for group in groups if len(group) > 1]
        found: dict[Session, np.ndarray] = {}
        try:
            for session, token in tokens.items():
                session.begin_step(token)
            for group in groups:
                rows = self._rows_of(group[0].model)
                found |= rows.step({session: tokens[session] for session in group})
            for session in tokens.keys() - found.keys():
                found[session] = session.decode(tokens[session])
        except BaseException:
            for session, n in held.items():
                session.truncate(n)
            raise
        return found

    def _rows_of(self, model: Model) -> _Rows:
        if id(model) not in self._of:
            while len(self._of) > MOST_ADAPTED:
                del self._of[next(iter(self._of))]
            self._of[id(model)] = _Rows(model, self._backend)
        return self._of[id(model)]


def _moved(call: Call, moves: set[tuple[int, int, int]]) -> Call:
    """The call with each address of a move (begin, end, by how much) moved."""

    def moved(name: str, value: int | float) -> int | float:
        if name not in call.spec.op.floats:
            for begin, end, by in moves:
                if begin <= value < end:
                    return value + by
        return value

    fields = zip(call.spec.op.fields, call.values, strict=True)
    return call._replace(values=tuple(moved(name, value) for name, value in fields))
