"""From events of jobs to replies: one object, or the chunks of a stream."""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tamis.bindings.drop_in import chat, completion
from tamis.bindings.drop_in.completion import Chunk, Piece
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.tasks import Task
from tamis.bindings.serve.worker import Completion, Emit, Event, Progress


class Mailbox:
    """Carries events from the worker's thread into the loop, waking it once for all there are."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Queue[tuple[int, Event]], tuple[int, Event]]] = deque()
        self._waking = False
        self._readers: weakref.WeakSet[Events] = weakref.WeakSet()

    def add(self, reader: "Events") -> None:
        """Have a reader end with `end_all`."""
        self._readers.add(reader)

    def end_all(self, error: ApiError) -> None:
        """End all replies; in the loop."""
        for reader in list(self._readers):
            reader.end(error)

    def post(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: asyncio.Queue[tuple[int, Event]],
        item: tuple[int, Event],
    ) -> None:
        """Put the item into the loop's queue, from any thread."""
        self._waiting.append((queue, item))
        if not self._waking:
            self._waking = True
            # The loop may have ended before the worker: nobody listens then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._waking = False  # first: what is posted from now on wakes the loop again
        while self._waiting:
            queue, item = self._waiting.popleft()
            queue.put_nowait(item)


class Events:
    """What the jobs of one request send, in order, with the number of the job."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._loop, self._mailbox = asyncio.get_running_loop(), mailbox
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        mailbox.add(self)

    def end(self, error: ApiError) -> None:
        """Let the reader find an error where it finds nothing else; in the loop."""
        self._queue.put_nowait((0, error))

    def emitter(self, i: int) -> Emit:
        """What job i is given to send with, from the worker's thread."""

        def emit(event: Event) -> None:
            self._mailbox.post(self._loop, self._queue, (i, event))

        return emit

    async def next(self) -> tuple[int, Event]:
        """The next event. Raises ApiError where it is one."""
        i, event = await self._queue.get()
        if isinstance(event, ApiError):
            raise event
        return i, event


async def whole(task: Task, jobs: Sequence[Completion], events: Events) -> Chunk:
    """The reply to a request that is no stream. Raises ApiError."""
    found: list[list[Piece]] = [[] for _ in jobs]
    left = len(jobs)
    while left:
        i, event = await events.next()
        if isinstance(event, Piece):
            found[i].append(event)
            left -= event.finish is not None
    reply: Chunk = {}
    for i, pieces in enumerate(found):
        one = _whole_choice(task, jobs[i], pieces)
        one["choices"][0]["index"] = i
        if reply:
            reply["choices"] += one["choices"]
        else:
            reply = one
    return reply | {"usage": usage(task, jobs)}


def _whole_choice(task: Task, job: Completion, pieces: list[Piece]) -> Chunk:
    one = completion.whole(job.request, pieces, job.n_answer)
    return one if task.wanted is None else task.wanted.answer(one)


async def chunks(task: Task, jobs: Sequence[Completion], events: Events) -> AsyncIterator[Chunk]:
    """The chunks of a stream. Raises ApiError."""
    streams = [_Stream(task, job) for job in jobs]
    for i, stream in enumerate(streams):
        for chunk in stream.begin():
            yield _indexed(chunk, i, task)
    left = len(jobs)
    while left:
        i, event = await events.next()
        if isinstance(event, Progress) and task.progress:
            yield _progress(jobs[i], event, chat=task.wanted is not None)
        if isinstance(event, Piece):
            for chunk in streams[i].of(event):
                yield _indexed(chunk, i, task)
            left -= event.finish is not None
    if task.include_usage:
        last = _indexed(streams[0].empty(), 0, task)
        yield last | {"choices": [], "usage": usage(task, jobs)}


class _Stream:
    """One choice of a stream. With tools an answer is shown once it is whole: it may be a call."""

    def __init__(self, task: Task, job: Completion) -> None:
        self._task, self._job = task, job
        self._text = completion.Chunks(job.request)
        self._chat = chat.Chunks()
        self._pieces: list[Piece] = []

    def begin(self) -> list[Chunk]:
        return self._text.begin()

    def of(self, piece: Piece) -> list[Chunk]:
        wanted = self._task.wanted
        if wanted is not None and wanted.tools:
            self._pieces.append(piece)
            if piece.finish is None:
                return []
            done = _whole_choice(self._task, self._job, self._pieces)
            return list(chat.chunks_of_whole(done))
        found = self._text.of(piece)
        return found if wanted is None else [each for one in found for each in self._chat.of(one)]

    def empty(self) -> Chunk:
        one = self._text.of(Piece("", [], "stop"))[0]
        return one if self._task.wanted is None else self._chat.of(one)[-1]


def _indexed(chunk: Chunk, i: int, task: Task) -> Chunk:
    for choice in chunk["choices"]:
        choice["index"] = i
    return chunk | {"usage": None} if task.include_usage else chunk


def _progress(job: Completion, event: Progress, *, chat: bool) -> Chunk:
    """How far the prompt is: llama.cpp's field, in a chunk without choices."""
    r = job.request
    return {
        "id": ("chat" if chat else "") + r.id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": r.created,
        "model": r.model,
        "choices": [],
        "prompt_progress": {
            "total": event.total,
            "cache": event.cached,
            "processed": event.done,
        },
    }


def usage(task: Task, jobs: Sequence[Completion]) -> dict[str, Any]:
    """Tokens of all choices; a prompt counts once."""
    n_answer = sum(job.n_answer for job in jobs)
    return {
        "prompt_tokens": task.prompt_tokens,
        "completion_tokens": n_answer,
        "total_tokens": task.prompt_tokens + n_answer,
        "prompt_tokens_details": {"cached_tokens": jobs[0].n_cached},
    }
