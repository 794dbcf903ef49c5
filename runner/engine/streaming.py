"""Generation for `async for`: its steps run in a thread, and end when the caller does."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Progress = Callable[[int, int], None]  # tokens of a prompt that were read, and all


class _Ended(Exception):
    """The caller has gone: ends the reading of a prompt, which leaves the session as it was."""


async def stream(make: Callable[[Progress], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
    """Yield the pieces of a generation, make(progress), whose steps run in a thread of their own.

    If the caller is cancelled or closes the stream, the step in progress is the last one, and
    the generation is closed when this returns, so that the session can be used again. The reading
    of a prompt ends with its chunk and leaves the session as it was.
    """
    loop, ended, last = asyncio.get_running_loop(), threading.Event(), object()

    def progress(done: int, total: int) -> None:
        if ended.is_set() and done < total:
            raise _Ended

    pieces = make(progress)
    thread = ThreadPoolExecutor(1, "tamis-stream")
    try:
        while True:
            piece: Any = await loop.run_in_executor(thread, next, pieces, last)
            if piece is last:
                return
            yield piece
    finally:
        ended.set()
        try:
            await _finished(loop.run_in_executor(thread, pieces.close))
        finally:
            thread.shutdown()


async def _finished(future: "asyncio.Future[None]") -> None:
    """Wait for a future to its end, however often the caller is cancelled meanwhile."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    future.result()
    if cancelled is not None:
        raise cancelled
