"""The server's side of `helper`: costly requests are prepared in processes of their own.

The helper is started with the first such request. If one of its processes crashes, or takes too
much time or memory, only one client gets an error.
"""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Hashable
from dataclasses import dataclass

from tamis.bindings.serve.errors import (
    ApiError,
    busy,
    costly,
    costly_grammar,
    crashed,
    no_helper,
    stopping,
)
from tamis.bindings.serve.fair_semaphore import FairSemaphore
from tamis.bindings.serve.wire import GRAMMAR_SECONDS, HEADER, Broken, Config, Frames, Kind
from tamis.platform.processes import child_environment

AT_ONCE = 2  # the number of requests that are prepared at once
SIGXCPU = 24
# A body that contains one of these words may need a grammar.
_GRAMMARS = tuple(
    f'"{name}"'.encode()
    for name in (
        "format",
        "function_call",
        "grammar",
        "json_schema",
        "response_format",
        "tool_choice",
    )
)


class Follower:
    """The process that follows the grammar of a request, until `close`."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def follow(self) -> socket.socket:
        """A socket from which the masks of all choices are read, from their first token.

        Raises OSError.
        """
        ours, theirs = socket.socketpair()
        # Once the process has ended, the socket only reports its end.
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._channel, [b"m"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the process."""
        self._channel.close()


@dataclass
class Prepared:
    """A prepared request: its JSON, and the process that follows its grammar."""

    result: bytes
    masks: Follower


class Helpers:
    """Prepares requests, a few at a time, fairly among clients. To be used from one event loop."""

    def __init__(self, config: Config, seconds: float, n_queue: int) -> None:
        self._config, self._seconds, self._n_queue = config, seconds, n_queue
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._slots = FairSemaphore(AT_ONCE)
        self._closed = False

    async def prepare(self, name: str, body: bytes, owner: Hashable) -> Prepared:
        """Have the helper prepare a body. Raises ApiError; cancelling the call ends the process."""
        if self._slots.n_waiting >= self._n_queue:
            raise busy(self._slots.n_waiting)
        try:
            async with asyncio.timeout(self._seconds):
                await self._slots.acquire(owner)
        except TimeoutError:
            raise busy(self._slots.n_waiting) from None
        channel: socket.socket | None = None
        try:
            channel = self._channel(grammar=any(word in body for word in _GRAMMARS))
            async with asyncio.timeout(self._seconds):
                prepared = await self._ask(channel, name.encode() + b"\n", body)
            channel = None
            return prepared
        except TimeoutError:
            raise costly(self._seconds) from None
        finally:
            if channel is not None:
                channel.close()
            self._slots.release(owner)

    def close(self) -> None:
        """End the helper and its processes."""
        self._closed = True
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)  # it ends its child processes
        self._drop()

    def _channel(self, *, grammar: bool) -> socket.socket:
        """A socket whose other end belongs to a process of the helper. Raises ApiError."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise no_helper(str(error)) from None
        ours.setblocking(False)
        with theirs:
            for _ in range(2):  # a helper that has ended is started once more
                try:
                    socket.send_fds(self._started(), [b"g" if grammar else b"p"], [theirs.fileno()])
                    return ours
                except OSError:
                    self._drop()
        ours.close()
        raise no_helper("the helper process cannot be reached")

    def _started(self) -> socket.socket:
        if self._closed:
            raise stopping()
        if self._process is not None and self._process.poll() is not None:
            self._drop()
        if self._control is None:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-P", "-m", "tamis.bindings.serve.http.helper"]
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *command,
                        str(theirs.fileno()),
                        json.dumps(self._config._asdict() | {"usual": dict(self._config.usual)}),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env=child_environment({}),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C must reach the server only
                )
            self._control = ours
        return self._control

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    async def _ask(self, channel: socket.socket, name: bytes, body: bytes) -> Prepared:
        loop, frames = asyncio.get_running_loop(), Frames()
        too_long = costly(self._config.seconds)  # the error if its processor time is used up
        with contextlib.suppress(OSError):  # it may have ended: its last frame says how
            head = HEADER.pack(Kind.REQUEST, len(name) + len(body)) + name
            await loop.sock_sendall(channel, head)
            await loop.sock_sendall(channel, body)  # large: not copied
        while True:
            found = self._next(frames)
            if found is None:
                try:
                    data = await loop.sock_recv(channel, 1 << 20)
                except OSError:
                    data = b""
                if not data:
                    raise stopping() if self._closed else no_helper("its process has ended")
                frames.feed(data)
                continue
            kind, data = found
            if kind is Kind.COMPILING:
                too_long = costly_grammar(min(GRAMMAR_SECONDS, self._config.seconds))
                continue
            if kind is Kind.RESULT:
                return Prepared(data, Follower(channel))
            raise self._error(kind, data, too_long)

    @staticmethod
    def _next(frames: Frames) -> tuple[Kind, bytes] | None:
        try:
            return frames.next()
        except Broken:
            raise no_helper("its process has sent what is no answer") from None

    def _error(self, kind: Kind, data: bytes, too_long: ApiError) -> ApiError:
        if kind is Kind.ERROR:
            return ApiError.unpacked(data)
        number = data[0] if kind is Kind.ENDED and data else 0
        if self._closed:
            return stopping()
        if number == SIGXCPU:
            return too_long
        return crashed(number) if number else no_helper("its process has ended")
