"""Jobs for the process that runs a model, and their events: records without the engine."""

import base64
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from tamis.bindings.drop_in.completion import Counts as Taken
from tamis.bindings.drop_in.completion import Likely, Piece, Request, TokenInfo
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.helpers import Follower
from tamis.bindings.serve.tasks import request_of, request_record, sampling_of


class Started(NamedTuple):
    """The event that a job has a slot, which holds so many tokens of its prompt."""

    cached: int
    slot: int = -1


class Progress(NamedTuple):
    """Tokens of the prompt: done, in total, and those that the KV cache held already."""

    done: int
    total: int
    cached: int


class Embedding(NamedTuple):
    """A text's vector f32 [n_embd]: the pooled rows of the output head's input.

    Or the rows f32 [n_tok, n_embd], or the scores of labels f32 [n_label], as the job asks.
    """

    vector: np.ndarray


class PromptTokens(NamedTuple):
    """The prompt's tokens with their logprobs."""

    tokens: list[TokenInfo]


class Kept(NamedTuple):
    """The result of a slot's action: tokens, bytes of the file, seconds."""

    n_token: int
    n_byte: int
    seconds: float


class SlotState(NamedTuple):
    """The current state of a slot: whether it is busy, and its tokens."""

    busy: bool = False
    n_past: int = 0
    n_answer: int = 0
    n_prompt: int = 0
    n_left: int = -1  # that the answer may have beyond those it has; -1: there is no answer


class Again(NamedTuple):
    """The event that a job restarts in another process: what it has sent before is void."""


# Prompts share pages of common prefixes only within a scope: otherwise a client could tell from the
# time of its answer, and from usage, what others' prompts contain.
SHARED = ""
Event = Started | Progress | Piece | PromptTokens | Embedding | Kept | Again | ApiError
Emit = Callable[[Event], None]  # called in a thread of the supervisor; must not block
Emitter = Callable[[int], Emit]  # makes the Emit of the i-th choice


@dataclass(eq=False)
class Job:
    """A sequence to run.

    Its last event is an Embedding, a Piece with a finish reason, or an ApiError.
    """

    prompt: list[int]
    emit: Emit
    cancelled: bool = False  # set once nobody waits for it any more; the slot is then soon free
    n_cached: int = 0
    n_answer: int = 0
    scope: str = field(default=SHARED, kw_only=True)
    owner: Hashable = field(default="", kw_only=True)  # the client, for fairness among them
    slot: int | None = field(default=None, kw_only=True)  # the only slot that it may use
    # pooling of an embedding; None: the model's
    pooling: str | None = field(default=None, kw_only=True)
    # scales of adapters; None: the initial ones
    lora: tuple[float, ...] | None = field(default=None, kw_only=True)
    # the tiles of its pictures; in the model's process their rows
    tiles: Sequence[Any] = field(default=(), kw_only=True)


@dataclass(eq=False)
class Keeping(Job):
    """A slot's sequence saved to a file, restored from one, erased or compressed."""

    action: str = field(kw_only=True)  # save, restore, erase or compress
    path: str = field(kw_only=True)  # the file; of compress a KVzip, as its `parse` reads it


@dataclass(eq=False)
class Choice(Job):
    """One answer to a prompt: the i-th choice of its request."""

    request: Request = field(kw_only=True)
    sampling: Sampling = field(kw_only=True)
    seed: int = field(kw_only=True)
    number: int = field(default=0, kw_only=True)
    masks: Follower | None = field(default=None, kw_only=True)  # of its grammar
    # whether tokens that a slot holds may be reused
    cached: bool = field(default=True, kw_only=True)
    reuse: int = field(
        default=0, kw_only=True
    )  # the least chunk reused at other positions; 0: none


@dataclass(eq=False)
class Counts:
    """Counters since the start, for /metrics and the log."""

    jobs: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    moved_tokens: int = 0  # of these, tokens that were held at other positions
    answer_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    prompt_seconds: float = 0.0  # the time spent reading prompts
    chunks: int = 0  # of prompts
    answer_seconds: float = 0.0  # of finished answers, from their first token on
    answer_steps: int = 0  # decode steps of finished answers: the first token needs none
    rows: int = 0  # the number of answers in each step, summed over all steps
    drafts: int = 0  # drafts that speculative decoding made
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cache_hits: int = 0  # prompts of which the prompt cache held more than slots did
    compressed_tokens: int = 0  # tokens of prompts that were gone, as their text was compressed
    restored_tokens: int = 0  # tokens of these prompts that it restored
    cache_kept: int = 0  # bytes written to the prompt cache
    cache_restored: int = 0  # bytes restored from the prompt cache
    cache_evicted: int = 0  # pages that it evicted for lack of room
    cache_failed: int = 0  # its files that could not be written, or were damaged
    cache_ram: int = 0  # bytes of RAM that it takes now
    cache_disk: int = 0  # bytes of its folder, which models may share
    most_tokens: int = 0  # the most tokens that a sequence had

    def __add__(self, other: "Counts") -> "Counts":
        """The sums of counters; of longest sequences, and of bytes in a folder, the larger one."""
        found = Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        found.most_tokens = max(self.most_tokens, other.most_tokens)
        found.cache_disk = max(self.cache_disk, other.cache_disk)
        return found

    def take_cache(self, cache: Any) -> None:
        """Copy the counters of a PromptCache."""
        self.cache_hits, self.restored_tokens = cache.n_hits, cache.n_restored_tokens
        self.cache_kept, self.cache_restored = cache.n_kept, cache.n_restored
        self.cache_evicted, self.cache_failed = cache.n_evicted, cache.n_failed
        self.cache_ram, self.cache_disk = cache.ram_bytes, cache.disk_bytes

    def ended(self) -> "Counts":
        """The counts of a process that has ended and takes no memory any more."""
        return replace(self, cache_ram=0)

    def told(self) -> list[Any]:
        """The counts as a record that a process sends to its supervisor."""
        return [self.failed, self.cancelled, *astuple(self)[4:]]

    @classmethod
    def of_told(cls, record: Sequence[Any]) -> "Counts":
        """The counts of a record that `told` made."""
        failed, cancelled, *rest = record
        return cls(0, failed, cancelled, 0, *rest)


def jobs_to_record(jobs: Sequence[Job], numbers: Sequence[int]) -> dict[str, Any]:
    """The jobs of a request for JSON; those of one prompt contain its tokens once."""
    prompts: list[list[int]] = []
    places: dict[int, int] = {}
    tiles: list[Sequence[Any]] = [()]
    seen: dict[int, int] = {}
    found = []
    for job, number in zip(jobs, numbers, strict=True):
        if id(job.prompt) not in places:
            places[id(job.prompt)] = len(prompts)
            prompts.append(job.prompt)
        one: dict[str, Any] = {"id": number, "prompt": places[id(job.prompt)]}
        one |= {"scope": job.scope, "owner": job.owner, "slot": job.slot, "pooling": job.pooling}
        one["lora"] = job.lora
        if job.tiles and id(job.tiles) not in seen:
            seen[id(job.tiles)] = len(tiles)
            tiles.append(job.tiles)
        one["tiles"] = seen.get(id(job.tiles), 0)
        if isinstance(job, Keeping):
            one["keeping"] = [job.action, job.path]
        if isinstance(job, Choice):
            one["request"] = request_record(job.request)
            one["sampling"] = asdict(replace(job.sampling, grammar=None))
            one |= {"seed": job.seed, "number": job.number}
            one |= {"cached": job.cached, "reuse": job.reuse}
        found.append(one)
    return {"prompts": prompts, "jobs": found, "tiles": tiles}


class Wanted(NamedTuple):
    """A job read from `jobs_to_record`; one that is not a choice has no request."""

    id: int
    prompt: list[int]
    scope: str
    owner: Hashable
    slot: int | None
    pooling: str | None
    lora: Sequence[float] | None
    request: Request | None = None
    sampling: Sampling = Sampling()
    seed: int = 0
    number: int = 0
    cached: bool = True
    reuse: int = 0
    keeping: Sequence[str] = ()
    tiles: Sequence[Any] = ()


def jobs_of_record(record: dict[str, Any]) -> list[Wanted]:
    """The jobs in a record of `jobs_to_record`."""
    found = []
    for one in record["jobs"]:
        prompt = record["prompts"][one["prompt"]]
        if "request" in one:
            one["request"] = request_of(one["request"], prompt)
            one["sampling"] = sampling_of(one["sampling"])
        tiles = record["tiles"][one["tiles"]]
        found.append(Wanted(**{**one, "prompt": prompt, "tiles": tiles}))
    return found


def event_to_record(event: Event) -> list[Any]:
    """An event for JSON."""
    if isinstance(event, Embedding):
        data = base64.b64encode(event.vector.astype("<f4").tobytes())
        return ["embedding", data.decode(), event.vector.shape]
    if isinstance(event, ApiError):
        return ["error", event.packed().decode()]
    if isinstance(event, Piece):
        return ["piece", *event._replace(tokens=_tokens_record(event.tokens))]
    if isinstance(event, PromptTokens):
        return ["prompt", _tokens_record(event.tokens)]
    return [_NAMES[type(event)], *event]


def _tokens_record(tokens: Sequence[TokenInfo]) -> list[Any]:
    """Tokens for JSON: bytes as Latin-1."""
    return [
        [
            token.id,
            token.data.decode("latin-1"),
            token.logprob,
            [[top.id, top.data.decode("latin-1"), top.logprob] for top in token.top],
        ]
        for token in tokens
    ]


def _tokens_of(record: Sequence[Any]) -> list[TokenInfo]:
    return [
        TokenInfo(
            int(i),
            data.encode("latin-1"),
            logprob,
            [Likely(int(j), other.encode("latin-1"), p) for j, other, p in top],
        )
        for i, data, logprob, top in record
    ]


def event_of_record(name: str, *values: Any) -> Event:
    """The event in a record of `event_to_record`.

    Raises ValueError, TypeError if it is malformed.
    """
    if name == "piece":
        text, tokens, finish, ids, word, counts = values
        return Piece(str(text), _tokens_of(tokens), finish, tuple(ids), word, Taken(*counts))
    if name == "prompt":
        return PromptTokens(_tokens_of(values[0]))
    if name == "embedding":
        vector = np.frombuffer(base64.b64decode(values[0]), "<f4")
        return Embedding(vector.reshape(values[1]))
    if name == "error":
        return ApiError.unpacked(values[0])
    if name == "kept":
        n_token, n_byte, seconds = values
        return Kept(int(n_token), int(n_byte), float(seconds))
    counts = [int(value) for value in values]
    return Started(*counts) if name == "started" else Progress(*counts)


_NAMES: dict[type, str] = {Started: "started", Progress: "progress", Kept: "kept"}
