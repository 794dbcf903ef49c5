"""Runs what is missing: each prompt is read once, and every decode method goes on from there."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tamis.evals import predict
from tamis.evals.answer import answer, make_prompt
from tamis.evals.plan import DENSE, TEXT, Cell, Settings
from tamis.evals.store import Store
from tamis.evals.tasks import tasks

if TYPE_CHECKING:
    from tamis.engine import Engine, Progress
    from tamis.session import Session


class Subject(NamedTuple):
    """What a sample is to the runner: tokens to read, and how a session's part is measured."""

    ids: list[int]
    n_shared: int
    measure: Callable[["Session"], dict[str, Any]]
    needs_dense: bool = False  # dense attention goes first, kept already or not


def check_lengths(engine: "Engine", settings: Settings) -> None:
    """Raise LengthError where a length has no room for a task, before anything is run."""
    for name in settings.tasks:
        if name == TEXT:
            continue
        for length in settings.lengths:
            make_prompt(engine, tasks()[name], length, f"{settings.seed}/{name}/0", settings)


def run(
    engine: "Engine",
    settings: Settings,
    todo: Sequence[Sequence[Cell]],
    store: Store,
    *,
    text: str,
    progress: "Progress",
) -> Iterator[dict[str, Any]]:
    """Make and keep every result of `todo` (plan.missing), yielding each once it is kept.

    text: of the task that predicts one. Raises LengthError, ValueError, MemoryError, AuditError,
    OSError: what was yielded is kept.
    """
    text_ids: list[int] = []
    for left in todo:
        if left[0].job.task == TEXT:
            text_ids = text_ids or engine.tokenizer.encode(text)
            subject = _passage(engine, settings, left[0], text_ids)
        else:
            subject = _prompt(engine, settings, left[0])
        for prefill in dict.fromkeys([DENSE] * subject.needs_dense + [c.prefill for c in left]):
            own = [cell for cell in left if cell.prefill == prefill]
            yield from _after_prefill(engine, settings, subject, (prefill, own), store, progress)


def _prompt(engine: "Engine", settings: Settings, cell: Cell) -> Subject:
    job = cell.job
    task = tasks()[job.task]
    # The same at every length, which says how much hay there is round the same needles.
    seed = f"{settings.seed}/{job.task}/{job.sample}"
    prompt = make_prompt(engine, task, job.length, seed, settings)
    return Subject(
        prompt.ids,
        prompt.n_shared,
        lambda session: answer(engine, session, prompt, task),
    )


def _passage(engine: "Engine", settings: Settings, cell: Cell, text_ids: Sequence[int]) -> Subject:
    job = cell.job
    seed = f"{settings.seed}/{TEXT}/{job.sample}"
    part = predict.passage(text_ids, job.length, seed, settings.n_predict)
    known: list[predict.Reference] = []

    def measure(session: "Session") -> dict[str, Any]:
        log_p, steps = predict.predicted(session, part)
        if not known:  # dense attention's turn, which is the first
            known.append(predict.reference(engine, log_p, part))
        return predict.compared(log_p, known[0], part) | steps

    return Subject(part.ids, part.n_shared, measure, needs_dense=True)


def _after_prefill(
    engine: "Engine",
    settings: Settings,
    subject: Subject,
    part: tuple[str, Sequence[Cell]],
    store: Store,
    progress: "Progress",
) -> Iterator[dict[str, Any]]:
    """Read the shared tokens with one method of prompts, then decode with each method."""
    prefill, own = part
    options = {"type_k": settings.type_k, "type_v": settings.type_v, "prefill": prefill}
    n_ctx = max(len(subject.ids), max((c.job.length for c in own), default=0))
    base = engine.session(n_ctx=n_ctx, progress=progress, **options)
    start = time.perf_counter()
    if subject.n_shared:
        base.prefill(subject.ids[: subject.n_shared], partial(progress, "reading the prompt"))
    spent = {"n_read": subject.n_shared, "prefill_s": round(time.perf_counter() - start, 3)}
    cells = list(own)
    if subject.needs_dense and prefill == DENSE and (not cells or cells[0].attn != DENSE):
        subject.measure(base)
        base.truncate(subject.n_shared)
    for cell in cells:
        if cell.attn == DENSE:
            session, audit = base, {"read": 1.0}
        else:
            session, audit = _fork(engine, settings, base, cell, progress), {}
        row = {**cell.settings, "label": label(cell), **spent, **audit, **subject.measure(session)}
        base.truncate(subject.n_shared)
        store.add(cell.key, row)
        yield row


def _fork(
    engine: "Engine", settings: Settings, base: "Session", cell: Cell, progress: "Progress"
) -> "Session":
    session = engine.session(
        n_ctx=base.n_ctx,
        attn=cell.attn,
        prefill=cell.prefill,
        audit=settings.audit,
        type_k=settings.type_k,
        type_v=settings.type_v,
        progress=progress,
    )
    session.copy(base)
    return session


def label(cell: Cell) -> str:
    """The methods of a result as they were asked for."""
    return cell.attn if cell.prefill == DENSE else f"{cell.attn} after {cell.prefill}"
