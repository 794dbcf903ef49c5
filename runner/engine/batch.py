"""Decode steps of several sequences at once: each weight is read once for all of them.

A step's products run over one row per sequence. Everything else (RoPE angles, append, selection,
attention) is done by the ops of each session's own decode Program, between its transfers: on its
own pages and selector state, with the row's addresses. So methods are independent of batches, and
every session may have a different one.
"""

import math
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tamis.engine.checks import check_count, shown
from tamis.engine.engine import MOST_ADAPTED, Engine
from tamis.engine.session import Session
from tamis.graph.context import Graph, Hooks
from tamis.graph.device_graph import record_head, record_rows
from tamis.graph.forward import HostLogits, host_logits
from tamis.graph.topk_logits import MOST, Best, BestOfRows
from tamis.graph.workspace import Chunk, Workspace
from tamis.jit_kernels.backends.base import Backend, LinkedProgram
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Call, KernelSpec, Program
from tamis.model.model import Model
from tamis.select.base import Recording

# the most rows whose products are exact: beyond, products are compute-bound and use 8 bits
EXACT_ROWS = 4
BEST = 1, 8, 64, MOST  # numbers of best logits that rows may be searched for at once


class _Segments(NamedTuple):
    linked: LinkedProgram
    parts: list[range]


class _Head(NamedTuple):
    """The output head of all rows, and the buffer of its logits."""

    linked: LinkedProgram
    logits: np.ndarray  # f32 [rows, n_vocab]
    answer: HostLogits | None  # the memory of the logits; None: the workspace's


class _RowSteps:
    """Steps of sessions of one model: its products cover the rows of all."""

    def __init__(self, model: Model, backend: Backend) -> None:
        self.model, self._backend = model, backend
        self._shared: _Segments | None = None
        self._heads: list[_Head] = []
        self._best: dict[int, BestOfRows] = {}  # by how many
        self._pads = 1  # the least rows of a step
        # By row, each session's own ops of its decode Program, with addresses of that row.
        self._placed: weakref.WeakKeyDictionary[Program, dict[int, _Segments]]
        self._placed = weakref.WeakKeyDictionary()
        self._rows: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
        self._joined: tuple[list[_Segments], Any] = [], None  # of the previous step
        self._steps = np.zeros((backend.joins, ops.STEP_SIZE), np.int64)  # step records of the rows

    @cached_property
    def _ws(self) -> Workspace:
        n = self._backend.joins
        return Workspace(self.model, self._backend, Chunk(self.model.hp, n, n))

    def step(
        self, tokens: dict[Session, int], programs: dict[Session, Program], n_best: int | None
    ) -> dict[Session, Best | np.ndarray]:
        """Append a token to each of at most `joins` sessions.

        Returns their logits, or the n_best best.

        programs: those of this step, by session.
        """
        if self._shared is None:
            self._shared = self._recorded()
        shared, rows = self._shared, self._in_rows(list(tokens))
        segments = [self._at_row(programs[session], shared, i) for i, session in enumerate(rows)]
        # Unused rows hold token 0.
        n_row = max(len(rows), self._pads)
        self._ws.ids[:n_row] = [*map(tokens.__getitem__, rows), *[0] * (n_row - len(rows))]
        self._ws.step[:] = n_row, 0, 0, 0, 0, EXACT_ROWS
        held = [session.n_past for session in rows]
        self._steps[: len(rows)] = [(1, n, 0, n, n + 1, 0) for n in held]
        self._backend.send(self._ws.record, self._steps)
        self._backend.run(self._join(shared, segments))
        head, best = self._start_head(len(rows), n_best)
        for session in rows:  # while a GPU is working
            session.end_step(tokens[session])
        if best is None:
            return dict(zip(rows, self._logits(head, len(rows)), strict=True))
        assert n_best is not None
        best_rows = best.found(len(rows), n_best)
        return {
            session: each if math.isfinite(each.log_sum) else self._fetched(head.logits[row])
            for row, (session, each) in enumerate(zip(rows, best_rows, strict=True))
        }

    def _start_head(self, n: int, n_best: int | None) -> tuple[_Head, BestOfRows | None]:
        """Start computing the logits of n rows, and the search for their best ones if asked."""
        last = self._heads[-1]
        most = next((most for most in BEST if n_best is not None and n_best <= most), None)
        if most is None or most > last.logits.shape[1]:
            free = (head for head in self._heads if head.answer is not None and head.answer.free)
            head = next(free, last)
            self._backend.run(head.linked)
            return head, None
        if most not in self._best:
            self._best[most] = BestOfRows(self._backend, last.logits, most)
        self._backend.run(last.linked)
        self._best[most].start(n)
        return last, self._best[most]

    def _logits(self, head: _Head, n: int) -> np.ndarray:
        """A copy of the logits of the first n rows."""
        if head.answer is None:
            return self._fetched(head.logits[:n])
        self._backend.fetch(head.logits[:n])
        return head.answer.given()[:n]

    def _fetched(self, logits: np.ndarray) -> np.ndarray:
        """A copy of logits, once they are computed."""
        self._backend.fetch(logits)
        return logits.copy()

    def _in_rows(self, sessions: list[Session]) -> list[Session]:
        """The sessions in the order of their rows; as many as possible keep their row."""
        n = len(sessions)
        if all(self._rows.get(session) == row for row, session in enumerate(sessions)):
            return sessions
        stay = {row: s for s in sessions if (row := self._rows.get(s, n)) < n}
        rest = iter([s for s in sessions if s not in stay.values()])
        order = [stay[row] if row in stay else next(rest) for row in range(n)]
        for row, session in enumerate(order):
            self._rows[session] = row
        return order

    def _join(self, shared: _Segments, segments: list[_Segments]) -> Any:
        """The joint Program of these sessions' step."""
        if self._joined[0] != segments:
            steps = []
            for i, part in enumerate(shared.parts):
                steps.append([(shared.linked, part)])
                if i < len(segments[0].parts):
                    steps.append([(each.linked, each.parts[i]) for each in segments])
            self._joined = segments, self._backend.join(steps, self._joined[1])
        return self._joined[1]

    def _recorded(self) -> _Segments:
        """The ops that all rows share: those of a decode step over rows, and its heads."""
        ws, n = self._ws, self._backend.joins
        rec = Recording(Program(), ws.step, n, 1)
        record_rows(Graph(self.model, ws, rec, Hooks()))
        products = {spec for spec in rec.program.specs if spec.op is ops.MATMUL}
        if all(ops.packed_form(str(spec.constants[0])) == "quantised" for spec in products):
            self._pads = self._backend.pads
        buffers = [(a.logits, a) for a in host_logits(self._backend, *ws.logits.shape)]
        for logits, answer in [*buffers, (ws.logits, None)]:
            head = Program()
            g = Graph(self.model, ws, Recording(head, ws.step, n, 1), Hooks())
            record_head(g, ws.step, logits)
            self._heads.append(_Head(self._backend.link(head), logits, answer))
        return _Segments(self._backend.link(rec.program), rec.program.segments[::2])

    def _at_row(self, recorded: Program, shared: _Segments, row: int) -> _Segments:
        """A session's own ops, with the addresses of row `row` of this workspace."""
        by_row = self._placed.setdefault(recorded, {})
        if row not in by_row:
            program, parts = Program(), []
            program.arrays = dict(recorded.arrays)
            # By the start of a row; layers may have rows of different widths in the same buffer.
            moves: dict[int, _Move] = {}
            both = zip(recorded.transfers, shared.linked.program.transfers, strict=True)
            for i, (transfer, to_transfer) in enumerate(both):
                pairs = [(transfer.step, self._steps[row])]
                rows = zip(transfer.rows, to_transfer.rows, strict=True)
                pairs += [(x[0], y[row]) for x, y in rows]
                for old, new in pairs:
                    move = _Move(old.ctypes.data, old.nbytes, new)
                    moves[move.begin] = move
                    program.arrays[move.moved(move.begin)] = new
                if i % 2:  # the ops of the sequence's side end here
                    part, first = recorded.segments[i], len(program)
                    for call in recorded.calls[part.start : part.stop]:
                        program.calls.append(_moved(call, moves.values(), program.arrays))
                    parts.append(range(first, len(program)))
            by_row[row] = _Segments(self._backend.link(program), parts)
        return by_row[row]


class Batch:
    """Steps the sessions of an engine together; those that cannot be joined are stepped one by one.

    Stepped alone are sessions with an audit, with keys on a disk or on another device than the
    weights, and the only one with its adapters; on a GPU also the only one with its method, or with
    the kind of step that its method takes. Logits differ from `Session.decode`'s by rounding:
    products of several rows are summed in another order, on a GPU those of quantised weights like a
    prompt's. On the CPU more than EXACT_ROWS rows keep 8 bits of most activations, unless precision
    is "exact".
    """

    def __init__(self, engine: Engine) -> None:
        self._backend = engine.backend
        self._of: dict[
            int, _RowSteps
        ] = {}  # by the ids of their models, which the values keep alive
        self._numbers: dict[tuple[KernelSpec, ...], int] = {}
        self._kinds: weakref.WeakKeyDictionary[Program, int] = weakref.WeakKeyDictionary()

    def step(self, tokens: Mapping[Session, int]) -> dict[Session, np.ndarray]:
        """Append a token to each session; returns the logits of each, f32 [n_vocab].

        Raises what `Session.decode` raises; then no session holds its token.
        """
        results = self.step_best(tokens, None)
        return {session: row for session, row in results.items() if isinstance(row, np.ndarray)}

    def step_best(
        self, tokens: Mapping[Session, int], n: int | None
    ) -> dict[Session, Best | np.ndarray]:
        """Do what `step` does, but return only the n best logits where that saves time.

        See decode_best.
        """
        check_count("n", n, least=1)
        for session, token in tokens.items():
            wrong = token if isinstance(session, Session) else session
            if wrong is session or not isinstance(token, int | np.integer):
                raise TypeError(f"tokens has {shown(wrong)}, expected a token id for each session")
        held = {session: session.n_past for session in tokens}
        results: dict[Session, Best | np.ndarray] = {}
        try:
            for session, token in tokens.items():
                session.begin_step(token)
            programs = {s: s.own_step() for s in tokens if self._joins(s)}
            for group in self._groups(programs):
                rows = self._rows_of(group[0].model)
                results |= rows.step({session: tokens[session] for session in group}, programs, n)
            for session in tokens.keys() - results.keys():
                results[session] = session.decode_best(tokens[session], n)
        except BaseException:
            for session, n in held.items():
                session.truncate(n)
            raise
        return results

    def _joins(self, session: Session) -> bool:
        here = session.backend is self._backend
        return bool(self._backend.joins) and here and session.batchable

    def _groups(self, programs: dict[Session, Program]) -> list[list[Session]]:
        """The sessions that are stepped together: at least two of one model."""
        alike: dict[tuple[int, int], list[Session]] = {}
        for session, program in programs.items():
            kind = self._kind_of(program) if self._backend.joins_alike else 0
            alike.setdefault((id(session.model), kind), []).append(session)
        n = self._backend.joins
        groups = [
            sessions[i : i + n] for sessions in alike.values() for i in range(0, len(sessions), n)
        ]
        return [group for group in groups if len(group) > 1]

    def _kind_of(self, program: Program) -> int:
        """A number shared by Programs whose sequence-side kernels are the same."""
        if program not in self._kinds:
            self._kinds[program] = self._numbers.setdefault(program.kinds, len(self._numbers))
        return self._kinds[program]

    def _rows_of(self, model: Model) -> _RowSteps:
        if id(model) not in self._of:
            while len(self._of) > MOST_ADAPTED:
                del self._of[next(iter(self._of))]
            self._of[id(model)] = _RowSteps(model, self._backend)
        return self._of[id(model)]


class _Move(NamedTuple):
    """A mapping of a row of a session's own buffer to a row of another buffer."""

    begin: int
    n_byte: int
    to: np.ndarray

    def moved(self, address: int) -> int:
        """The address of the same element in the other buffer."""
        return address - self.begin + int(self.to.ctypes.data)

    def part(self, address: int) -> np.ndarray:
        """The rest of the other row from this element on, uint8."""
        return self.to.reshape(-1).view(np.uint8)[address - self.begin :]


def _moved(call: Call, moves: Iterable[_Move], arrays: dict[int, np.ndarray]) -> Call:
    """The call with addresses of mapped rows replaced; they may point within rows.

    arrays: the arrays that addresses point to; missing ones are added.
    """

    def moved(name: str, value: int | float) -> int | float:
        if name not in call.spec.op.addresses:
            return value
        for move in moves:
            if move.begin <= value < move.begin + move.n_byte:
                at = move.moved(int(value))
                arrays.setdefault(at, move.part(int(value)))
                return at
        return value

    fields = zip(call.spec.op.fields, call.values, strict=True)
    return call._replace(values=tuple(moved(name, value) for name, value in fields))
