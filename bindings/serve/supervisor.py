"""The server's side of `process`: a model runs in a process of its own, which may crash or sleep.

Then another one is started, and jobs restart: readers of their events are asked to drop what they
have (Again), or end if that was already sent to a client. A job in which two processes have crashed
is not given to a third. A process that has been without jobs for a given time is ended; the next
job starts another one.
"""

import contextlib
import json
import math
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve.errors import ApiError, busy, ended, no_helper, not_loaded, stopping
from tamis.bindings.serve.jobs import (
    Again,
    Choice,
    Counts,
    Embedding,
    Event,
    Job,
    Kept,
    Piece,
    SlotState,
    Started,
    event_of_record,
    jobs_to_record,
)
from tamis.bindings.serve.wire import Broken, Frames, Kind, frame
from tamis.platform.processes import child_environment
from tamis.sampling.base import Step
from tamis.sampling.chain import Sampler
from tamis.text.tokenizer import Tokenizer

LAST_N = 64  # tokens that repetition penalties consider
STEP_SECONDS = 900  # the longest silence of a process with jobs; then its step is taken to hang
MOST_RUNS = 2  # processes that may crash with the same job
# the longest wait before a start; a process that lived so long is restarted at once
LONGEST_DELAY, STEADY_SECONDS = 30, 60
END_SECONDS = 0.3  # the time for a process to end by itself
Progress = Callable[[str, int, int | None], None]


class CacheSizes(NamedTuple):
    """The sizes of a prompt cache; bytes that are None are a share of what is free."""

    ram: int | None = None  # bytes in RAM
    folder: str | None = None  # None: nothing is written to disk
    disk: int | None = None  # bytes there
    memory: int | None = None  # bytes that all models may take; the share in RAM is taken of these


class Start(NamedTuple):
    """The arguments of a process; `where` and `session` are passed to the engine."""

    path: str
    identity: list[int]  # of the model file, as wire.identity returns it
    n_threads: int | None
    rope: dict[str, Any] | None
    where: dict[str, Any]
    session: dict[str, Any]
    n_slot: int
    adapters: Sequence[Any] = ((), (), None)  # AdapterFiles
    # The drafter ("model", "mtp" or "attn"), the tokens of a draft, and a draft model's file.
    draft: list[Any] | None = None
    # The NGrams that draft, first or alone; None: there are none.
    ngrams: Sequence[Any] | None = None
    # The CacheSizes of the prompt cache; None: there is none.
    cache: Sequence[Any] | None = None
    mmproj: str = ""  # the file of the encoder of pictures; "": there is none


class Loaded(NamedTuple):
    """What a process reports of its model."""

    n_ctx: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_slot: int
    n_byte: int  # the memory of weights and slots
    device: str
    predicts: bool = True  # it has logits
    pooling: str = "mean"  # of embeddings
    ranks: bool = False  # whether the model ranks documents for a query


class LoadError(RuntimeError):
    """The process could not load the model; the text is for the user."""

    memory = False  # whether memory was lacking


def sampler_of(
    sampling: Sampling,
    seed: int,
    n_vocab: int,
    mask: Step | None = None,
    tokenizer: Tokenizer | None = None,
    prompt: Sequence[int] = (),
) -> Sampler:
    """The sampler of an answer to a prompt.

    Raises ValueError, TypeError for parameters out of range.
    """
    return sampling.sampler(
        n_vocab,
        seed=seed,
        last_n=LAST_N,
        ids=_no_ids,
        grammar=mask,
        tokenizer=tokenizer,
        prompt=prompt,
    )


def _no_ids() -> Any:
    raise AssertionError("requests bring no functions of tokens")


class Process(Protocol):
    """A process with its socket: a Protocol."""

    channel: socket.socket

    def end(self) -> str:
        """Wait a moment until it has ended, then kill it; returns how it ended."""


class ModelProcess:
    """A child process that runs the model."""

    def __init__(self, start: Start) -> None:
        self.channel, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "tamis.bindings.serve.process"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), json.dumps(start._asdict()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=child_environment({}),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C must reach the server only
            )
        self.pid = self._process.pid

    def end(self) -> str:
        """End the process, as described in Process."""
        self.channel.close()
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code >= 0:
            return f"has ended with status {code}"
        memory = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return f"was ended by signal {-code} ({signal.Signals(-code).name}{memory})"


@dataclass(eq=False)
class _Entry:
    """A job that has not ended. Jobs of one request are sent together."""

    job: Job
    number: int
    request: int
    started: bool = False
    runs: int = 0  # processes that have crashed with it


class _Writer:
    """Writes to a process in a thread, as a process may be slow to read."""

    def __init__(self, channel: socket.socket) -> None:
        self._queue = queue.SimpleQueue[tuple[Kind, Any, socket.socket | None] | None]()
        self._channel = channel
        threading.Thread(target=self._run, name="tamis-writer", daemon=True).start()

    def put(self, kind: Kind, record: Any, handed: socket.socket | None = None) -> None:
        """Send a frame, with a socket if given; a long record is encoded as JSON in the thread."""
        self._queue.put((kind, record, handed))

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def _run(self) -> None:
        for kind, record, handed in iter(self._queue.get, None):
            data = frame(kind, json.dumps(record).encode())
            try:
                if handed is not None:
                    n = socket.send_fds(self._channel, [data], [handed.fileno()])
                    data = data[n:]
                self._channel.sendall(data)
            except OSError:
                pass  # the process has ended; its reader notices
            finally:
                if handed is not None:
                    handed.close()


class Supervisor:
    """Runs jobs in a process, and restarts it after a crash. Callable from any thread."""

    def __init__(
        self,
        start: Callable[[], Process],
        n_queue: int,
        n_owner: int = 1,
        *,
        log: Callable[[str], None] = lambda line: None,
        progress: Progress = lambda stage, done, total: None,
        step_seconds: float = STEP_SECONDS,
        idle_seconds: float = math.inf,
    ) -> None:
        """Start the process; n_owner: the number of clients that share the queue.

        idle_seconds: the time without jobs after which the process sleeps: it is ended.
        """
        self._start, self._log, self._progress = start, log, progress
        self.n_queue, self._n_owner, self._step_seconds = n_queue, n_owner, step_seconds
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}  # by number, in the order of requests
        self._numbers: dict[Job, int] = {}  # includes jobs that have ended, until `drop`
        self._number = 0
        self._own, self._before, self._now = Counts(), Counts(), Counts()
        self._process: Process | None = None
        self._writer: _Writer | None = None  # to a process that has loaded the model
        self._idle_seconds, self._asleep = idle_seconds, False
        self._heard = self._busy = 0.0  # the last sign of the process, the last moment with jobs
        self._failed: Exception | None = None
        self._stopping = False
        self.loaded: Loaded | None = None
        self.slots: list[SlotState] = []  # as the process last reported them
        self._thread = threading.Thread(target=self._run, name="tamis-supervisor", daemon=True)
        self._thread.start()

    def wait(self) -> Loaded:
        """Wait until the model is loaded and return its description. Raises LoadError."""
        with self._changed:
            while self.loaded is None and self._failed is None:
                self._changed.wait()
            if self.loaded is None:
                assert self._failed is not None
                raise self._failed
            return self.loaded

    @property
    def n_running(self) -> int:
        """The number of jobs that have a slot."""
        return sum(entry.started for entry in list(self._entries.values()))

    @property
    def n_waiting(self) -> int:
        """The number of jobs that wait for a slot."""
        return sum(not entry.started for entry in list(self._entries.values()))

    @property
    def counts(self) -> Counts:
        """The counters of all processes, summed."""
        return self._own + self._before + self._now

    @property
    def ready(self) -> bool:
        """Whether a process has loaded the model, or the next job starts one."""
        return self._writer is not None or self._asleep

    @property
    def asleep(self) -> bool:
        """Whether there is no process because there were no jobs."""
        return self._asleep

    @property
    def failed(self) -> bool:
        """Whether the last attempt to load the model failed."""
        return self._failed is not None

    @property
    def stopped(self) -> bool:
        """Whether no more jobs are accepted."""
        return self._stopping

    def submit(self, jobs: Sequence[Job]) -> None:
        """Accept the jobs of a request, all or none; the caller must `drop` them at their end.

        Raises ApiError if too many wait, the server stops, or there is no model.
        """
        with self._changed:
            if self._stopping:
                raise stopping()
            if self._failed is not None:
                raise not_loaded(str(self._failed))
            self._check_room(jobs)
            if not self._entries:
                self._heard = time.monotonic()
            request = self._number
            entries = []
            for job in jobs:
                self._numbers[job] = self._number
                entries.append(_Entry(job, self._number, request))
                self._number += 1
            self._entries |= {entry.number: entry for entry in entries}
            try:
                self._send(entries)
            except OSError as error:
                self._drop(jobs)
                raise no_helper(str(error)) from None
            self._own.jobs += len(jobs)
            self._changed.notify_all()

    def drop(self, jobs: Sequence[Job]) -> None:
        """Cancel jobs that nobody waits for any more."""
        with self._changed:
            self._drop(jobs)

    def stop(self) -> None:
        """Fail all jobs and end the process; may be called more than once."""
        with self._changed:
            self._stopping = True
            self._failed = self._failed or LoadError("the server is stopping")
            if self._process is not None:
                self._hang_up(self._process)
            failed = self._take_all()
            self._changed.notify_all()
        for job in failed:
            job.emit(stopping())

    def join(self) -> None:
        """Wait after `stop` until the process has ended."""
        self._thread.join()

    # --- under the lock --------------------------------------------------------------------------

    def _check_room(self, jobs: Sequence[Job]) -> None:
        n_slot = 0 if self.loaded is None else self.loaded.n_slot
        waiting = [entry.job for entry in self._entries.values() if not entry.started]
        n_free = n_slot - (len(self._entries) - len(waiting))
        mine = sum(job.owner == jobs[0].owner for job in waiting)
        share = self.n_queue // self._n_owner
        full = len(waiting) + len(jobs) > self.n_queue + n_free
        if full or (mine and mine + len(jobs) > share + n_free):
            self._own.refused += len(jobs)
            raise busy(mine)

    def _send(self, entries: Sequence[_Entry]) -> None:
        """Send the jobs of one request. Raises OSError if there are no descriptors."""
        if self._writer is None:
            return
        jobs = [entry.job for entry in entries]
        follower = next((job.masks for job in jobs if isinstance(job, Choice)), None)
        handed = None if follower is None else follower.follow()
        record = jobs_to_record(jobs, [entry.number for entry in entries])
        self._writer.put(Kind.JOBS, record | {"masked": handed is not None}, handed)

    def _drop(self, jobs: Sequence[Job]) -> None:
        numbers = [self._numbers.pop(job) for job in jobs if job in self._numbers]
        for job in jobs:
            job.cancelled = True
        for number in numbers:
            self._entries.pop(number, None)
        if numbers and self._writer is not None:
            self._writer.put(Kind.DROP, numbers)

    def _take_all(self) -> list[Job]:
        """Remove and return all jobs."""
        jobs = [entry.job for entry in self._entries.values()]
        self._own.failed += len(jobs)
        self._entries.clear()
        return jobs

    @staticmethod
    def _hang_up(process: Process) -> None:
        """Close the connection, so that the thread and the process notice the end."""
        with contextlib.suppress(OSError):
            process.channel.shutdown(socket.SHUT_RDWR)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = 0.0
        while not self._stopping:
            begin = time.monotonic()
            try:
                why = self._live()
            except (LoadError, OSError, ValueError) as error:
                self._fail(error)
            else:
                if self._slept():
                    delay = 0.0
                    continue
                self._recover(why)
                if time.monotonic() - begin > STEADY_SECONDS:
                    delay = 0.0
            with self._changed:
                if self.loaded is None:  # nobody was promised a model
                    return
                if not self._stopping:
                    self._changed.wait(delay)
            delay = min(LONGEST_DELAY, 2 * delay or 1)

    def _slept(self) -> bool:
        """If the process has ended for want of jobs, wait for one; returns whether it had."""
        with self._changed:
            if not self._asleep:
                return False
            self._log("the model's process ended: it had no requests")
            while not self._entries and not self._stopping:
                self._changed.wait()
            self._asleep = False
            return True

    def _live(self) -> str:
        """Run a process from its start to its end; returns why it ended.

        Raises LoadError, OSError.
        """
        process, frames, hung = self._start(), Frames(), ""
        try:
            with self._changed:
                self._process = process
                if self._stopping:
                    return ""
            if not self._load(process, frames):
                raise LoadError(f"the model's process {process.end()} while it loaded the model")
            self._begin(process)
            hung = self._listen(process, frames)
        finally:
            with self._changed:
                self._close_writer()
                self._process = None
                self._before, self._now = self._before + self._now.ended(), Counts()
            why = process.end()
        return hung or why

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _load(self, process: Process, frames: Frames) -> bool:
        """Wait until a model is loaded; False if the process has ended. Raises LoadError."""
        while True:
            while (found := _next(frames)) is not None:
                kind, record = found[0], json.loads(found[1])
                if kind is Kind.PROGRESS:
                    self._progress(*record)
                elif kind is Kind.LOADED:
                    with self._changed:
                        self.loaded = Loaded(*record)
                    return True
                else:
                    error = LoadError(record[0])
                    error.add_note(record[1])
                    error.memory = record[2]
                    raise error
            data = _received(process.channel)
            if not data:
                return False
            frames.feed(data)

    def _begin(self, process: Process) -> None:
        """Send a process the waiting jobs; later ones are sent as they are submitted."""
        with self._changed:
            if self._stopping:
                return
            self._writer, self._failed = _Writer(process.channel), None
            self._heard = self._busy = time.monotonic()
            requests: dict[int, list[_Entry]] = {}
            for entry in self._entries.values():
                requests.setdefault(entry.request, []).append(entry)
            for entries in requests.values():
                self._send(entries)
            self._changed.notify_all()

    def _listen(self, process: Process, frames: Frames) -> str:
        """Handle what a process sends until it ends; returns why it must be ended, or ""."""
        poll = select.poll()
        poll.register(process.channel, select.POLLIN)
        while True:
            if not poll.poll(1000 * min(1, self._step_seconds)):
                with self._changed:
                    if self._is_idle():
                        self._close_writer()  # later jobs wait for the next process
                        self._asleep = True
                        return ""
                    silent = time.monotonic() - self._heard if self._entries else 0
                if silent > self._step_seconds:
                    return f"has not ended a step in {self._step_seconds:g} s"
                continue
            data = _received(process.channel)
            if not data:
                return ""
            frames.feed(data)
            try:
                while (found := _next(frames)) is not None:
                    self._deal(*found)
            except (ValueError, TypeError, KeyError, IndexError):
                return "has sent what it should not"

    def _is_idle(self) -> bool:
        """Whether the process has been without jobs for long enough to sleep."""
        if self._entries:
            self._busy = time.monotonic()
        return time.monotonic() - self._busy > self._idle_seconds and not self._stopping

    def _deal(self, kind: Kind, data: bytes) -> None:
        """Handle events of jobs, in the order in which the process sent them."""
        if kind is not Kind.EVENTS:
            raise ValueError
        records, counts, slots = json.loads(data)
        found: list[tuple[Job, Event]] = []
        with self._changed:
            self._heard = self._busy = time.monotonic()
            self._now = Counts.of_told(counts)
            self.slots = [SlotState(*slot) for slot in slots]
            for number, n_answer, *record in records:
                entry = self._entries.get(number)
                if entry is None:
                    continue
                event, job = event_of_record(*record), entry.job
                if isinstance(event, Started):
                    entry.started, job.n_cached = True, event.cached
                elif isinstance(event, Piece):
                    job.n_answer = n_answer
                if _is_last(event):
                    del self._entries[number]
                found.append((job, event))
        for job, event in found:
            job.emit(event)

    def _recover(self, why: str) -> None:
        """After the end of a process, choose the jobs that restart.

        Fail those with too many crashes.
        """
        if self._stopping:
            return
        self._log(f"the model's process {why}; it is started again")
        found: list[tuple[Job, Event]] = []
        with self._changed:
            for entry in list(self._entries.values()):
                if not entry.started:
                    continue
                entry.runs, entry.started = entry.runs + 1, False
                if entry.runs < MOST_RUNS:
                    found.append((entry.job, Again()))
                else:
                    del self._entries[entry.number]
                    self._own.failed += 1
                    found.append((entry.job, ended(why)))
        for job, event in found:
            job.emit(event)

    def _fail(self, why: Exception) -> None:
        """Fail all jobs: for now there is no model."""
        with self._changed:
            if self._stopping:
                return
            self._failed = why
            jobs = self._take_all()
            self._changed.notify_all()
        if self.loaded is not None:
            self._log(f"the model cannot be loaded again: {why}")
        for job in jobs:
            job.emit(not_loaded(str(why)))


def _next(frames: Frames) -> tuple[Kind, bytes] | None:
    try:
        return frames.next()
    except Broken as error:
        raise ValueError(str(error)) from None


def _received(channel: socket.socket) -> bytes:
    """The bytes that have arrived; empty at the end."""
    try:
        return channel.recv(1 << 20)
    except OSError:
        return b""


def _is_last(event: Event) -> bool:
    finished = isinstance(event, Piece) and event.finish is not None
    return finished or isinstance(event, Embedding | Kept | ApiError)
