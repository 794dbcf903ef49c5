"""Decode steps of several sequences at once: each weight is read once for all of them.

A step's products run over one row a sequence. All else (angles, keys, selection, attention) are the
ops of each session's own decode Program, for its own pages and selector state, pointed at its row;
so no method needs to know of batches, and every session may have another one.
"""

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tamis.engine.engine import Engine
from tamis.engine.session import Session
from tamis.graph.device_graph import OwnOps, record_embedding, record_head
from tamis.graph.layer import record_products, record_update
from tamis.graph.workspace import HEAD_ROWS, Workspace, new_workspace
from tamis.jit_kernels.backends.cpu import Backend, JoinedProgram, LinkedProgram
from tamis.jit_kernels.contract.program import Call, Program
from tamis.select.base import Recording

MAX_ROWS = HEAD_ROWS  # sequences of one Program; more run in groups


class _Stretches(NamedTuple):
    linked: LinkedProgram
    parts: list[range]


class Batch:
    """Steps the sessions of an engine together; those that cannot be are stepped one by one.

    These are sessions with an audit or with keys and values on disk, those on a CUDA device, and
    one alone. Logits differ from `Session.decode`'s by rounding: products of several rows are
    summed in another order.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._backend = engine, engine.backend
        self._shared: _Stretches | None = None
        # Of each session's decode Program, by row: its own ops, pointed at that row.
        self._placed: weakref.WeakKeyDictionary[Program, dict[int, _Stretches]]
        self._placed = weakref.WeakKeyDictionary()
        self._rows: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
        self._joined: tuple[list[_Stretches], JoinedProgram] | None = None  # of the last step

    @cached_property
    def _ws(self) -> Workspace:
        return new_workspace(self._engine.hp, MAX_ROWS, self._backend)

    def step(self, tokens: Mapping[Session, int]) -> dict[Session, np.ndarray]:
        """Append a token to each session; the logits of each, f32 [n_vocab].

        Raises what `Session.decode` does; no session then holds its token.
        """
        held = {session: session.n_past for session in tokens}
        together = [s for s in tokens if s.batchable and isinstance(self._backend, Backend)]
        groups = [together[i : i + MAX_ROWS] for i in range(0, len(together), MAX_ROWS)]
        groups = [group for group in groups if len(group) > 1]
        found: dict[Session, np.ndarray] = {}
        try:
            for session, token in tokens.items():
                session.begin_step(token)
            for group in groups:
                found |= self._step({session: tokens[session] for session in group})
            for session in tokens.keys() - found.keys():
                found[session] = session.decode(tokens[session])
        except BaseException:
            for session, n in held.items():
                session.truncate(n)
            raise
        return found

    def _step(self, tokens: dict[Session, int]) -> dict[Session, np.ndarray]:
        sessions = self._in_rows(list(tokens))
        own = [self._at_row(session.own_step(), i) for i, session in enumerate(sessions)]
        self._ws.ids[: len(sessions)] = [tokens[session] for session in sessions]
        self._ws.step[:3] = len(sessions), 0, 0
        assert isinstance(self._backend, Backend)
        self._backend.run(self._join(own))
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

    def _join(self, own: list[_Stretches]) -> JoinedProgram:
        """The Program of these sessions' step."""
        if self._joined is not None and self._joined[0] == own:
            return self._joined[1]
        if self._shared is None:
            self._shared = self._recorded()
        linked, steps = self._shared.linked, []
        for i, part in enumerate(self._shared.parts):
            steps.append([(linked, part)])
            if i < len(own[0].parts):
                steps.append([(each.linked, each.parts[i]) for each in own])
        self._joined = own, JoinedProgram(steps)
        return self._joined[1]

    def _recorded(self) -> _Stretches:
        """What all rows share: before the angles, before each layer's new keys, and the end."""
        model, ws = self._engine.model, self._ws
        rec = Recording(Program(), ws.step, MAX_ROWS, 1)
        record_embedding(rec, model, ws)
        ends = [len(rec.program)]
        for layer in range(model.hp.n_layer):
            record_products(rec, model, ws, layer)
            ends.append(len(rec.program))
            record_update(rec, model, ws, layer)
        record_head(rec, model, ws, ws.step, ws.logits)
        ends.append(len(rec.program))
        parts = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
        return _Stretches(self._backend.link(rec.program), parts)

    def _at_row(self, own: OwnOps, row: int) -> _Stretches:
        """A session's own ops, reading and writing row `row` of this workspace."""
        by_row = self._placed.setdefault(own.program, {})
        if row not in by_row:
            names = ("q", "k", "v", "att")
            moves = []
            program, parts = Program(), []
            program.arrays = dict(own.program.arrays)
            for name in names:
                old, new = getattr(own.ws, name)[0], getattr(self._ws, name)[row]
                begin, to = old.ctypes.data, new.ctypes.data
                moves.append((begin, begin + old.nbytes, to - begin))
                program.arrays[to] = new
            for part in own.parts:
                first = len(program)
                program.calls += [
                    _moved(call, moves) for call in own.program.calls[part.start : part.stop]
                ]
                parts.append(range(first, len(program)))
            by_row[row] = _Stretches(self._backend.link(program), parts)
        return by_row[row]


def _moved(call: Call, moves: list[tuple[int, int, int]]) -> Call:
    """The call with each address of a move (begin, end, by how much) moved."""

    def moved(name: str, value: int | float) -> int | float:
        if not name.endswith("_f"):
            for begin, end, by in moves:
                if begin <= value < end:
                    return value + by
        return value

    fields = zip(call.spec.op.fields, call.values, strict=True)
    return call._replace(values=tuple(moved(name, value) for name, value in fields))
