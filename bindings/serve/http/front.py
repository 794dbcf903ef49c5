"""The front process: accepts connections, answers /health itself, and hands over all others.

`listen` starts `python -m tamis.bindings.serve.http.front CONFIG`. A thread of the server could not
do this: while a call holds the interpreter's lock, no other thread runs. The server's signal
handlers write to this process without that lock, and it ends a server that does not end itself.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from email.utils import formatdate
from typing import Any, NamedTuple

# The time that the server has after a signal to end: 1.5 s where connections, a model and a helper
# take all of theirs. It must be gone after 2 s, on busy machines too.
END_SECONDS = 1.6
# the time for the first bytes of a request; then the connection is the server's
FIRST_SECONDS = 1.0
PAUSE = 0.02  # seconds between two looks at an incomplete request head
IDLE_SECONDS = 30  # the time for which a connection is kept that has only asked for /health
MOST_HEAD, MOST_KEPT, MOST_WAITING = 4096, 256, 512
HEALTH = ("/health", "/v1/health")
HANDED = b"c"  # a byte sent with each connection
# Requests that the server itself must answer: only it can judge their headers and bodies.
_OTHERS = {b"origin", b"content-length", b"transfer-encoding", b"expect", b"upgrade"}
_BODY = b'{"status":"ok"}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


class Config(NamedTuple):
    """The configuration of the process: descriptors, the server's process id, its names."""

    listeners: list[int]
    control: int  # a socket over which connections are handed over
    signals: int  # the socket that the server's signal handler writes to
    server: int
    hosts: list[str]
    prefix: str = ""  # of the server's paths


class Asked(NamedTuple):
    """A complete request for /health."""

    n_byte: int  # of its head
    has_body: bool  # the reply
    keeps: bool  # the connection


def starts_of(prefix: str) -> tuple[bytes, ...]:
    """The first bytes of requests for /health below a prefix."""
    return tuple(f"{way} {prefix}{path} ".encode() for way in ("GET", "HEAD") for path in HEALTH)


def judge(
    data: bytes, hosts: frozenset[bytes], starts: tuple[bytes, ...] = starts_of("")
) -> Asked | bool:
    """Judge the first bytes of a connection: a plain request for /health, or something else.

    Returns the request; False for any other; True if more bytes may make it one. starts: see
    `starts_of`.
    """
    if not data.startswith(starts):
        return any(start.startswith(data) for start in starts)
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return len(data) < MOST_HEAD
    first, *lines = data[:end].split(b"\r\n")
    method, _, version = first.split(b" ", 2)
    fields = [line.partition(b":")[::2] for line in lines]
    head = {name.lower(): value.strip(b" \t").lower() for name, value in fields}
    named = all(
        name == name.strip() and b":" in line for (name, _), line in zip(fields, lines, strict=True)
    )
    plain = named and len(head) == len(lines) and not _OTHERS & head.keys()
    if not plain or version not in (b"HTTP/1.1", b"HTTP/1.0") or _host(head) not in hosts:
        return False
    how = head.get(b"connection", b"")
    keeps = how != b"close" if version == b"HTTP/1.1" else how == b"keep-alive"
    return Asked(end + 4, method == b"GET", keeps)


def _host(head: dict[bytes, bytes]) -> bytes:
    value = head.get(b"host", b"")
    name = value.rsplit(b":", 1)[0] if value.count(b":") == 1 or b"]:" in value else value
    return name.strip(b"[]")


def reply(asked: Asked) -> bytes:
    """The bytes of the reply to a request for /health."""
    end = b"" if asked.keeps else b"connection: close\r\n"
    return (
        b"HTTP/1.1 200 OK\r\ndate: %s\r\ncontent-length: %d\r\ncontent-type: application/json\r\n"
        b"x-content-type-options: nosniff\r\ncache-control: no-store\r\n"
        b"referrer-policy: no-referrer\r\n%s\r\n%s"
    ) % (formatdate(usegmt=True).encode(), len(_BODY), end, _BODY if asked.has_body else b"")


class Front:
    """The connections that have not been handed over."""

    def __init__(self, config: Config) -> None:
        self._server = config.server
        self._hosts = frozenset(name.encode() for name in config.hosts)
        self._starts = starts_of(config.prefix)
        self._listeners = [socket.socket(fileno=number) for number in config.listeners]
        self._control = socket.socket(fileno=config.control)
        self._signals = socket.socket(fileno=config.signals)
        self._select = selectors.DefaultSelector()
        # When each connection's time ends: it is handed over, or closed if it has been answered.
        self._ends: dict[socket.socket, float] = {}
        self._answered: set[socket.socket] = set()
        self._half: deque[socket.socket] = deque()  # connections with an incomplete request head
        self._handed: deque[socket.socket] = deque()  # connections for which the server had no room
        self._end: float | None = None  # of the server
        self._paused = 0.0  # until then the process does not look for free descriptors

    def run(self) -> None:
        """Serve until the server closes its socket."""
        for each in (*self._listeners, self._control, self._signals):
            each.setblocking(False)
            self._select.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in self._select.select(self._timeout()):
                found: Any = key.fileobj
                if found is self._control:
                    if not self._alive():
                        return
                elif found is self._signals:
                    self._signalled()
                elif found in self._listeners:
                    self._accept(found)
                elif found in self._ends:
                    self._look(found)
            self._tick()

    def _timeout(self) -> float:
        if self._half or self._handed or self._paused > time.monotonic():
            return PAUSE
        if self._end is not None:
            return min(0.1, max(0.0, self._end - time.monotonic()))
        return 0.1 if self._ends else 60

    def _alive(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            try:
                return bool(self._control.recv(64))
            except ConnectionError:
                return False
        return True

    def _signalled(self) -> None:
        """Stop accepting: the server has received a signal to end."""
        data = b""
        with contextlib.suppress(OSError):
            data = self._signals.recv(64)
        if not data:
            self._select.unregister(self._signals)
        if self._end is None and any(n in (signal.SIGINT, signal.SIGTERM) for n in data):
            self._end = time.monotonic() + END_SECONDS
            for listener in self._listeners:
                self._select.unregister(listener)
            self._listeners.clear()
            for connection in list(self._ends):
                self._close(connection)

    def _accept(self, listener: socket.socket) -> None:
        if self._paused > time.monotonic():
            return
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors, or the client has disconnected
            self._paused = time.monotonic() + PAUSE
            self._give_way()
            return
        connection.setblocking(False)
        self._ends[connection] = time.monotonic() + FIRST_SECONDS
        self._select.register(connection, selectors.EVENT_READ)
        self._look(connection)
        if len(self._ends) > MOST_KEPT:
            self._give_way()

    def _give_way(self) -> None:
        """Close the oldest connection."""
        for connection in self._ends:
            if connection in self._answered:
                self._close(connection)
            else:
                self._hand(connection)
            return

    def _look(self, connection: socket.socket) -> None:
        """Read a connection's first bytes, then answer, hand it over, or wait for more."""
        try:
            data = connection.recv(MOST_HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        found = judge(data, self._hosts, self._starts)
        if isinstance(found, Asked):
            self._answer(connection, found)
        elif not found:
            self._hand(connection)
        elif connection not in self._half:  # its unread bytes would wake this process again at once
            if connection in self._answered:
                self._answered.discard(connection)
                self._ends[connection] = time.monotonic() + FIRST_SECONDS
            self._unwatch(connection)
            self._half.append(connection)

    def _answer(self, connection: socket.socket, asked: Asked) -> None:
        try:
            connection.recv(asked.n_byte)
            sent = connection.send(data := reply(asked))
        except OSError:
            self._close(connection)
            return
        if not asked.keeps or sent < len(data):
            self._close(connection)
            return
        self._ends.pop(connection)  # the oldest is handed over first
        self._ends[connection] = time.monotonic() + IDLE_SECONDS
        self._answered.add(connection)
        if connection in self._half:
            self._half.remove(connection)
            self._select.register(connection, selectors.EVENT_READ)

    def _tick(self) -> None:
        """Do what is due by the clock."""
        now = time.monotonic()
        if self._end is not None and now >= self._end and os.getppid() == self._server:
            os.kill(self._server, signal.SIGKILL)
        for connection in list(self._half):
            self._look(connection)
        for connection in [c for c, end in self._ends.items() if end < now]:
            if connection in self._answered:
                self._close(connection)
            else:
                self._hand(connection)
        while self._handed and self._sent(self._handed[0]):
            self._handed.popleft()

    def _hand(self, connection: socket.socket) -> None:
        """Hand a connection over, now or when the server has room; too many are refused."""
        self._remove(connection)
        if len(self._handed) >= MOST_WAITING:
            with contextlib.suppress(OSError):
                connection.send(FULL)
            connection.close()
        elif self._handed or not self._sent(connection):
            self._handed.append(connection)

    def _sent(self, connection: socket.socket) -> bool:
        try:
            socket.send_fds(self._control, [HANDED], [connection.fileno()])
        except ConnectionError:
            pass  # the server has ended
        except OSError:  # no room, or too many descriptors in flight
            return False
        connection.close()
        return True

    def _close(self, connection: socket.socket) -> None:
        self._remove(connection)
        connection.close()

    def _remove(self, connection: socket.socket) -> None:
        self._ends.pop(connection, None)
        self._answered.discard(connection)
        if connection in self._half:
            self._half.remove(connection)
        self._unwatch(connection)

    def _unwatch(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._select.unregister(connection)


def main() -> int:
    """Run until the server closes its socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ends this process
        signal.signal(number, signal.SIG_IGN)
    Front(Config(**json.loads(sys.argv[1]))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
