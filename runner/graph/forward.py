"""The forward pass of a session: its stages in order, one per device, and the output head."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tamis.graph.audit import Audit
from tamis.graph.context import Graph, Hooks
from tamis.graph.device_graph import TEXT, Rows, Stage, record_head
from tamis.graph.topk_logits import SPECS, Best, BestLogits
from tamis.graph.workspace import HEAD_ROWS
from tamis.jit_kernels.backends.base import Backend, LinkedProgram
from tamis.jit_kernels.compile.workers import Progress
from tamis.jit_kernels.contract.program import OpCost, Program
from tamis.model.model import Model
from tamis.model.rope import section_angles
from tamis.platform.memory import huge_zeros
from tamis.select.base import Recording

AUDITED = "report", "indptr", "chosen", "meta"  # results of an audit, inputs of costs


class Forward:
    """Runs chunks and single tokens through the stages; between two of them ws.x is transferred."""

    def __init__(
        self,
        model: Model,
        stages: Sequence[Stage],
        audit: Audit | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._model, self._stages, self._audit = model, stages, audit
        self._ws, self._last = stages[0].ws, stages[-1]
        self._ending = next(stage for stage in stages if stage.place.output)
        head, ws = Program(), self._ending.ws
        rec = Recording(head, ws.head_step, HEAD_ROWS, 1)
        record_head(Graph(model, ws, rec, Hooks()), ws.head_rows, ws.logits)
        for stage in stages:
            rows, own = stage.specs
            rows |= head.specs | SPECS if stage is self._ending else set()
            own |= set() if audit is None else audit.specs
            stage.backend.load(rows, own, progress)
        for stage in stages:
            stage.open()
        self._head = self._ending.backend.link(head)
        # If kernels can write to host memory, a copy of one row costs no more.
        ending = self._ending.backend
        self._answers = [] if ending.on_host else host_logits(ending, model.hp.n_vocab)
        self._answer: HostLogits | None = None  # the one that holds the last step's logits
        self._counting = False
        self._best: dict[int, BestLogits] = {}  # by how many

    @property
    def n_ubatch(self) -> int:
        """The most tokens of a chunk."""
        return len(self._ws.ids)

    def prefill(
        self,
        ids: np.ndarray,
        pos: int,
        prompt: range,
        *,
        lasting: bool = True,
        rows: Rows | None = None,
        places: np.ndarray | None = None,
    ) -> None:
        """Run a chunk of at most n_ubatch tokens from position pos on; its rows stay in ws.x.

        prompt: the positions of all its chunks; lasting: whether its K and V will stay. rows: what
        is given in place of the ids. places: as for `decode`, of each token. Between layers the
        interpreter handles signals, so Ctrl-C stops a long chunk.
        """
        kind = TEXT._replace(placed=places is not None)
        self._set(ids, pos, prompt)
        if rows is not None:
            n_embd = self._model.hp.n_embd
            parts = np.split(rows.values, range(n_embd, rows.values.shape[1], n_embd), axis=1)
            self._ws.x[: len(ids)] = parts[0]
            self._stages[0].backend.send(self._ws.x[: len(ids)])
            kind = kind._replace(given=True, both_ways=not rows.causal, n_deep=len(parts) - 1)
            for stage in self._stages:
                stage.give(parts[1:])
        self._place(places)
        for before, stage in zip([None, *self._stages], self._stages, strict=False):
            self._pass_on(before, stage, len(ids))
            stage.prefill(pos, len(ids), prompt, self._counting, lasting=lasting, kind=kind)
        self._pass_on(self._last, self._ending, len(ids))

    def _place(self, places: np.ndarray | None) -> None:
        """Set the angles of a chunk's positions of time, height and width, int [n, 3]."""
        if places is None:
            return
        model = self._model
        angles = section_angles(model.hp, model.rope, places, model.arch.interleaved_sections)
        for stage in self._stages:
            stage.set_angles(0, *angles)

    def decode(
        self, token_id: int, pos: int, step: int, *, whole: bool, places: np.ndarray | None = None
    ) -> None:
        """Run one token. `logits_of_step` returns its logits; `best` does too, if not `whole`.

        whole: all logits are wanted, where Python reads them. places: its positions of time, height
        and width, int [1, 3]; None: all are `pos`. Raises AuditError if a step is audited and a
        bound is violated.
        """
        self._place(places)
        audit = self._audit if self._audit is not None and self._audit.due() else None
        free = (answer for answer in self._answers if answer.free)
        self._answer = next(free, None) if whole and self._last.ends else None
        logits = None if self._answer is None else self._answer.logits
        phases = [
            stage.phase(
                step, audit, logits if stage is self._last else None, placed=places is not None
            )
            for stage in self._stages
        ]
        self._set(np.array([token_id], np.int32), pos, range(pos, pos + 1))
        before = None
        for stage, phase in zip(self._stages, phases, strict=True):
            self._pass_on(before, stage, 1)
            stage.decode(pos, phase)
            self._count(stage, phase, 1, pos)
            before = stage
        if audit is not None:
            program = phases[-1].program
            self._last.backend.fetch(*program.named(*AUDITED))
            audit.take(program, self._last.state, step, pos)
        if not self._last.ends:
            self._pass_on(self._last, self._ending, 1)
            self._run_head(0, 1)

    def logits_of_step(self) -> np.ndarray:
        """The logits of the last decoded token, f32 [n_vocab], in memory of the caller."""
        if self._answer is None:
            return self._fetched(self._ws.logits[0])
        self._ending.backend.fetch(self._answer.logits)
        return self._answer.given()

    def best(self, n: int) -> Best:
        """The n best of the logits of a token that was not decoded as `whole`."""
        if n not in self._best:
            self._best[n] = BestLogits(self._ending.backend, self._ws.logits[0], n)
        return self._best[n].find()

    def own_step(self, pos: int) -> Program:
        """The Program of the decode step at pos, for a Batch."""
        return self._stages[0].own_step(pos)

    def logits(self, row: int, n_row: int) -> np.ndarray:
        """A copy of logits of n_row <= HEAD_ROWS rows of the last chunk, f32 [n_row, n_vocab]."""
        self._run_head(row, n_row)
        return self._fetched(self._ws.logits[:n_row])

    def rows(self, name: str, *shape: int) -> np.ndarray:
        """A buffer of the first device's graph, [n_ubatch, *shape]."""
        return self._ws.rows(name, *shape)

    def hidden(self, n_row: int) -> np.ndarray:
        """The first n_row rows of the last chunk after the output norm, f32 [n_row, n_embd]."""
        self._last.backend.fetch(self._ws.x)
        return output_normed(self._model, self._ws.x[:n_row])

    def _run_head(self, row: int, n_row: int) -> None:
        self._ws.head_rows[:3] = n_row, 0, row
        self._ws.head_step[:3] = n_row, 0, 0
        self._ending.backend.send(self._ws.head_rows, self._ws.head_step)
        self._ending.backend.run(self._head)
        self._count(self._ending, self._head, n_row, 0)

    def _fetched(self, logits: np.ndarray) -> np.ndarray:
        """A copy of logits, once they are computed."""
        self._ending.backend.fetch(logits)
        return logits.copy()

    def _pass_on(self, before: Stage | None, stage: Stage, n_row: int) -> None:
        """Transfer the rows of the chunk from the stage before to this one."""
        if before is not None and before is not stage:
            rows = self._ws.x[:n_row]
            before.backend.fetch(rows)
            stage.backend.send(rows)

    def start_costs(self) -> None:
        """Start counting the cost of each op; every call then takes a little longer."""
        self._set_counting(True)
        for linked in self._programs():
            linked.reset_costs()

    def take_costs(self) -> list[OpCost]:
        """The costs of all Programs' ops since `start_costs`; ends the counting."""
        self._set_counting(False)
        return [cost for linked in self._programs() for cost in linked.costs() if cost.n_call]

    def _programs(self) -> list[LinkedProgram]:
        return [self._head, *(program for stage in self._stages for program in stage.programs)]

    def _count(self, stage: Stage, linked: LinkedProgram, n_tok: int, pos: int) -> None:
        if self._counting:
            stage.backend.fetch(*linked.program.named(*AUDITED))
            linked.count(n_tok, pos)

    def _set_counting(self, counting: bool) -> None:
        self._counting = counting
        for stage in self._stages:
            stage.backend.timed = counting

    def _set(self, ids: np.ndarray, pos: int, prompt: range) -> None:
        self._ws.ids[: len(ids)] = ids
        self._ws.step[:] = len(ids), pos, 0, prompt.start, prompt.stop, 0
        record = self._ws.record[: self._ws.step.nbytes + ids.nbytes]
        for stage in self._stages:
            stage.backend.send(record, *stage.news())


def output_normed(model: Model, rows: np.ndarray) -> np.ndarray:
    """The output norm of rows of the residual stream, f32 [n, n_embd]."""
    x, arch, w = rows.astype(np.float64), model.arch, model.weights.output_norm
    if not model.norms_output:
        return rows.copy()
    if arch.norm == "layer":
        x -= x.mean(axis=1, keepdims=True)
    x /= np.sqrt((x * x).mean(axis=1, keepdims=True) + model.hp.rms_eps)
    if arch.weighted:
        x *= w.vector()
    bias = w.bias()
    return (x if bias is None else x + bias).astype(np.float32)


class HostLogits:
    """Host memory that the kernels of a GPU write the logits of a step to.

    The logits are there as soon as the step ends, without a copy. The caller who got them owns this
    memory until its last view of it is gone.
    """

    def __init__(self, logits: np.ndarray, held: Any) -> None:
        self.logits, self._held = logits, held
        self._given: Callable[[], np.ndarray | None] = lambda: None

    @property
    def free(self) -> bool:
        """Whether no caller owns the memory."""
        return self._given() is None

    def given(self) -> np.ndarray:
        """Whether no caller owns the memory."""
        found = np.frombuffer(self.logits.data, self.logits.dtype)
        self._given = weakref.ref(found)
        return found.reshape(self.logits.shape)


def host_logits(backend: Backend, *shape: int) -> list[HostLogits]:
    """Return two of them: a step is often decoded while the caller still owns the last logits.

    The list is empty where the system cannot map host memory. Logits are then copied, and so they
    are while both are owned.
    """
    _, rows = huge_zeros((2, *shape), np.dtype(np.float32))
    try:
        held = backend.mapped(rows)
    except MemoryError:
        return []
    return [HostLogits(row, held) for row in rows]
