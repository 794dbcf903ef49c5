"""Computes missing results: each prompt is read once, and every decode method resumes after it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tamis.evals import predict
from tamis.evals.answer import answer, encode, make_prompt
from tamis.evals.plan import TEXT, Cell, Given, Job, Method, Settings
from tamis.evals.store import Store
from tamis.evals.tasks import tasks
from tamis.evals.tasks.base import check_room
from tamis.select.kvzip import KVzip
from tamis.select.notation import DENSE

if TYPE_CHECKING:
    from tamis.engine.engine import Engine
    from tamis.engine.session import Progress, Session


class Subject(NamedTuple):
    """What the runner needs of a sample: its tokens, and how a session's answer is measured."""

    ids: list[int]
    n_shared: int  # read once; `measure` gets a session that holds these
    measure: Callable[["Session"], dict[str, Any]]
    # whether dense attention is measured first, even if its result is stored
    needs_dense: bool = False


@dataclass(frozen=True)
class Evaluation:
    """A model, the settings, and the store of the results."""

    engine: "Engine"
    settings: Settings
    store: Store
    progress: "Progress"

    def check(self) -> None:
        """Raise LengthError before anything is run if a length has no room for a task."""
        for name in self.settings.tasks:
            if name != TEXT:
                draft = tasks()[name].make(f"{self.settings.seed}/{name}/0", 0)
                n_token = len(encode(self.engine, draft, self.settings.raw))
                check_room(tasks()[name], min(self.settings.lengths), n_token)

    def run(self, todo: Sequence[Sequence[Cell]], text: str) -> Iterator[dict[str, Any]]:
        """Compute and store every result of `todo` (plan.missing); yields each once it is stored.

        text: for the task that predicts one. Raises LengthError, ValueError, MemoryError,
        AuditError, OSError; yielded results stay stored.
        """
        text_ids: list[int] = []
        for left in todo:
            job = left[0].job
            if job.task == TEXT:
                text_ids = text_ids or self.engine.tokenizer.encode(text)
                subject = self._passage(job, text_ids)
            else:
                subject = self._prompt(job)
            for prefill in dict.fromkeys([DENSE] * subject.needs_dense + [c.prefill for c in left]):
                own = [cell for cell in left if cell.prefill == prefill]
                yield from self._after(prefill, job, subject, own)

    def _prompt(self, job: Job) -> Subject:
        known = {data.name: data for data in self.settings.data}
        task = known[job.task].task(job.sample) if job.task in known else tasks()[job.task]
        # The same seeds at every length, so that only the amount of hay around the needles differs.
        seed = f"{self.settings.seed}/{job.task}/{job.sample}"
        prompt = make_prompt(self.engine, task, job.length, seed, self.settings)
        measure = partial(answer, self.engine, prompt, task)
        return Subject(prompt.ids, prompt.n_shared, measure)

    def _passage(self, job: Job, text_ids: Sequence[int]) -> Subject:
        seed = f"{self.settings.seed}/{TEXT}/{job.sample}"
        part = predict.passage(text_ids, job.length, seed, self.settings.n_predict)
        known: list[predict.Reference] = []

        def measure(session: "Session") -> dict[str, Any]:
            log_p, steps = predict.predicted(session, part)
            if not known:  # dense attention comes first
                known.append(predict.reference(self.engine, log_p, part))
            return predict.compared(log_p, known[0], part) | steps

        return Subject(part.ids, part.n_shared, measure, needs_dense=True)

    def _after(
        self, prefill: str, job: Job, subject: Subject, own: Sequence[Cell]
    ) -> Iterator[dict[str, Any]]:
        """Read the shared tokens with a prefill method, then decode with each attention method."""
        base = self._session(job.length, DENSE, prefill)
        start = time.perf_counter()
        base.prefill(subject.ids[: subject.n_shared], partial(self.progress, "reading the prompt"))
        spent = {"n_read": subject.n_shared, "prefill_s": round(time.perf_counter() - start, 3)}
        if subject.needs_dense and prefill == DENSE and DENSE not in [cell.attn for cell in own]:
            subject.measure(base)
            base.truncate(subject.n_shared)
        for cell in own:
            session = base
            if cell.attn != DENSE:
                session = self._session(job.length, cell.attn, prefill)
                session.copy(base)
            row = {**cell.settings, "label": label(cell), **spent}
            row |= {"read": 1.0} if cell.attn == DENSE else {}
            row |= self._compressed(session, cell.attn)
            row |= subject.measure(session)
            if session.mass is not None:
                row["estimate"] = session.mass.rounded()
            base.truncate(subject.n_shared)
            yield self.store.add(cell.key, row)

    def _compressed(self, session: "Session", attn: Method) -> dict[str, Any]:
        """Compress what a session holds if its method says so; what a result tells of that."""
        if not isinstance(attn, Given) or not isinstance(attn.method, KVzip):
            return {}
        from tamis.engine.reuse.compressing import compress

        start, n = time.perf_counter(), session.n_past
        n_kept = compress(self.engine, session, attn.method, partial(self.progress, "compressing"))
        return {"read": n_kept / n, "compress_s": round(time.perf_counter() - start, 3)}

    def _session(self, n_ctx: int, attn: Method, prefill: str) -> "Session":
        method = attn.method if isinstance(attn, Given) else attn
        return self.engine.session(
            n_ctx=n_ctx,
            attn=DENSE if isinstance(method, KVzip) else method,
            prefill=prefill,
            audit=0 if attn == DENSE or isinstance(method, KVzip) else self.settings.audit,
            type_k=self.settings.type_k,
            type_v=self.settings.type_v,
            progress=self.progress,
        )


def label(cell: Cell) -> str:
    """The methods of a result, in the user's spelling."""
    attn = cell.attn.label if isinstance(cell.attn, Given) else cell.attn
    return attn if cell.prefill == DENSE else f"{attn} after {cell.prefill}"
