"""The one thread that runs the model: sessions as slots, jobs in a queue, batched steps.

A round of the thread gives a free slot to a waiting job if no prompt is being read, runs one chunk
of the prompt that is being read, and one decode step of all answers. So a long prompt delays others
by one chunk per token.
"""

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tamis.bindings.drop_in.caches import longest_token_prefix
from tamis.bindings.drop_in.completion import Answer, Request
from tamis.bindings.drop_in.completion import Counts as Taken
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.jobs import (
    SHARED,
    Counts,
    Embedding,
    Emit,
    Event,
    Job,
    Keeping,
    Kept,
    Progress,
    PromptTokens,
    SlotState,
    Started,
)
from tamis.bindings.serve.masks import MaskStep
from tamis.engine.batch import Batch
from tamis.engine.drafting import Drafting
from tamis.engine.engine import Engine
from tamis.engine.prompt_cache import PromptCache
from tamis.engine.reuse.compressing import compress
from tamis.engine.reuse.moved_chunks import move_chunks
from tamis.engine.session import ContextError, Session
from tamis.engine.session_file import SessionFileError
from tamis.formats.gguf import GGUFError
from tamis.graph.topk_logits import Best
from tamis.sampling.base import LogitsError, SamplerError
from tamis.sampling.chain import Sampler
from tamis.select.kvzip import KVzip
from tamis.text.thinking import ThinkingBudget
from tamis.vision.held import whole_pictures

Reopen = Callable[[Sequence[float] | None], Session]
MASK_WAIT = 0.005  # seconds that a step waits for masks, about a step's own time
MOST_ZIPPED = 64  # texts whose compressed KV cache is known
WHOLE = 1 << 62  # all tokens of a sequence
# additional tokens that make copying from another slot worth while: reading them takes several
# steps
WORTH_SHARING = 16


@dataclass(eq=False)
class Completion(Job):
    """An answer to a prompt, as a job of the worker."""

    request: Request = field(kw_only=True)
    sampler: Sampler = field(kw_only=True)
    mask: MaskStep | None = field(default=None, kw_only=True)  # of its sampler
    # whether tokens that a slot holds may be reused
    cached: bool = field(default=True, kw_only=True)
    reuse: int = field(
        default=0, kw_only=True
    )  # the least chunk reused at other positions; 0: none
    begun: float = field(default=0.0, kw_only=True)  # times of the monotonic clock
    read: float = field(default=0.0, kw_only=True)
    n_drafted: int = field(default=0, kw_only=True)  # tokens
    n_accepted: int = field(default=0, kw_only=True)  # of them

    @property
    def reads_all(self) -> bool:
        """Whether logits of the whole prompt are wanted."""
        return self.request.echo is not None and self.request.logprobs is not None

    def taken(self) -> Taken:
        """The counters of the answer so far."""
        now, n_read = time.monotonic(), len(self.prompt) - self.n_cached
        seconds = self.read - self.begun, now - self.read
        counts = Taken(self.n_cached, n_read, self.n_answer, *seconds)
        return counts._replace(n_drafted=self.n_drafted, n_accepted=self.n_accepted)


class _Slot:
    """A session and the job that it runs."""

    def __init__(self, session: Session, tokenizer: Any, drafting: Drafting | None) -> None:
        self.session, self._tokenizer, self.drafting = session, tokenizer, drafting
        self.used, self.scope = 0.0, SHARED
        self.lora: tuple[float, ...] | None = None  # scales of its adapters; None: the initial ones
        # How many tokens, from the first, have the KV entries that computing them anew would give;
        # only these may go to the prompt cache. Tokens after evicted ones, or of a restored file,
        # have others.
        self.n_read = WHOLE
        self.moved = False  # whether tokens after n_read were moved for a request that allows it
        self.clear()

    def clear(self) -> None:
        self.job: Job | None = None
        self.reading: Generator[int, None, Any] | None = None
        self.answer: Answer | None = None
        self.row: Best | np.ndarray | None = None  # the logits from which the next token is chosen
        self.forced: deque[int] = deque()  # tokens that must come next, regardless of logits
        self.budget: ThinkingBudget | None = None

    def take(self, job: Job) -> None:
        """Begin a job; the session holds the part of its prompt that need not be computed."""
        self.job, job.n_cached, self.scope = job, self.session.n_past, job.scope
        self.used = time.monotonic()
        left = job.prompt[job.n_cached :]
        if isinstance(job, Completion):
            job.begun = job.read = self.used
            self.answer = Answer(job.request, self._tokenizer, job.sampler)
            if job.reads_all:
                self.reading = _scored(self.session, left, self.answer, job.emit)
            else:
                self.reading = self.session.prefill_steps(left)
            if job.request.budget is not None:
                self.budget = job.request.budget.watch()
                self.forced.extend(self.budget.begin())
        else:
            self.reading = _hidden(self.session, left)

    def state(self) -> SlotState:
        """The current state."""
        job = self.job
        n_answer, n_prompt = (0, 0) if job is None else (job.n_answer, len(job.prompt))
        n_left = job.request.max_tokens - n_answer if isinstance(job, Completion) else -1
        return SlotState(job is not None, self.session.n_past, n_answer, n_prompt, n_left)

    def release(self) -> None:
        """Free the slot; a prompt that was being read is dropped."""
        if self.reading is not None:
            self.reading.close()
        if self.drafting is not None:
            self.drafting.settle()
        self.used = time.monotonic()
        self.clear()


def _scored(
    session: Session, ids: Sequence[int], answer: Answer, emit: Emit
) -> Generator[int, None, np.ndarray]:
    """Read a whole prompt and emit its tokens' logprobs; returns the last logits."""
    tokens, row, done = [answer.first_info()], np.empty(0, np.float32), 0
    for rows in session.logits(ids):
        for i, row in enumerate(rows, done + 1):
            if i < len(ids):
                tokens.append(answer.prompt_info(i, row))
        done += len(rows)
        row = rows[-1].copy()
        emit(PromptTokens(tokens))  # in parts: one event for all would be long
        tokens = []
        yield done
    return row


def _kept(job: Keeping, session: Session) -> Kept:
    """Save, restore or erase a slot's sequence. Raises OSError, SessionFileError, ContextError."""
    begin, n, n_byte = time.monotonic(), session.n_past, 0
    if job.action == "save":
        session.save(job.path)
    elif job.action == "restore":
        session.load(job.path)
        n = session.n_past
    else:
        session.truncate(0)
    if job.action != "erase":
        n_byte = os.stat(job.path).st_size
    return Kept(n, n_byte, time.monotonic() - begin)


class _Zipped(NamedTuple):
    """A text whose KV cache was compressed, and the tokens by which sessions now call it."""

    scope: str
    lora: tuple[float, ...] | None
    tokens: list[int]
    names: list[int]


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
        self,
        engine: Engine,
        sessions: Sequence[Session],
        flushed: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
        reopen: Reopen | None = None,
        drafting: Sequence[Drafting] = (),
        cache: PromptCache | None = None,
    ) -> None:
        """Start the thread; it calls `flushed` at least once a round, and `ended` at its end.

        reopen: opens a session with other scales of LoRA adapters; None: scales cannot change.
        drafting: one per session; it is used while only one answer is generated. cache: of prompts
        that slots no longer hold.
        """
        self._cache, self._engine = cache, engine
        self._zipped: deque[_Zipped] = deque(maxlen=MOST_ZIPPED)
        self._to_keep: list[_Slot] = []  # slots whose sequences are to be written to the cache
        self._reopen = reopen
        self._batch, self._file = Batch(engine), engine.loaded.file
        own: Sequence[Drafting | None] = drafting or [None] * len(sessions)
        pairs = zip(sessions, own, strict=True)
        self._slots = [_Slot(session, engine.tokenizer, draft) for session, draft in pairs]
        self._flushed, self._ended, self.counts = flushed, ended, Counts()
        self._heads = engine.model.heads
        self._waiting: deque[Job] = deque()
        self._refused: list[tuple[Job, Exception]] = []
        # by owner: the number of the round that last served it
        self._served: dict[Hashable, int] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._outbox: list[tuple[Job, Event]] = []  # sent together, just before a step
        self._thread = threading.Thread(target=self._run, name="tamis-worker", daemon=True)
        self._thread.start()

    @property
    def n_running(self) -> int:
        """The number of busy slots."""
        return sum(slot.job is not None for slot in self._slots)

    def slots(self) -> list[SlotState]:
        """The current states of the slots."""
        return [slot.state() for slot in self._slots]

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; once the thread has ended they are ignored."""
        with self._changed:
            self._waiting.extend(jobs)
            self._changed.notify()

    def refuse(self, jobs: Sequence[Job], error: Exception) -> None:
        """Fail jobs that cannot be taken, also while others run."""
        with self._changed:
            self._refused += [(job, error) for job in jobs]
            self._changed.notify()

    def stop(self) -> None:
        """End the thread even if there are jobs; may be called more than once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, seconds: float | None = None) -> bool:
        """Wait after `stop` for the end of the thread; returns whether it has ended in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._begin_round():
                begin = time.perf_counter()
                self._flush()
                self._release_cancelled()
                self._read()
                self._step()
                self._flush()
                self._keep()
                self.counts.busy_seconds += time.perf_counter() - begin
        except GGUFError as error:
            sys.stderr.write(f"tamis: {error}\n")
        finally:  # even if a bug ends the thread
            self._stopping = True
            self._ended()

    def _begin_round(self) -> bool:
        """Wait for work and assign it to free slots; returns False if the thread is to end."""
        with self._changed:
            while not (self._stopping or self._waiting or self._refused or self.n_running):
                self._changed.wait()
            if not self._stopping:
                self._send_refused()
                self._admit()
            return not self._stopping

    def _send_refused(self) -> None:
        """Under the lock."""
        for job, error in self._refused:
            self.counts.failed += 1
            self._send(job, self._told(error))
        self._refused.clear()

    def _drop_cancelled(self) -> None:
        """Remove cancelled jobs from the queue; the caller holds the lock."""
        kept = [job for job in self._waiting if not job.cancelled]
        self.counts.cancelled += len(self._waiting) - len(kept)
        self._waiting = deque(kept)

    def _admit(self) -> None:
        """Assign waiting jobs to free slots, one prompt at a time: another may share its prefix."""
        self._drop_cancelled()
        while self._waiting and self._reader() is None:
            free = [slot for slot in self._slots if slot.job is None]
            if not free:
                return
            job = self._next()
            if job is None:
                return
            try:
                slot = self._placed(job, free)
                if isinstance(job, Keeping):
                    self._keep_file(slot, job)
                    continue
                slot.take(job)
                self._send(job, Started(job.n_cached, self._slots.index(slot)))
            except Exception as error:
                self.counts.failed += 1
                self._send(job, self._told(error))
                for slot in free:  # one may have it already
                    if slot.job is job:
                        slot.release()

    def _next(self) -> Job | None:
        """Remove and return the waiting job of the owner with the fewest running jobs.

        Among equals, of the one that was served the longest ago. None if all waiting jobs ask for
        slots that are busy.
        """
        running = Counter(slot.job.owner for slot in self._slots if slot.job is not None)
        first: dict[Hashable, Job] = {}
        for job in self._waiting:
            if job.slot is None or self._slots[job.slot].job is None:
                first.setdefault(job.owner, job)
        if not first:
            return None
        owner = min(first, key=lambda each: (running[each], self._served.get(each, -1)))
        waiting = {each.owner for each in self._waiting} | running.keys()
        turn = 1 + max(self._served.values(), default=0)
        self._served = {each: n for each, n in self._served.items() if each in waiting}
        self._served[owner] = turn
        self._waiting.remove(first[owner])
        return first[owner]

    def _placed(self, job: Job, free: list[_Slot]) -> _Slot:
        """The free slot for a job, made to hold as much of its prompt as any slot does."""
        for rows in job.tiles:
            self._engine.loaded.pictures.add(rows)
        if job.slot is not None:
            free = [self._slots[job.slot]]
        if isinstance(job, Keeping):
            if job.action == "restore":
                self._adapt(free[0], job)
            return free[0]
        if isinstance(job, Completion) and job.cached and not job.reads_all:
            self._shorten(job)
        if not isinstance(job, Completion) or job.reads_all or not job.cached:
            slot = min(free, key=lambda slot: slot.used)
            self._adapt(slot, job)
            slot.session.truncate(0)
            slot.n_read, slot.moved = WHOLE, False
            return slot

        def held(slot: _Slot) -> int:  # the last token is computed again for its logits
            if (slot.scope, slot.lora) != (job.scope, job.lora):
                return 0
            n = min(longest_token_prefix(slot.session.tokens, job.prompt), len(job.prompt) - 1)
            n = whole_pictures(job.prompt, n)
            return min(n, slot.n_read) if slot.moved and not job.reuse else n

        slot = max(free, key=lambda slot: (held(slot), -slot.used))
        other = max(self._slots, key=held)
        n = held(slot)
        if held(other) >= n + WORTH_SHARING:
            n = held(other)
            slot = min(free, key=lambda slot: slot.used)
            self._adapt(slot, job)
            if slot is not other:
                slot.session.copy(other.session)
                slot.n_read, slot.moved = other.n_read, other.moved
        self._adapt(slot, job)
        if job.reuse and n > 0 and slot.session.n_past > n:
            n_moved = move_chunks(slot.session, job.prompt[:-1], n, job.reuse) - n
            if n_moved:
                self.counts.moved_tokens += n_moved
                slot.n_read, slot.moved, n = min(n, slot.n_read), True, n + n_moved
        slot.session.truncate(n)
        if n <= slot.n_read:
            slot.n_read, slot.moved = WHOLE, False
            if self._cache is not None:
                self._cache.extend(slot.session, job.prompt, job.scope, least=WORTH_SHARING)
        return slot

    def _adapt(self, slot: _Slot, job: Job) -> None:
        """Give a slot the adapters of a job; if they differ, its sequence is truncated."""
        if slot.lora != job.lora and self._reopen is not None:
            session = self._reopen(job.lora)
            slot.session.close()
            slot.session, slot.lora = session, job.lora
            if slot.drafting is not None:
                slot.drafting = slot.drafting.moved_to(session)

    def _shorten(self, job: Completion) -> None:
        """Call the beginning of a prompt as it is held compressed, if it is."""
        for each in reversed(self._zipped):
            n, k = len(each.tokens), len(each.names)
            if (each.scope, each.lora) != (job.scope, job.lora) or len(job.prompt) <= n:
                continue
            if job.prompt[:n] == each.tokens and self._holds(each):
                job.prompt = [*each.names, *job.prompt[n:]]
                self.counts.compressed_tokens += n - k
                return

    def _holds(self, text: _Zipped) -> bool:
        """Whether a compressed text is in a slot, or in the prompt cache."""
        k = len(text.names)
        for slot in self._slots:
            same = (slot.scope, slot.lora) == (text.scope, text.lora)
            if same and slot.session.tokens[:k] == text.names:
                return True
        if self._cache is None:
            return False
        return self._cache.holds(self._slots[0].session, text.names, text.scope) == k

    def _compress(self, slot: _Slot, job: Keeping) -> None:
        """Compress what a slot holds. Raises ApiError."""
        begin, tokens = time.monotonic(), slot.session.tokens
        if slot.scope != job.scope:
            raise ApiError(400, "the slot holds nothing of this key", code="failed")
        if slot.drafting is not None and slot.drafting.reads_tokens:
            raise ApiError(400, "a draft model reads whole texts: start without", code="failed")
        try:
            n = compress(self._engine, slot.session, KVzip.parse(job.path))
        except ValueError as error:
            raise ApiError(400, str(error), code="failed") from None
        if n < len(tokens):
            self._zipped.append(_Zipped(slot.scope, slot.lora, tokens, slot.session.tokens))
            self._to_keep.append(slot)
        self._send(job, Kept(n, len(tokens), time.monotonic() - begin))

    def _keep_file(self, slot: _Slot, job: Keeping) -> None:
        """Do a slot's action (save, restore, erase, compress).

        Raises OSError, SessionFileError, ContextError, ApiError.
        """
        if job.action == "compress":
            self._compress(slot, job)
            return
        if job.action == "erase" and self._cache is not None:
            self._cache.evict(slot.session, slot.scope)
        self._send(job, _kept(job, slot.session))
        slot.scope = job.scope
        if job.action != "save":
            slot.n_read = 0 if job.action == "restore" else WHOLE

    def _keep(self) -> None:
        """Write to the cache the sequences of slots that finished a prompt or an answer."""
        slots, self._to_keep = self._to_keep, []
        if self._cache is None:
            return
        for slot in slots:
            if slot.session.n_past <= slot.n_read:
                try:
                    self._cache.keep(slot.session, slot.scope)
                except Exception as error:  # a failure of the cache must not fail an answer
                    sys.stderr.write(f"tamis: prompt cache: {error}\n")
        self.counts.take_cache(self._cache)

    def _release(self, slot: _Slot) -> None:
        """Free a slot; its tokens stay in the KV cache."""
        if isinstance(slot.job, Completion):
            self._to_keep.append(slot)
        slot.release()

    def _told(self, error: Exception) -> ApiError:
        """The error for a client. Raises GGUFError as `_as_api_error` does.

        If logits are not finite, weights may have been damaged on disk.
        """
        if isinstance(error, LogitsError):
            self._file.check_unchanged(thorough=True)
        return _as_api_error(error)

    def _reader(self) -> _Slot | None:
        """The slot whose prompt is being read: one at a time, see `_admit`."""
        return next((slot for slot in self._slots if slot.reading is not None), None)

    def _release_cancelled(self) -> None:
        for slot in self._slots:
            if slot.job is not None and slot.job.cancelled:
                self.counts.cancelled += 1
                self._release(slot)

    def _read(self) -> None:
        """Read one chunk of the prompt that is being read."""
        slot = self._reader()
        if slot is None:
            return
        job, steps = slot.job, slot.reading
        assert job is not None
        assert steps is not None
        try:
            done = next(steps)
            self.counts.chunks += 1
            self._send(job, Progress(job.n_cached + done, len(job.prompt), job.n_cached))
            return
        except StopIteration as end:
            found = end.value
        except Exception as error:
            self._fail(slot, self._told(error))
            return
        slot.reading = None
        try:
            self._begin_answer(slot, job, found)
        except Exception as error:
            self._fail(slot, self._told(error))

    def _begin_answer(self, slot: _Slot, job: Job, found: Any) -> None:
        """After a prompt was read; found: what its last chunk has given."""
        self.counts.prompt_seconds += time.monotonic() - slot.used
        self.counts.most_tokens = max(self.counts.most_tokens, len(job.prompt))
        self.counts.prompt_tokens += len(job.prompt) - job.n_cached
        self.counts.cached_tokens += job.n_cached
        if isinstance(job, Completion):
            self._to_keep.append(slot)
            job.read = time.monotonic()
            slot.row = found
            if job.request.max_tokens == 0:
                assert slot.answer is not None
                self._send(job, slot.answer.finish("length")._replace(counts=job.taken()))
                self._release(slot)
        else:
            pooling = job.pooling or self._heads.pooling_or_mean
            self._send(job, Embedding(self._heads.pooled(found, pooling)))
            self._release(slot)

    def _step(self) -> None:
        """Choose a token for each answer, then append those of all unfinished ones in one step."""
        tokens: dict[Session, int] = {}
        slots = self._ready()
        for slot in slots:
            try:
                token = self._choose(slot)
            except Exception as error:
                self._fail(slot, self._told(error))
                continue
            if token is not None and not self._drafted(slot, token) and self._has_room(slot):
                tokens[slot.session] = token
        if not tokens:
            return
        self._flush()
        try:
            rows = self._rows(tokens)
        except Exception as error:
            for slot in slots:
                self._fail(slot, self._told(error))
            return
        self.counts.steps += 1
        self.counts.rows += len(tokens)
        for slot in slots:
            if slot.session in rows:
                slot.row = rows[slot.session]

    def _drafted(self, slot: _Slot, token: int) -> bool:
        """Whether a token was drafted and verified already; its logits are then the slot's row."""
        row = None if slot.drafting is None else slot.drafting.take(token)
        if row is not None:
            slot.row = row
            assert isinstance(slot.job, Completion)
            slot.job.n_accepted += 1
            self.counts.accepted_tokens += 1
        return row is not None

    def _rows(self, tokens: dict[Session, int]) -> dict[Session, Best | np.ndarray]:
        """The logits after a token of each session; a single one may use drafts.

        With drafts, each session must have the settings of its own decode steps.
        """
        busy = [slot for slot in self._slots if slot.job is not None]
        found: dict[Session, Best | np.ndarray] = {}
        left = dict(tokens)
        for slot in busy:
            drafting = slot.drafting
            if slot.session not in tokens or drafting is None:
                continue
            if len(busy) == 1 or drafting.own_steps:
                found[slot.session] = self._drafting(slot, drafting, left.pop(slot.session))
        return found | (self._batch.step_best(left, _most_looked_at(busy)) if left else {})

    def _drafting(self, slot: _Slot, drafting: Drafting, token: int) -> Best | np.ndarray:
        """The logits after a token, while a draft of the following ones is verified."""
        assert isinstance(slot.job, Completion)
        n_before, drafting.n_most = drafting.n_drafted, slot.job.request.n_draft
        found = drafting.decode_best(token, _most_looked_at([slot]))
        n = drafting.n_drafted - n_before
        slot.job.n_drafted += n
        self.counts.drafted_tokens += n
        self.counts.drafts += n > 0
        return found

    def _has_room(self, slot: _Slot) -> bool:
        """Whether a token can be appended; drops older ones if the request allows it."""
        session, job = slot.session, slot.job
        if not isinstance(job, Completion) or session.n_past < session.n_ctx:
            return True
        n_keep = min(job.request.n_keep, session.n_ctx - 2)
        try:
            session.remove(n_keep, n_keep + (session.n_ctx - n_keep) // 2)
            slot.n_read = min(slot.n_read, n_keep)
        except ValueError as error:  # of a model whose layers cannot drop single tokens
            self._fail(slot, ApiError(400, str(error), code="failed"))
            return False
        except Exception as error:
            self._fail(slot, self._told(error))
            return False
        return True

    def _ready(self) -> list[_Slot]:
        """The slots whose next token can be chosen; a slow grammar does not delay the others."""
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
                self._fail(slot, self._told(error))
        return ready

    def _choose(self, slot: _Slot) -> int | None:
        """Choose the next token of an answer, None at its end; sends the text that it adds."""
        job, answer, row = slot.job, slot.answer, slot.row
        assert isinstance(job, Completion)
        assert answer is not None
        assert row is not None
        token = slot.forced.popleft() if slot.forced else _sampled(job.sampler, row)
        pieces = answer.push(token, row if isinstance(row, np.ndarray) else None)
        job.sampler.accept(token)
        if slot.budget is not None:
            slot.forced.extend(slot.budget.accept(token))
        self.counts.answer_tokens += answer.n_completion - job.n_answer
        job.n_answer = answer.n_completion
        taken = job.taken()
        if answer.finished:
            taken = taken._replace(mass=slot.session.mass)
            self.counts.answer_seconds += taken.answer_seconds
            self.counts.answer_steps += max(job.n_answer - 1, 0)
            n_token = len(job.prompt) + job.n_answer
            self.counts.most_tokens = max(self.counts.most_tokens, n_token)
            self._release(slot)
        for piece in pieces:
            self._send(job, piece._replace(counts=taken))
        return None if answer.finished else token

    def _send(self, job: Job, event: Event) -> None:
        self._outbox.append((job, event))

    def _flush(self) -> None:
        """Emit the outbox: its events are handled while the step runs, not before."""
        for job, event in self._outbox:
            job.emit(event)
        self._outbox.clear()
        self._flushed()

    def _fail(self, slot: _Slot, error: ApiError) -> None:
        if slot.job is not None:
            self.counts.failed += 1
            self._send(slot.job, error)
            self._release(slot)


def _most_looked_at(slots: list[_Slot]) -> int | None:
    """The number of best logits that suffice for all of these jobs; None if one needs all."""
    most = 0
    for slot in slots:
        if isinstance(slot.job, Completion):
            n = slot.job.sampler.n_best
            if n is None or slot.job.request.logprobs is not None:
                return None
            most = max(most, n)
    return most or None


def _sampled(sampler: Sampler, row: Best | np.ndarray) -> int:
    """Sample the next token from a row of logits."""
    if not isinstance(row, Best):
        return sampler.sample(row)
    ids = row.ids[: sampler.n_best]
    return int(ids[sampler.sample_best(ids, row.logits[: sampler.n_best])])


def _as_api_error(error: Exception) -> ApiError:
    """The error for a client: its own mistake, or an internal error without details.

    Raises GGUFError if the model's file has changed, as this process cannot continue then.
    """
    if isinstance(error, GGUFError):
        raise error
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LogitsError):
        return ApiError(500, f"the model failed: {error}", code="failed")
    if isinstance(error, OSError | SessionFileError):
        return ApiError(400, str(error), code="failed")
    if isinstance(error, SamplerError | ContextError):
        return ApiError(400, str(error), code="failed")
    if isinstance(error, MemoryError):
        return ApiError(503, str(error) or "out of memory", code="failed")
    return ApiError(500, f"the model failed: {type(error).__name__}", code="failed")
