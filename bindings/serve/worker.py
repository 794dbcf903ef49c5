"""The one thread that runs the model: sessions as slots, jobs as they come, steps of all at once.

A round of the thread gives a free slot to a waiting job where no prompt is being read, runs one
chunk of the one that is, and one decode step of all answers: a long prompt costs others a chunk a
token.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tamis.bindings.drop_in.caches import longest_token_prefix
from tamis.bindings.drop_in.completion import Answer, Piece, Request
from tamis.bindings.serve.errors import ApiError, busy, invalid, stopping
from tamis.bindings.serve.masks import Masks, MaskStep
from tamis.bindings.serve.tasks import SEEDS, Task
from tamis.engine.batch import Batch
from tamis.engine.engine import Engine
from tamis.engine.session import ContextError, Session
from tamis.sampling.base import LogitsError, SamplerError
from tamis.sampling.chain import Sampler

LAST_N = 64  # tokens that penalties look back at
MASK_WAIT = 0.005  # seconds that a step waits for masks, about its own time
WORTH_SHARING = 16  # tokens that another slot must hold more: reading them takes some steps' time


class Progress(NamedTuple):
    """Tokens of the prompt: those done, all, and those that were held already."""

    done: int
    total: int
    cached: int


class Embedding(NamedTuple):
    """Rows f32 [n_tok, n_embd] of a text: what the output head reads."""

    rows: np.ndarray


# Prompts share pages of equal beginnings within a scope only: who waits for an answer could tell
# from its time, and from usage, what is held.
Scope = Hashable
SHARED: Scope = ""
Event = Progress | Piece | Embedding | ApiError
Emit = Callable[[Event], None]  # called in the worker's thread; must not block
Emitter = Callable[[int], Emit]  # of the i-th choice


@dataclass(eq=False)
class Job:
    """One sequence to run. The last event is a Piece with a finish reason or an ApiError."""

    prompt: list[int]
    emit: Emit
    cancelled: bool = False  # set by whoever has lost interest; the slot is then free soon
    n_cached: int = 0
    n_answer: int = 0
    scope: Scope = field(default=SHARED, kw_only=True)
    owner: Hashable = field(default="", kw_only=True)  # whose turns it takes


@dataclass(eq=False)
class Completion(Job):
    """An answer to a prompt."""

    request: Request = field(kw_only=True)
    sampler: Sampler = field(kw_only=True)
    mask: MaskStep | None = field(default=None, kw_only=True)  # of its sampler


@dataclass(eq=False)
class Counts:
    """What has been done since the start, for /metrics and the log."""

    jobs: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0


class _Slot:
    """A session and the job that it runs."""

    def __init__(self, session: Session, tokenizer: Any) -> None:
        self.session, self._tokenizer = session, tokenizer
        self.used, self.scope = 0.0, SHARED
        self.clear()

    def clear(self) -> None:
        self.job: Job | None = None
        self.reading: Generator[int, None, Any] | None = None
        self.answer: Answer | None = None
        self.row: np.ndarray | None = None  # logits that the next token is chosen by

    def take(self, job: Job) -> None:
        """Begin a job; the session holds the part of its prompt that need not be read."""
        self.job, job.n_cached, self.scope = job, self.session.n_past, job.scope
        self.used = time.monotonic()
        left = job.prompt[job.n_cached :]
        if isinstance(job, Completion):
            self.reading = self.session.prefill_steps(left)
            self.answer = Answer(job.request, self._tokenizer, job.sampler)
        else:
            self.reading = _hidden(self.session, left)

    def release(self) -> None:
        """Be free; a prompt that was being read is forgotten."""
        if self.reading is not None:
            self.reading.close()
        self.used = time.monotonic()
        self.clear()


def _hidden(session: Session, ids: Sequence[int]) -> Generator[int, None, np.ndarray]:
    rows, done = [], 0
    for part in session.hidden(ids):
        rows.append(part)
        done += len(part)
        yield done
    return np.concatenate(rows)


class Worker:
    """Owns the sessions; `submit` and `stop` may be called from any thread."""

    def __init__(
        self, engine: Engine, sessions: Sequence[Session], n_queue: int, n_owner: int = 1
    ) -> None:
        self._batch = Batch(engine)
        self._slots = [_Slot(session, engine.tokenizer) for session in sessions]
        self.n_queue, self.counts = n_queue, Counts()
        self._n_owner = n_owner  # that share the queue
        self._waiting: deque[Job] = deque()
        self._served: dict[Hashable, int] = {}  # by owner: the number of its last turn
        self._changed = threading.Condition()
        self._stopping = False
        self._outbox: list[tuple[Job, Event]] = []  # sent all at once, just before a step
        self._thread = threading.Thread(target=self._run, name="tamis-worker", daemon=True)
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        """Jobs that have no slot yet."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Slots that are busy."""
        return sum(slot.job is not None for slot in self._slots)

    @property
    def stopped(self) -> bool:
        """Whether no more jobs are taken."""
        return self._stopping

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs, all or none. Raises ApiError where too many wait or the server stops."""
        with self._changed:
            if self._stopping:
                raise stopping()
            self._forget_cancelled()
            n_free = len(self._slots) - self.n_running
            mine = sum(job.owner == jobs[0].owner for job in self._waiting)
            share = self.n_queue // self._n_owner
            full = len(self._waiting) + len(jobs) > self.n_queue + n_free
            if full or (mine and mine + len(jobs) > share + n_free):
                self.counts.refused += len(jobs)
                raise busy(mine)
            self._waiting.extend(jobs)
            self.counts.jobs += len(jobs)
            self._changed.notify()

    def stop(self) -> None:
        """Fail all jobs and end the thread; may be called more than once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the end of the thread, after `stop`; whether it has ended in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._begin_round():
                begin = time.perf_counter()
                self._release_cancelled()
                self._read()
                self._step()
                self._flush()
                self.counts.busy_seconds += time.perf_counter() - begin
        finally:  # also where a bug ends the thread: nobody waits for it then
            self.stop()
            for job in self._waiting:
                self._send(job, stopping())
            for slot in self._slots:
                self._fail(slot, stopping())
            self._flush()

    def _begin_round(self) -> bool:
        """Wait for work and give it to free slots; False where the thread is to end."""
        with self._changed:
            while not (self._stopping or self._waiting or self.n_running):
                self._changed.wait()
            if not self._stopping:
                self._admit()
            return not self._stopping

    def _forget_cancelled(self) -> None:
        """Of the jobs that wait; under the lock."""
        kept = [job for job in self._waiting if not job.cancelled]
        self.counts.cancelled += len(self._waiting) - len(kept)
        self._waiting = deque(kept)

    def _admit(self) -> None:
        """Give waiting jobs to free slots, one prompt at a time: the next may begin as it does."""
        self._forget_cancelled()
        while self._waiting and self._reader() is None:
            free = [slot for slot in self._slots if slot.job is None]
            if not free:
                return
            job = self._next()
            try:
                slot = self._placed(job, free)
                slot.take(job)
            except Exception as error:
                self.counts.failed += 1
                self._send(job, _as_api_error(error))

    def _next(self) -> Job:
        """Take a waiting job: of the owner that runs the fewest, or was served the longest ago."""
        running = Counter(slot.job.owner for slot in self._slots if slot.job is not None)
        first: dict[Hashable, Job] = {}
        for job in self._waiting:
            first.setdefault(job.owner, job)
        owner = min(first, key=lambda each: (running[each], self._served.get(each, -1)))
        waiting = {each.owner for each in self._waiting} | running.keys()
        turn = 1 + max(self._served.values(), default=0)
        self._served = {each: n for each, n in self._served.items() if each in waiting}
        self._served[owner] = turn
        self._waiting.remove(first[owner])
        return first[owner]

    def _placed(self, job: Job, free: list[_Slot]) -> _Slot:
        """The slot for a job, whose session holds as much of the prompt as any does."""
        if not isinstance(job, Completion):  # all rows are wanted: nothing can be reused
            slot = min(free, key=lambda slot: slot.used)
            slot.session.truncate(0)
            return slot

        def held(slot: _Slot) -> int:  # the last token runs again: its logits are needed
            if slot.scope != job.scope:
                return 0
            return min(longest_token_prefix(slot.session.tokens, job.prompt), len(job.prompt) - 1)

        slot = max(free, key=lambda slot: (held(slot), -slot.used))
        other = max(self._slots, key=held)
        n = held(slot)
        if held(other) >= n + WORTH_SHARING:
            n = held(other)
            slot = min(free, key=lambda slot: slot.used)
            if slot is not other:
                slot.session.copy(other.session)
        slot.session.truncate(n)
        return slot

    def _reader(self) -> _Slot | None:
        """The slot whose prompt is being read: one at a time, see `_admit`."""
        return next((slot for slot in self._slots if slot.reading is not None), None)

    def _release_cancelled(self) -> None:
        for slot in self._slots:
            if slot.job is not None and slot.job.cancelled:
                self.counts.cancelled += 1
                slot.release()

    def _read(self) -> None:
        """One chunk of the prompt that is being read."""
        slot = self._reader()
        if slot is None:
            return
        job, steps = slot.job, slot.reading
        assert job is not None
        assert steps is not None
        try:
            done = next(steps)
            self._send(job, Progress(job.n_cached + done, len(job.prompt), job.n_cached))
            return
        except StopIteration as end:
            found = end.value
        except Exception as error:
            self._fail(slot, _as_api_error(error))
            return
        slot.reading = None
        self.counts.prompt_tokens += len(job.prompt) - job.n_cached
        self.counts.cached_tokens += job.n_cached
        if isinstance(job, Completion):
            slot.row = found
        else:
            self._send(job, Embedding(found))
            slot.release()

    def _step(self) -> None:
        """Choose a token for each answer and append it, of all answers that go on."""
        tokens: dict[Session, int] = {}
        slots = self._ready()
        for slot in slots:
            try:
                token = self._choose(slot)
            except Exception as error:
                self._fail(slot, _as_api_error(error))
                continue
            if token is not None:
                tokens[slot.session] = token
        if not tokens:
            return
        self._flush()
        try:
            rows = self._batch.step(tokens)
        except Exception as error:
            for slot in slots:
                self._fail(slot, _as_api_error(error))
            return
        self.counts.steps += 1
        for slot in slots:
            slot.row = rows.get(slot.session)

    def _ready(self) -> list[_Slot]:
        """The slots whose next token can be chosen: a grammar that takes long holds up nobody."""
        slots = [slot for slot in self._slots if slot.row is not None]
        seconds = 0.0 if self._reader() is not None else MASK_WAIT
        ready = []
        for slot in slots:
            mask = slot.job.mask if isinstance(slot.job, Completion) else None
            try:
                if mask is None or mask.ready(seconds):
                    ready.append(slot)
                else:
                    seconds = 0.0
            except Exception as error:
                self._fail(slot, _as_api_error(error))
        return ready

    def _choose(self, slot: _Slot) -> int | None:
        """The next token of an answer, None at its end; what it adds to the text is sent."""
        job, answer, row = slot.job, slot.answer, slot.row
        assert isinstance(job, Completion)
        assert answer is not None
        assert row is not None
        token = job.sampler.sample(row)
        job.sampler.accept(token)
        pieces = answer.push(token, row)
        self.counts.answer_tokens += answer.n_completion - job.n_answer
        job.n_answer = answer.n_completion
        if answer.finished:
            slot.release()
        for piece in pieces:
            self._send(job, piece)
        return None if answer.finished else token

    def _send(self, job: Job, event: Event) -> None:
        self._outbox.append((job, event))

    def _flush(self) -> None:
        """Emit what is in the outbox: it is dealt with while the step runs, not while it waits."""
        for job, event in self._outbox:
            job.emit(event)
        self._outbox.clear()

    def _fail(self, slot: _Slot, error: ApiError) -> None:
        if slot.job is not None:
            self.counts.failed += 1
            self._send(slot.job, error)
            slot.release()


def completions(
    task: Task, emit: Emitter, n_vocab: int, masks: Masks | None = None
) -> list[Completion]:
    """The jobs of a task, a sampler each; masks: of its grammar.

    Raises ApiError for numbers that no sampler takes.
    """
    found = []
    for i, request in enumerate(task.requests):
        mask = None if masks is None or not task.masked else masks.step(i, n_vocab)
        seed = (task.seed + i) % SEEDS
        try:
            sampler = task.sampling.sampler(
                n_vocab, seed=seed, last_n=LAST_N, ids=_no_ids, grammar=mask
            )
        except (ValueError, TypeError) as error:  # also SamplerError: a number
            raise invalid(str(error)) from None
        job = Completion(request.prompt, emit(i), request=request, sampler=sampler, mask=mask)
        found.append(job)
    return found


def _no_ids() -> Any:
    raise AssertionError("requests bring no functions of tokens")


def _as_api_error(error: Exception) -> ApiError:
    """The error for a client: what it did, or without details what went wrong here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LogitsError):
        return ApiError(500, f"the model failed: {error}", code="failed")
    if isinstance(error, SamplerError | ContextError):
        return ApiError(400, str(error), code="failed")
    if isinstance(error, MemoryError):
        return ApiError(503, str(error) or "out of memory", code="failed")
    return ApiError(500, f"the model failed: {type(error).__name__}", code="failed")
