"""A context: one Session per sequence, a lock, and the outputs of the last llama_decode.

Calls on one context, from any threads, run one after another; contexts of one model may be used
concurrently. A callback runs in the thread of the call that it belongs to, within that call: calls
on the same context are refused there.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from tamis.bindings.flat.buffers import as_array, as_function, as_int
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.model import Model, VocabOnly
from tamis.bindings.flat.params import KV_TYPE_NAMES, llama_batch, llama_context_params
from tamis.bindings.flat.status import (
    LLAMA_ABORTED,
    LLAMA_INVALID,
    LLAMA_NO_KV_SLOT,
    LLAMA_UNSUPPORTED,
    Refusal,
    invalid,
)
from tamis.engine.adapters import Adapters
from tamis.engine.batch import Batch
from tamis.engine.session import MAX_CTX, Session
from tamis.platform.processes import usable_cpus

MAX_SEQ = 256


class Job(NamedTuple):
    """The tokens of a batch that belong to one sequence."""

    seq: int
    rows: list[int]  # of the batch
    ids: list[int]
    wanted: np.ndarray  # bool: rows whose output is wanted


class Memory(NamedTuple):
    """A context's KV cache, as a handle of its own."""

    context: "Context"


class Timings:
    """What llama_perf_context reports: milliseconds and tokens."""

    def __init__(self) -> None:
        self.t_start_ms = time.perf_counter() * 1e3
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.t_p_eval_ms = self.t_eval_ms = 0.0
        self.n_p_eval = self.n_eval = 0

    def add(self, n_token: int, seconds: float) -> None:
        """Count a decode step of one token, or the tokens of a prompt."""
        if n_token == 1:
            self.n_eval, self.t_eval_ms = self.n_eval + 1, self.t_eval_ms + seconds * 1e3
        else:
            self.n_p_eval += n_token
            self.t_p_eval_ms += seconds * 1e3


class Context:
    """The sequences of one llama_init_from_model."""

    def __init__(
        self, model: Model, params: llama_context_params, session: Session | None = None
    ) -> None:
        """Make a context; session: sequence 0, with the same parameters, or None for a new one."""
        p, engine = params, model.engine if params.offload_kqv else model.engine.with_kv_on_host()
        self.model, self._engine, self.lock = model, engine, threading.RLock()
        # True within decode: only callbacks see it, other threads wait for the lock
        self.busy = False
        self.n_seq_max = as_int(p.n_seq_max, "n_seq_max", 1, MAX_SEQ)
        n_ctx = as_int(p.n_ctx, "n_ctx", 0, MAX_CTX)
        self.n_ctx_seq = n_ctx // self.n_seq_max if n_ctx else engine.context(None)
        if self.n_ctx_seq < 1:
            invalid(f"n_ctx is {n_ctx}, expected at least one token for each of {self.n_seq_max}")
        self.n_batch = as_int(p.n_batch, "n_batch", 1)
        self.n_ubatch = min(as_int(p.n_ubatch, "n_ubatch", 1), self.n_batch, 4096)
        for name in ("n_threads", "n_threads_batch"):
            self.check_threads(getattr(p, name), name)
        self.attn, self.prefill = p.attn, p.prefill
        self._types = _kv_type(p.type_k, "type_k"), _kv_type(p.type_v, "type_v")
        self._audit = as_int(p.audit, "audit", 0)
        self.adapters = Adapters()
        self.embeddings, self.pooling = bool(p.embeddings), _pooling(model, p.pooling_type)
        self.abort = as_function(p.abort_callback, "abort_callback"), p.abort_callback_data
        self.progress: tuple[Any, Any] = None, None
        self.sessions: dict[int, Session] = {} if session is None else {0: session}
        # Positions that llama_memory_seq_rm removed from the middle; sessions still hold them.
        self.gaps: dict[int, range] = {}
        self._batch = Batch(engine)
        self.timings = Timings()
        self.drop_outputs()
        self.session(0)
        self.memory_handle = TABLE.add(Memory(self))
        model.share()

    @property
    def n_ctx(self) -> int:
        """The number of tokens that all sequences together may hold."""
        return self.n_ctx_seq * self.n_seq_max

    def check_threads(self, n: Any, name: str) -> None:
        """Raise Refusal for a number of threads that is not the model's.

        A number above that of the processors counts as that of the processors, as it does for a
        model.
        """
        own = self.model.engine.n_threads
        if min(as_int(n, name, 0), usable_cpus()) not in (0, own):
            message = f"{name} is {n}, the model has {own}: set llama_model_params.n_threads"
            raise Refusal(LLAMA_UNSUPPORTED, message)

    def session(self, seq: int) -> Session:
        """The session of the sequence `seq`; it is made when it is first used."""
        if seq not in self.sessions:
            self.sessions[seq] = self.new_session()
        return self.sessions[seq]

    def new_session(self) -> Session:
        """An empty sequence. Raises what Engine.session does."""
        return self._engine.session(
            n_ctx=self.n_ctx_seq,
            n_ubatch=self.n_ubatch,
            attn=self.attn,
            prefill=self.prefill,
            audit=self._audit,
            type_k=self._types[0],
            type_v=self._types[1],
            adapters=self.adapters,
        )

    def n_past(self, seq: int) -> int:
        """The number of tokens that a sequence holds."""
        return self.sessions[seq].n_past if seq in self.sessions else 0

    def check_whole(self, seq: int) -> None:
        """Raise Refusal if a sequence has a gap before its last position."""
        if seq in self.gaps:
            gap, n = self.gaps[seq], self.n_past(seq)
            invalid(
                f"sequence {seq} lacks positions {gap.start} to {gap.stop - 1}: close the gap with "
                f"llama_memory_seq_add(mem, {seq}, {gap.stop}, {n}, {-len(gap)}), or remove what "
                "is after it"
            )

    def empty(self, seq: int) -> None:
        """Drop all tokens of a sequence, if it was used."""
        self.gaps.pop(seq, None)
        self.sessions[seq].truncate(0)

    def seq_id(self, value: Any, *, any_below: int = 0) -> int:
        """A checked sequence id; any_below -1 allows negative ids, which mean all.

        Raises Refusal.
        """
        low = -(1 << 31) if any_below < 0 else 0
        return as_int(value, "seq_id", low, self.n_seq_max - 1)

    def drop_outputs(self) -> None:
        """Drop the logits and embeddings of the last batch."""
        self.logits: dict[int, np.ndarray] = {}  # by row of the batch
        self.hidden: dict[int, np.ndarray] = {}
        self.pooled: dict[int, np.ndarray] = {}  # by sequence

    def decode(self, batch: llama_batch) -> None:
        """Run a batch.

        Raises Refusal or what a Session raises; then no token of the batch is held.
        """
        jobs = self._jobs(batch)
        self.drop_outputs()
        self.busy = True
        held = {job.seq: self.n_past(job.seq) for job in jobs}
        try:
            together = [job for job in jobs if self._is_step(job)]
            if len(together) > 1:
                self._step(together)
                jobs = [job for job in jobs if job not in together]
            for job in jobs:
                self._run(job)
        except BaseException:
            self.drop_outputs()
            for seq, n in held.items():
                if seq in self.sessions:
                    self.sessions[seq].truncate(n)
            raise
        finally:
            self.busy = False

    def _jobs(self, batch: llama_batch) -> list[Job]:
        """The batch split by sequence and checked; an error here comes before anything was run."""
        if not isinstance(batch, llama_batch):
            invalid(f"batch is {batch!r}, expected llama_batch_init() or llama_batch_get_one()")
        n = as_int(batch.n_tokens, "n_tokens", 1, self.n_batch)
        if batch.embd is not None:
            raise Refusal(LLAMA_INVALID, "batch.embd is set: input embeddings are not supported")
        ids = as_array(batch.token, np.int32, "batch.token", n)
        n_vocab = self.model.engine.hp.n_vocab
        if ids.min() < 0 or ids.max() >= n_vocab:
            invalid(f"batch.token has {ids.min()} to {ids.max()}, expected 0 to {n_vocab - 1}")
        wanted = np.zeros(n, bool)
        wanted[-1] = True
        if batch.logits is not None:
            wanted = as_array(batch.logits, np.int8, "batch.logits", n) != 0
        jobs = []
        for seq, rows in self._by_sequence(batch, n).items():
            self._check_positions(batch, seq, rows, n)
            jobs.append(Job(seq, rows, ids[rows].tolist(), wanted[rows] | self.embeddings))
        return jobs

    def _by_sequence(self, batch: llama_batch, n: int) -> dict[int, list[int]]:
        if batch.seq_id is None:
            return {0: list(range(n))}
        counts = np.ones(n, np.int32)
        if batch.n_seq_id is not None:
            counts = as_array(batch.n_seq_id, np.int32, "batch.n_seq_id", n)
        if len(batch.seq_id) < n:
            invalid(f"batch.seq_id has {len(batch.seq_id)} rows, expected at least {n}")
        found: dict[int, list[int]] = {}
        for i in range(n):
            count = as_int(int(counts[i]), "batch.n_seq_id", 1, self.n_seq_max)
            for seq in as_array(batch.seq_id[i], np.int32, "batch.seq_id", count).tolist():
                rows = found.setdefault(self.seq_id(seq), [])
                if rows[-1:] == [i]:
                    invalid(f"batch.seq_id names sequence {seq} twice for token {i}")
                rows.append(i)
        return found

    def _check_positions(self, batch: llama_batch, seq: int, rows: list[int], n: int) -> None:
        self.check_whole(seq)
        first = self.n_past(seq)
        if batch.pos is not None:
            found = as_array(batch.pos, np.int32, "batch.pos", n)[rows]
            if not np.array_equal(found, first + np.arange(len(rows))):
                invalid(f"batch.pos of sequence {seq} begins at {found[0]}, expected {first} on")
        if first + len(rows) > self.n_ctx_seq:
            raise Refusal(
                LLAMA_NO_KV_SLOT,
                f"sequence {seq} holds {first} tokens and gets {len(rows)}, its context is "
                f"{self.n_ctx_seq}: raise n_ctx",
            )

    def _is_step(self, job: Job) -> bool:
        return len(job.ids) == 1 and self.n_past(job.seq) > 0 and not self.embeddings

    def _step(self, jobs: list[Job]) -> None:
        """Run one token of each of several sequences."""
        begin = time.perf_counter()
        self._watch()(0, len(jobs))
        found = self._batch.step({self.session(job.seq): job.ids[0] for job in jobs})
        for job in jobs:
            self._keep(job, found[self.session(job.seq)][None])
        for _ in jobs:
            self.timings.add(1, (time.perf_counter() - begin) / len(jobs))

    def _run(self, job: Job) -> None:
        session, begin = self.session(job.seq), time.perf_counter()
        watch = self._watch()
        watch(0, len(job.ids))
        if self.embeddings:
            rows = np.concatenate([_watched(part, watch) for part in session.hidden(job.ids)])
            self.hidden |= {i: rows[k] for k, i in enumerate(job.rows) if i not in self.hidden}
            self.pooled[job.seq] = self._engine.model.heads.pooled(rows, self.pooling)
        elif job.wanted[:-1].any():
            parts = [_watched(part, watch) for part in session.logits(job.ids)]
            self._keep(job, np.concatenate(parts)[job.wanted])
        elif len(job.ids) == 1 and session.n_past:
            self._keep(job, session.decode(job.ids[0])[None])
        else:
            self._keep(job, session.prefill(job.ids, watch)[None])
        self.timings.add(len(job.ids), time.perf_counter() - begin)

    def _keep(self, job: Job, logits: np.ndarray) -> None:
        rows = [i for i, wanted in zip(job.rows, job.wanted, strict=True) if wanted]
        for i, row in zip(rows, logits, strict=False):
            self.logits.setdefault(i, row)

    def _watch(self) -> Callable[[int, int], None]:
        """A function to call as tokens are done, which calls the caller's callbacks.

        Raises Refusal.
        """
        (abort, abort_data), (progress, progress_data) = self.abort, self.progress

        def watch(done: int, total: int) -> None:
            if progress is not None and done:
                progress(done, total, progress_data)
            if abort is not None and abort(abort_data):
                raise Refusal(LLAMA_ABORTED, "the abort callback ended the batch")

        return watch


def _watched(part: np.ndarray, watch: Callable[[int, int], None]) -> np.ndarray:
    watch(0, len(part))
    return part


def _kv_type(value: Any, name: str) -> str:
    if value not in KV_TYPE_NAMES:
        known = ", ".join(f"{i} ({text})" for i, text in KV_TYPE_NAMES.items())
        raise Refusal(LLAMA_UNSUPPORTED, f"{name} is {value!r}, expected one of {known}")
    return KV_TYPE_NAMES[value]


def _pooling(model: Model, value: Any) -> str:
    try:
        return model.engine.model.heads.numbered(value)
    except ValueError as error:
        raise Refusal(LLAMA_UNSUPPORTED, str(error)) from None


def flat_handles(engine: Any, session: Any, params: llama_context_params) -> tuple[int, int]:
    """Handles of a model and a context for an engine and a session of another owner.

    Without weights there is no context: its handle is 0.
    """
    model = Model(engine)
    if isinstance(engine, VocabOnly):
        return model.handle, 0
    context = Context(model, params, session)
    return model.handle, TABLE.add(context)


@contextmanager
def using(handle: Any) -> Iterator[Context]:
    """Give this thread the context of a handle for itself until the block ends. Raises Refusal."""
    context = TABLE.get(handle, Context)
    with context.lock:
        TABLE.get(handle, Context)  # another thread may have freed it while this one waited
        _check_idle(context)
        yield context


@contextmanager
def using_memory(handle: Any) -> Iterator[Context]:
    """Do the same for a handle that llama_get_memory returned."""
    context = TABLE.get(handle, Memory).context
    with context.lock:
        TABLE.get(handle, Memory)
        _check_idle(context)
        yield context


def _check_idle(context: Context) -> None:
    if context.busy:
        invalid("a callback cannot call functions of the context that is calling it")
