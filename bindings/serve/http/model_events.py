"""Events of a router's models, told to all clients of /models/sse, as llama-server tells them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from tamis.bindings.serve.replies import as_json

MOST_WAITING = 1024  # events; a client that reads slower than that is sent no more
SECONDS_BETWEEN = 15.0  # after so long without an event a client gets a comment


class ModelEvents:
    """The clients that listen, each with the events that it was not yet sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[asyncio.Queue[str | None], asyncio.AbstractEventLoop] = {}
        self._ended = False

    @property
    def n_client(self) -> int:
        """The number of clients that listen."""
        return len(self._clients)

    def tell(self, event: str, model: str, data: Any = None) -> None:
        """Send an event of a model to all clients; may be called from any thread.

        data: what JSON can encode; None: the event has none.
        """
        line = {"model": model, "event": event} | ({} if data is None else {"data": data})
        self._put(f"data: {as_json(line)}\n\n")

    def end(self) -> None:
        """End the streams of all clients."""
        self._ended = True
        self._put(None)

    def _put(self, line: str | None) -> None:
        with self._lock:
            for queue, loop in self._clients.items():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_put_last, queue, line)

    def stream(self) -> AsyncIterator[str]:
        """The lines of server-sent events for one client, who listens from now on."""
        queue = asyncio.Queue[str | None](MOST_WAITING)
        with self._lock:
            self._clients[queue] = asyncio.get_running_loop()
        return self._lines(queue)

    async def _lines(self, queue: "asyncio.Queue[str | None]") -> AsyncIterator[str]:
        try:
            while not self._ended:
                try:
                    line = await asyncio.wait_for(queue.get(), SECONDS_BETWEEN)
                except TimeoutError:
                    line = ":\n\n"  # finds out whether the client is still there
                if line is None:
                    return
                yield line
        finally:
            with self._lock:
                self._clients.pop(queue, None)


def _put_last(queue: "asyncio.Queue[str | None]", line: str | None) -> None:
    """Put a line, and in place of one that has no room the end of the stream."""
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
        line = None
    queue.put_nowait(line)
