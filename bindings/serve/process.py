"""The process that runs a model: jobs arrive over a socket, events return, one frame a step.

`supervisor` starts python -m tamis.bindings.serve.process SOCKET START PARENT, and starts another
if this one crashes. It ends when the socket closes.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from shutil import disk_usage
from typing import Any

from tamis.bindings.serve.errors import ApiError, invalid, no_helper
from tamis.bindings.serve.jobs import (
    Emit,
    Event,
    Job,
    Keeping,
    Piece,
    Wanted,
    event_to_record,
    jobs_of_record,
)
from tamis.bindings.serve.masks import Masks
from tamis.bindings.serve.media import unpacked
from tamis.bindings.serve.room import CACHE_SHARE, Room, Slots
from tamis.bindings.serve.supervisor import CacheSizes, Loaded, Start, sampler_of
from tamis.bindings.serve.wire import Broken, Frames, Kind, frame, identity
from tamis.bindings.serve.worker import Completion, Reopen, Worker
from tamis.engine.adapters import AdapterFiles
from tamis.engine.drafting import (
    DRAFT_MAX,
    AttentionDraft,
    Draft,
    Drafting,
    ModelDraft,
    NextDraft,
)
from tamis.engine.engine import Engine
from tamis.engine.ngram_draft import NGrams, with_ngrams
from tamis.engine.prompt_cache import PromptCache
from tamis.engine.session import Session
from tamis.model.hparams import RopeScaling
from tamis.model.placement import devices
from tamis.platform.limits import limit
from tamis.platform.memory import available_bytes
from tamis.platform.private_files import private_folder
from tamis.platform.processes import end_with
from tamis.select.notation import ANY_PREFILL, DENSE
from tamis.vision.family import Rows
from tamis.vision.held import row_ids

# the time for the worker to end, and for the cache's last files
JOIN_SECONDS, WRITE_SECONDS = 0.1, 0.1
ALIVE_SECONDS = 1  # between frames while the model runs and there is no event


def main() -> None:
    """Load the model and run jobs until the socket is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ends this process
        signal.signal(number, signal.SIG_IGN)
    end_with(int(sys.argv[3]))
    limit("core", 0)  # a core dump would contain what clients wrote
    channel = socket.socket(fileno=int(sys.argv[1]))
    start = Start(**json.loads(sys.argv[2]))
    try:
        engine, sessions, reopen = _load(channel, start)
        drafting = _drafting(start, engine, sessions)
        cache, n_byte = _cache(start, engine, sessions, drafting)
    except Exception as error:
        memory = isinstance(error, MemoryError)
        line = _line(error).replace(start.path, os.path.basename(start.path))  # clients read it
        told = json.dumps([line, traceback.format_exc(), memory]).encode()
        channel.sendall(frame(Kind.FAILED, told))
        os._exit(1)
    loaded(channel, engine, sessions, reopen, drafting, cache, n_byte).run()
    if cache is not None:
        cache.close(WRITE_SECONDS)
    os._exit(0)  # the model may be in a long step, which cannot be interrupted


def _load(channel: socket.socket, start: Start) -> tuple[Engine, list[Session], Reopen]:
    """The model, one session per slot, and a function that opens one with other adapter scales.

    Raises MemoryError if they do not all fit, AdapterError.
    """

    def progress(stage: str, done: int, total: int | None) -> None:
        channel.sendall(frame(Kind.PROGRESS, json.dumps([stage, done, total]).encode()))

    if identity(start.path) != start.identity:
        raise RuntimeError(f"{start.path} has changed since the model was first loaded")
    engine = Engine.load(
        start.path,
        n_threads=start.n_threads,
        rope=None if start.rope is None else RopeScaling(**start.rope),
        progress=progress,
        mmproj=start.mmproj or None,
        **start.where,
    )
    given = _suited(start.session, engine)
    if engine.model.arch.is_encoder:  # it reads a whole text at once
        given = given | {"n_ubatch": None}
    elif engine.encoder is not None and given["n_ubatch"] is not None:
        given = given | {"n_ubatch": max(given["n_ubatch"], engine.encoder.least_ubatch)}
    adapters = AdapterFiles(*start.adapters).load()

    def reopen(scales: Sequence[float] | None) -> Session:
        found = adapters if scales is None else adapters.scaled(scales)
        return engine.session(**given, adapters=found)

    how = given | {"adapters": adapters, "progress": progress}
    first = engine.session(**how)
    _room(start, engine, first).left(_slots(start, first), _asked(start))
    return engine, [first, *(engine.session(**how) for _ in range(start.n_slot - 1))], reopen


def _suited(session: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """The arguments of a session, with `--prefill auto` resolved."""
    if session["prefill"] != "auto":
        return session
    return session | {"prefill": DENSE if engine.auto_stays_dense() else ANY_PREFILL}


def _room(start: Start, engine: Engine, session: Session) -> Room:
    """The free memory and disk without the weights, before any slot is used."""
    folder = start.session["kv_dir"]
    n_disk = None if folder is None else disk_usage(folder).free
    cpu = next((d for d, b in devices(engine.places).items() if b.on_host), "")
    free = session.plans[cpu].available if cpu else available_bytes()
    return Room((cpu, free), n_disk)


def _slots(start: Start, session: Session, drafting: Sequence[Drafting] = ()) -> list[Slots]:
    """The memory of slots like this session, and of their drafters."""
    found = [Slots(start.n_slot, session.n_ctx, session.plans)]
    if drafting:
        found.append(Slots(len(drafting), session.n_ctx, drafting[0].plans, loaded=False))
    return found


def _asked(start: Start) -> int:
    """The bytes of RAM that the user gave the prompt cache."""
    return 0 if start.cache is None else CacheSizes(*start.cache).ram or 0


def _cache(
    start: Start, engine: Engine, sessions: Sequence[Session], drafting: Sequence[Drafting]
) -> tuple[PromptCache | None, int]:
    """The cache of prompts beyond the slots, and the bytes of memory that everything takes.

    Raises OSError for a folder that cannot be used, MemoryError.
    """
    slots, one = _slots(start, sessions[0], drafting), sessions[0]
    left = _room(start, engine, one).left(slots, _asked(start))
    taken = sum(plan.weights for plan in one.plans.values())
    taken += sum(each.bytes_on(device) for each in slots for device in each.plans)
    taken += sum(each.in_ram for each in slots)
    if start.cache is None or engine.model.arch.is_encoder:
        return None, taken
    given = CacheSizes(*start.cache)
    n_ram, n_disk = given.ram, given.disk
    if n_ram is None:
        most = left if given.memory is None else min(left, given.memory - taken)
        n_ram = max(0, most) // CACHE_SHARE
    if given.folder is not None and n_disk is None:
        n_disk = disk_usage(private_folder(Path(given.folder))).free // CACHE_SHARE
    if not n_ram and given.folder is None:
        return None, taken
    salt = start.where.get("precision", "")
    return PromptCache.open(n_ram, given.folder, n_disk or 0, salt), taken + n_ram


def _drafting(start: Start, engine: Engine, sessions: Sequence[Session]) -> list[Drafting]:
    """The drafter of each session; a draft model is loaded once. Raises ValueError."""
    if engine.model.arch.is_encoder:
        return []
    how, n_max, *file = start.draft or ("", DRAFT_MAX)
    small = None
    if how == "model":
        small = Engine.load(file[0], n_threads=start.n_threads, **start.where)
    ngrams, found = None if start.ngrams is None else NGrams(*start.ngrams), []
    for each in sessions:
        own: Draft | None = None
        if small is not None:
            own = ModelDraft(small, engine, each.n_ctx)
        elif how == "mtp":
            own = NextDraft(engine, each.n_ctx)
        elif how == "attn":
            own = AttentionDraft(each)
        draft = with_ngrams(own, each, ngrams, n_max)
        if draft is not None:
            found.append(Drafting(each, draft, n_max))
    return found


def _line(error: Exception) -> str:
    """The text of an error for the server's log."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(error)
    if isinstance(error, MemoryError):
        return text or "out of memory: lower --ctx or take a smaller model"
    if isinstance(error, ValueError | RuntimeError | OSError | ImportError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text} (a bug of tamis)"


def _masks(number: int | None) -> Masks:
    """The masks that come by a descriptor. Raises ApiError where none could be had for it."""
    if number is None:
        raise no_helper("too many open files")
    return Masks(socket.socket(fileno=number))


def loaded(
    channel: socket.socket,
    engine: Engine,
    sessions: Sequence[Session],
    reopen: Reopen | None = None,
    drafting: Sequence[Drafting] = (),
    cache: PromptCache | None = None,
    n_byte: int = 0,
) -> "Runner":
    """Send the model's description to the server; returns the runner of its jobs.

    drafting: one per session. n_byte: the memory of everything.
    """
    hp, n = engine.hp, len(sessions)
    one = sessions[0]
    where = ", ".join(devices(engine.loaded.places))
    model = engine.model
    told = Loaded(
        n_ctx=one.n_ctx,
        n_embd=hp.n_embd,
        n_vocab=hp.n_vocab,
        n_ctx_train=hp.n_ctx_train,
        n_slot=n,
        n_byte=n_byte,
        device=where,
        predicts=not model.arch.is_encoder,
        pooling=model.heads.pooling_or_mean,
        ranks=model.heads.ranks,
    )
    channel.sendall(frame(Kind.LOADED, json.dumps(told).encode()))
    return Runner(channel, engine, sessions, reopen, drafting, cache)


class Runner:
    """Jobs by their numbers, and the events that they have sent since the last frame."""

    def __init__(
        self,
        channel: socket.socket,
        engine: Engine,
        sessions: Sequence[Session],
        reopen: Reopen | None,
        drafting: Sequence[Drafting] = (),
        cache: PromptCache | None = None,
    ) -> None:
        self._channel, self._n_vocab, self._engine = channel, engine.hp.n_vocab, engine
        self._tokenizer = engine.tokenizer
        self._jobs: dict[int, tuple[Job, Masks | None]] = {}
        self._events: list[list[Any]] = []
        self._sent, self._busy = 0.0, [False] * len(sessions)
        told = self._flush, self._hang_up
        self._worker = Worker(engine, sessions, *told, reopen, drafting, cache)

    def run(self) -> None:
        """Run jobs until the socket is closed."""
        frames, sockets = Frames(), deque[int | None]()
        with contextlib.suppress(OSError, Broken):
            while True:
                data, numbers, flags, _ = socket.recv_fds(self._channel, 1 << 20, 16)
                if not data:
                    break
                sockets.extend(numbers)
                if flags & socket.MSG_CTRUNC:  # no descriptor was free for the one that came
                    sockets.append(None)
                frames.feed(data)
                while (found := frames.next()) is not None:
                    self._take(*found, sockets)
        self._worker.stop()
        self._worker.join(JOIN_SECONDS)  # it may be writing a slot's sequence to the cache

    def _take(self, kind: Kind, data: bytes, sockets: deque[int | None]) -> None:
        """Do what a frame says. Whatever is wrong with the jobs of a request fails them alone."""
        found = json.loads(data)
        if kind is Kind.DROP:
            self._drop(found)
            return
        masks = None
        try:
            if found["masked"]:
                masks = _masks(sockets.popleft())
            jobs = [self._job(wanted, masks) for wanted in jobs_of_record(found)]
        except Exception as error:
            numbers = [one["id"] for one in found["jobs"]]
            self._drop(numbers)
            if masks is not None:
                masks.close()
            self._worker.refuse([Job([], self._emitter(number)) for number in numbers], error)
        else:
            self._worker.submit(jobs)

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            job, masks = self._jobs.pop(number, (None, None))
            if job is not None:
                job.cancelled = True
            if masks is not None:
                masks.close()

    def _emitter(self, number: int) -> Emit:
        def emit(event: Event) -> None:
            job, _ = self._jobs.get(number, (None, None))
            n = job.n_answer if job is not None and isinstance(event, Piece) else 0
            self._events.append([number, n, *event_to_record(event)])

        return emit

    def _job(self, wanted: Wanted, masks: Masks | None) -> Job:
        emit = self._emitter(wanted.id)
        how: dict[str, Any] = {"scope": wanted.scope, "owner": wanted.owner, "slot": wanted.slot}
        how["lora"] = None if wanted.lora is None else tuple(wanted.lora)
        how["tiles"] = self._rows_of(wanted)
        if wanted.keeping:
            action, path = wanted.keeping
            job: Job = Keeping([], emit, action=action, path=path, **how)
        elif wanted.request is None:
            job = Job(wanted.prompt, emit, pooling=wanted.pooling, **how)
        else:
            mask = None if masks is None else masks.step(wanted.number, self._n_vocab)
            how_sampled = wanted.sampling, wanted.seed, self._n_vocab, mask, self._tokenizer
            sampler = sampler_of(*how_sampled, [i for i in wanted.prompt if i >= 0])
            how |= {"request": wanted.request, "sampler": sampler, "mask": mask}
            how |= {"cached": wanted.cached, "reuse": wanted.reuse}
            job = Completion(wanted.prompt, emit, **how)
        self._jobs[wanted.id] = job, masks
        return job

    def _rows_of(self, wanted: Wanted) -> list[Rows]:
        """The rows of a job's pictures, not yet computed. Raises ApiError for ids of others."""
        found, ids = [], set[int]()
        if wanted.tiles and (encoder := self._engine.encoder) is not None:
            found = [encoder.rows_of(unpacked(tile)) for tile in wanted.tiles]
            for rows in found:
                ids.update(row_ids(rows.key, len(rows.values)))
        wrong = [i for i in wanted.prompt if i < 0 and i not in ids]
        if wrong and not wanted.tiles:
            says = f"token id {wrong[0]} is outside the vocabulary of {self._n_vocab} tokens"
            raise invalid(says, "prompt")
        if wrong:
            raise ApiError(503, "the encoder of pictures has changed: try again", code="failed")
        return found

    def _hang_up(self) -> None:
        """End the connection.

        Called in the worker's thread when it is stopped or ended by a bug.
        """
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        """Send all events of a step in one frame; called in the worker's thread."""
        now, slots = time.monotonic(), self._worker.slots()
        busy = [slot.busy for slot in slots]
        if not self._events and busy == self._busy and now < self._sent + ALIVE_SECONDS:
            return
        record = [self._events, self._worker.counts.told(), slots]
        self._events, self._sent, self._busy = [], now, busy
        with contextlib.suppress(OSError):  # the server has ended, and so does this process
            self._channel.sendall(frame(Kind.EVENTS, json.dumps(record).encode()))


if __name__ == "__main__":
    main()
