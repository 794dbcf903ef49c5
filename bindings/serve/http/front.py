"""The process in front: it takes connections, answers /health itself, and hands all others on.

`python -m tamis.bindings.serve.http.front CONFIG` is started by `listen`. A thread of the server
could not do so: while one call holds the interpreter's lock, no other thread runs. The server's
signal handlers write to this process without that lock: it ends a server that does not end itself.
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

END_SECONDS = 1.8  # after a signal, for the server to end
FIRST_SECONDS = 1.0  # for the first bytes of a request; then the server sees to the rest
PAUSE = 0.02  # seconds between two looks at a head that has not come whole
IDLE_SECONDS = 30  # that a connection is kept which has asked for /health only
MOST_HEAD, MOST_KEPT, MOST_WAITING = 4096, 256, 512
HEALTH = ("/health", "/v1/health")
HANDED = b"c"  # goes with a connection
_STARTS = tuple(f"{method} {path} ".encode() for method in ("GET", "HEAD") for path in HEALTH)
# What the server itself is to answer: it knows pages, proxies, and bodies.
_OTHERS = {b"origin", b"content-length", b"transfer-encoding", b"expect", b"upgrade"}
_BODY = b'{"status":"ok"}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


class Config(NamedTuple):
    """What the process is started with: descriptors, the server's process, its names."""

    listeners: list[int]
    control: int  # a socket for connections
    signals: int  # a socket that the server's signal handler writes to
    server: int
    hosts: list[str]


class Asked(NamedTuple):
    """A request for /health that has come whole."""

    n_byte: int  # of its head
    has_body: bool  # the reply
    keeps: bool  # the connection


def judge(data: bytes, hosts: frozenset[bytes]) -> Asked | bool:
    """A plain request for /health; False for another one, True where more bytes may make it one."""
    if not data.startswith(_STARTS):
        return any(start.startswith(data) for start in _STARTS)
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
    """The bytes that a request for /health is answered with."""
    end = b"" if asked.keeps else b"connection: close\r\n"
    return (
        b"HTTP/1.1 200 OK\r\ndate: %s\r\ncontent-length: %d\r\ncontent-type: application/json\r\n"
        b"x-content-type-options: nosniff\r\ncache-control: no-store\r\n"
        b"referrer-policy: no-referrer\r\n%s\r\n%s"
    ) % (formatdate(usegmt=True).encode(), len(_BODY), end, _BODY if asked.has_body else b"")


class Front:
    """The connections that have not been handed on."""

    def __init__(self, config: Config) -> None:
        self._server = config.server
        self._hosts = frozenset(name.encode() for name in config.hosts)
        self._listeners = [socket.socket(fileno=number) for number in config.listeners]
        self._control = socket.socket(fileno=config.control)
        self._signals = socket.socket(fileno=config.signals)
        self._select = selectors.DefaultSelector()
        # Each connection's end: when it is handed on or, where it has been answered, closed.
        self._ends: dict[socket.socket, float] = {}
        self._answered: set[socket.socket] = set()
        self._half: deque[socket.socket] = deque()  # whose heads have not come whole
        self._handed: deque[socket.socket] = deque()  # for which the server has had no room
        self._end: float | None = None  # of the server
        self._paused = 0.0  # until then no descriptors are asked for

    def run(self) -> None:
        """Until the server goes."""
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
        return 0.1 if self._ends or self._end is not None else 60

    def _alive(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            try:
                return bool(self._control.recv(64))
            except ConnectionError:
                return False
        return True

    def _signalled(self) -> None:
        """The server has been told to end: no connection is taken any more."""
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
        except OSError:  # no descriptors, or a client that has gone already
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
        """Be rid of the oldest connection."""
        for connection in self._ends:
            if connection in self._answered:
                self._close(connection)
            else:
                self._hand(connection)
            return

    def _look(self, connection: socket.socket) -> None:
        """Answer, hand on, or wait for more."""
        try:
            data = connection.recv(MOST_HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        found = judge(data, self._hosts)
        if isinstance(found, Asked):
            self._answer(connection, found)
        elif not found:
            self._hand(connection)
        elif connection not in self._half:  # what has come would wake this process at once again
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
        self._ends.pop(connection)  # the oldest comes first
        self._ends[connection] = time.monotonic() + IDLE_SECONDS
        self._answered.add(connection)
        if connection in self._half:
            self._half.remove(connection)
            self._select.register(connection, selectors.EVENT_READ)

    def _tick(self) -> None:
        """What is due by the clock."""
        now = time.monotonic()
        if self._end is not None and now > self._end and os.getppid() == self._server:
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
        """Hand a connection on, now or where the server has room; too many are refused."""
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
            pass  # the server has gone
        except OSError:  # no room, or too many descriptors are under way
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
    """Run until the server goes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ends this process
        signal.signal(number, signal.SIG_IGN)
    Front(Config(**json.loads(sys.argv[1]))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
