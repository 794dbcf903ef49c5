"""Replies made of the events of jobs, in the form of each API."""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from tamis.bindings.drop_in.chat import ChatFormat
from tamis.bindings.drop_in.completion import Counts, Piece, TokenInfo
from tamis.bindings.serve.errors import ApiError, ended, unread
from tamis.bindings.serve.jobs import Again, Emit, Event, Progress, PromptTokens, Started
from tamis.bindings.serve.json_text import in_parts
from tamis.bindings.serve.tasks import Task

MOST_UNREAD = 1 << 16  # events of a stream that may wait until its client reads
QUIET = 10.0  # the longest silence of a stream, for example while a long prompt is read


class Mailbox:
    """Carries events from another thread to the loop, and wakes it once for all of them."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Queue[tuple[int, Event]], tuple[int, Event]]] = deque()
        self._waking = False

    def post(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: asyncio.Queue[tuple[int, Event]],
        item: tuple[int, Event],
    ) -> None:
        """Put the item into the loop's queue; callable from any thread."""
        self._waiting.append((queue, item))
        if not self._waking:
            self._waking = True
            # The loop may have ended before the worker: nothing reads the event then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._waking = False  # first: an item posted from now on wakes the loop again
        while self._waiting:
            queue, item = self._waiting.popleft()
            queue.put_nowait(item)


class Events:
    """The events of one request's jobs, in order, each with the number of the job."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._loop, self._mailbox = asyncio.get_running_loop(), mailbox
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._given: set[int] = set()  # jobs whose answers have been sent in part

    def emitter(self, i: int) -> Emit:
        """The Emit of job i, which is called from the supervisor's thread."""

        def emit(event: Event) -> None:
            self._mailbox.post(self._loop, self._queue, (i, event))

        return emit

    @property
    def n_waiting(self) -> int:
        """The number of events that have arrived and `next` has not returned."""
        return self._queue.qsize()

    async def next(self, *, again: bool = False) -> tuple[int, Event]:
        """The next event. Raises ApiError if it is one.

        again: return the Again of a job that restarts; otherwise it is an error if a part of the
        answer has been sent.
        """
        while True:
            i, event = await self._queue.get()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Piece):
                self._given.add(i)
            if isinstance(event, Again) and not again:
                if i in self._given:
                    raise ended("has ended")
                continue
            return i, event


class About(NamedTuple):
    """Facts of the server that replies contain."""

    model: str
    fingerprint: str
    n_ctx: int
    format: Callable[[], ChatFormat]


def as_json(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Reply:
    """The form of the answers to one request: a single object, or the events of a stream."""

    media: ClassVar[str] = "text/event-stream"
    closing: ClassVar[str] = "data: [DONE]\n\n"

    def __init__(self, task: Task, about: About) -> None:
        self.task, self.about = task, about
        self.counts = [Counts() for _ in task.requests]
        self.slots = [-1] * len(task.requests)  # the slots in which the answers are generated
        self._since = time.monotonic()  # when the last one of them began
        self.prompt: list[list[TokenInfo]] = [[] for _ in task.requests]

    def begin(self) -> Iterable[Any]:
        """The events that open a stream."""
        return ()

    def started(self, i: int, event: Started) -> None:
        """Record that choice i has a slot."""
        self.slots[i], self._since = event.slot, time.monotonic()

    def progress(self, i: int, event: Progress) -> Iterable[Any]:
        """The events of the prompt's progress, for choice i."""
        return ()

    def progress_of(self, event: Progress) -> dict[str, Any]:
        """The prompt's progress in llama.cpp's field; with times if the request asks for them."""
        found = {"total": event.total, "cache": event.cached, "processed": event.done}
        if not self.task.timings:
            return {"prompt_progress": found}
        n_read = event.done - event.cached
        seconds = time.monotonic() - self._since if n_read else 0.0
        times = timings(Counts(event.cached, n_read, 0, seconds))
        return {"prompt_progress": found, "timings": times}

    def piece(self, i: int, piece: Piece) -> Iterable[Any]:
        """The events of a piece, for choice i."""
        raise NotImplementedError

    def end(self) -> Iterable[Any]:
        """The events that close a stream."""
        return ()

    def whole(self, found: list[list[Piece]]) -> Any:
        """The reply without a stream; found: the pieces of each choice."""
        raise NotImplementedError

    def frame(self, event: Any, write: Callable[[Any], str] = as_json) -> str:
        """An event as text; write: encodes JSON."""
        return f"data: {write(event)}\n\n"

    def alive(self) -> str:
        """Text that shows during a long silence that the server works: a comment."""
        return ": still here\n\n"

    def error(self, error: ApiError, path: str) -> str:
        """The text that ends a stream which has failed."""
        return self.frame(error.body_for(path))

    @property
    def total(self) -> Counts:
        """The counters of all choices: sums of tokens, and times of the first choice."""
        first, n = self.counts[0], sum(c.n_answer for c in self.counts)
        return first._replace(n_answer=n)


async def whole(reply: Reply, events: Events) -> list[list[Piece]]:
    """The pieces of a request without a stream, for `reply.whole`. Raises ApiError."""
    found: list[list[Piece]] = [[] for _ in reply.counts]
    left = len(found)
    while left:
        i, event = await events.next(again=True)
        if isinstance(event, Again):
            found[i].clear()
            reply.prompt[i].clear()
        if isinstance(event, Started):
            reply.started(i, event)
        if isinstance(event, PromptTokens):
            reply.prompt[i] += event.tokens
        if isinstance(event, Piece):
            found[i].append(event)
            reply.counts[i] = event.counts
            left -= event.finish is not None
    return found


async def stream(reply: Reply, events: Events, path: str) -> AsyncIterator[str]:
    """Yield the text of a stream."""
    try:
        for event in reply.begin():
            yield reply.frame(event)
        left, told = len(reply.counts), time.monotonic()
        while left:
            try:
                async with asyncio.timeout(max(0.0, told + QUIET - time.monotonic())):
                    i, found = await events.next()
            except TimeoutError:
                told = time.monotonic()
                yield reply.alive()
                continue
            if events.n_waiting > MOST_UNREAD:
                raise unread(events.n_waiting)
            parts: Iterable[Any] = ()
            if isinstance(found, PromptTokens):
                reply.prompt[i] += found.tokens
            elif isinstance(found, Started):
                reply.started(i, found)
                n_prompt = len(reply.task.requests[i].prompt)
                parts = reply.progress(i, Progress(found.cached, n_prompt, found.cached))
            elif isinstance(found, Progress):
                parts = reply.progress(i, found)
            elif isinstance(found, Piece):
                reply.counts[i] = found.counts
                left -= found.finish is not None
                if reply.prompt[i]:
                    told = time.monotonic()
                    for text in await asyncio.to_thread(_with_prompt, reply, i, found):
                        yield text
                else:
                    parts = reply.piece(i, found)
            for part in parts:
                told = time.monotonic()
                yield reply.frame(part)
        for event in reply.end():
            yield reply.frame(event)
        yield reply.closing
    except ApiError as error:
        yield reply.error(error, path)


def _with_prompt(reply: Reply, i: int, piece: Piece) -> list[str]:
    """The events of choice i's first piece, if the prompt's tokens are in them.

    It runs in a thread: an event may have a hundred thousand tokens, each with its likeliest
    others.
    """
    found = [
        reply.frame(part, lambda part: in_parts(part).decode()) for part in reply.piece(i, piece)
    ]
    reply.prompt[i].clear()
    return found


def timings(counts: Counts) -> dict[str, Any]:
    """Tokens and milliseconds, as llama.cpp's server tells them.

    Rates are of steps: an answer's first token comes of the prompt's logits and costs none. What
    has taken no step, or no time yet, has rate 0. With the attention that steps retained, where
    that was estimated.
    """
    c = counts

    def rates(name: str, n: int, n_step: int, seconds: float) -> dict[str, Any]:
        ms = 1000 * seconds
        return {
            f"{name}_n": n,
            f"{name}_ms": ms,
            f"{name}_per_token_ms": ms / n_step if n_step else 0.0,
            f"{name}_per_second": 1000 * n_step / ms if ms else 0.0,
        }

    return {
        "cache_n": c.n_cached,
        **rates("prompt", c.n_read, c.n_read, c.read_seconds),
        **rates("predicted", c.n_answer, max(c.n_answer - 1, 0), c.answer_seconds),
        **({"draft_n": c.n_drafted, "draft_n_accepted": c.n_accepted} if c.n_drafted else {}),
        **c.attention(),
    }
