"""The sockets and signals of an application: uvicorn's HTTP, with limits on connections."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tamis.bindings.serve.http import front
from tamis.bindings.serve.http.guard import LOCAL, Log
from tamis.bindings.serve.models import Served
from tamis.platform.limits import most_open_files
from tamis.platform.processes import child_environment

IDLE_SECONDS = 30  # the time for which a connection without a request is kept
GRACE = 1  # seconds after a signal within which connections must end
BACKLOG = 512
RESERVED = 128  # descriptors reserved for everything but connections; a connection may need two
MOST_HEAD = 64 << 10  # bytes of a request's head
# the chunks that a body may have: so many, and one more for each so many bytes
FREE_CHUNKS, CHUNK_BYTES = 1000, 256
# without descriptors: seconds between attempts, and between log lines
RETRY_SECONDS, LOG_SECONDS = 0.25, 60
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True)
class Connections:
    """Limits on connections: their number, and the time that each may take."""

    total: int = 512
    per_address: int = 256
    # for the head of a request, from its first byte or the start of the connection
    header_seconds: float = 10
    stall_seconds: float = 60  # the time for which a client may leave sent bytes unread


@dataclass(frozen=True)
class Address:
    """How a server is reached beside its hosts and port."""

    names: Sequence[str] = LOCAL  # host names of the server
    tls: ssl.SSLContext | None = None  # certificate and key of all addresses but Unix sockets
    prefix: str = ""  # of the paths that the server answers


def serve(
    server: Served,
    host: str,
    port: int,
    *,
    connections: Connections,
    ready: Callable[[str], None],
    log: Log,
    address: Address = Address(),
) -> None:
    """Serve until a signal arrives; replies in progress then end with an error within 2 seconds.

    host: one address, or several with commas between, which share the port; or paths of Unix
    sockets (see `is_path`), which only this user may use. ready(url) is called once connections are
    accepted; url is that of the first address. To be called in the main thread; even if the loop is
    blocked, the process ends within 2 seconds of a signal. Raises OSError if an address is in use.
    """
    with contextlib.ExitStack() as open_ones:
        listeners: list[socket.socket] = []
        for each in hosts_of(host):
            if is_path(each):
                listeners.append(open_ones.enter_context(_unix_listener(Path(each))))
                continue
            listeners.append(open_ones.enter_context(_listener(each, port)))
            port = listeners[-1].getsockname()[1]
        tls = address.tls
        url = _url(hosts_of(host)[0], port, address.prefix, "http" if tls is None else "https")
        config = uvicorn.Config(
            server.app,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            # anyone could forge these headers: addresses are those of connections
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=GRACE,
        )
        taken = FrontProcess(address.names if tls is None else (), address.prefix)
        inner = _Uvicorn(config, _Gate(connections, log), taken, tls)
        try:
            with _signalled(inner, server) as begun:
                try:
                    asyncio.run(_until_signal(inner, listeners, begun, lambda: ready(url)))
                finally:
                    server.stop()
                    server.close()
        finally:
            inner.front.close()  # last: until then it ends a server that does not end by itself


def hosts_of(text: str) -> list[str]:
    """The addresses of an argument: one, or several with commas between."""
    return [host.strip() for host in text.split(",")]


def is_path(host: str) -> bool:
    """Whether an address is the path of a Unix socket: it has a slash, or ends with .sock."""
    return "/" in host or host.endswith(".sock")


def _url(host: str, port: int, prefix: str, scheme: str) -> str:
    if is_path(host):
        return f"the socket {host}"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{prefix}"


@contextlib.contextmanager
def _unix_listener(path: Path) -> Iterator[socket.socket]:
    """A Unix socket that only this user may connect to; its file is removed at the end.

    A socket's file that no process listens on, as a crash leaves it, is replaced. Raises OSError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        _remove_unused(path)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from None
        finally:
            os.umask(before)
        own = path.stat()
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(path.stat(), own):
                    path.unlink()


def _remove_unused(path: Path) -> None:
    """Remove a socket's file that no process listens on."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # bind says that the address is in use
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.connect(str(path))
    except ConnectionRefusedError:
        path.unlink()
    except OSError:
        return


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        text = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            text = "the port is in use: stop that server, or take another with --port (0: any free)"
        raise OSError(error.errno, text, f"{host}:{port}") from None
    listener.setblocking(False)
    return listener


class _Gate:
    """The open connections. At the limit, idle ones are closed, oldest first."""

    def __init__(self, limits: Connections, log: Log) -> None:
        self.limits, self._log = limits, log
        soft = most_open_files()
        self._total = min(limits.total, max(8, (soft - RESERVED) // 2))
        if self._total < limits.total:
            log(f"{soft} descriptors are allowed: at most {self._total} connections at once")
        self._open: dict[_Connection | _Handshake, str] = {}
        self._by_address: Counter[str] = Counter()
        self._logged = -float(LOG_SECONDS)

    def admits(self, address: str) -> bool:
        """Whether one more connection may be accepted; closes idle ones for it."""
        if self._by_address[address] >= self.limits.per_address and not self._evict(address):
            return False
        if len(self._open) < self._total:
            return True
        return self._evict(self._by_address.most_common(1)[0][0]) or self.evict()

    def evict(self) -> bool:
        """Close the oldest idle connection; returns whether there was one."""
        return self._evict(None)

    def _evict(self, address: str | None) -> bool:
        idle = [c for c, where in self._open.items() if c.idle and address in (None, where)]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.since)
        oldest.transport.abort()
        self.remove(oldest)
        return True

    def add(self, connection: "_Connection | _Handshake", address: str) -> None:
        self._open[connection] = address
        self._by_address[address] += 1

    def remove(self, connection: "_Connection | _Handshake") -> None:
        address = self._open.pop(connection, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def say(self, line: str) -> None:
        """Write a line to the log."""
        self._log(line)

    def exhausted(self, error: OSError) -> None:
        """Note that the system has no descriptor or memory for a connection."""
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            self._log(f"no connection can be taken: {error.strerror}; trying again")
        self.evict()


class FrontProcess:
    """The server's side of `front`: one process at a time, restarted if it ends."""

    def __init__(self, names: Sequence[str], prefix: str = "") -> None:
        self._names, self._prefix = [name.lower() for name in names], prefix
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # Signal handlers write to the same socket, whichever process reads it.
        self.signals, self._told = socket.socketpair()
        self.signals.setblocking(False)

    def start(self, listeners: Sequence[socket.socket]) -> socket.socket:
        """Start the process that accepts on these listeners.

        Returns the socket that connections come over.

        Raises OSError.
        """
        self._end()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        numbers = [each.fileno() for each in listeners]
        config = front.Config(
            *(numbers, theirs.fileno(), self._told.fileno(), os.getpid()),
            *(self._names, self._prefix),
        )
        command = [sys.executable, "-P", "-m", "tamis.bindings.serve.http.front"]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, json.dumps(config._asdict())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env=child_environment({}),
                    pass_fds=[*numbers, theirs.fileno(), self._told.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C must reach the server only
                )
            except OSError:
                ours.close()
                raise
        self._control = ours
        return ours

    async def next(self) -> tuple[socket.socket, str]:
        """The next connection that is handed over, and its address.

        Raises EOFError if the process has ended, OSError if a connection was lost for lack of
        descriptors.
        """
        assert self._control is not None
        loop, control = asyncio.get_running_loop(), self._control
        while True:
            try:
                data, numbers, flags, _ = socket.recv_fds(control, len(front.HANDED), 1)
            except BlockingIOError:
                await _readable(loop, control)
                continue
            except ConnectionError:
                raise EOFError from None
            if not data:
                raise EOFError
            if not numbers or flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            connection = socket.socket(fileno=numbers[0])
            connection.setblocking(False)
            try:
                return connection, _address(connection)
            except OSError:  # its client has disconnected already
                connection.close()

    def close(self) -> None:
        """End the process; may be called more than once."""
        self._end()
        self.signals.close()
        self._told.close()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)  # it ends by itself when its socket is closed
            self._process.kill()
            self._process.wait()
        self._process = self._control = None


def _address(connection: socket.socket) -> str:
    """The address of a client, "" for one of a Unix socket. Raises OSError."""
    name = connection.getpeername()
    return "" if connection.family == socket.AF_UNIX else str(name[0])


async def _readable(loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
    """Wait until a socket is readable, or closed."""
    there = asyncio.Event()
    loop.add_reader(channel, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(channel)


class _Handshake:
    """A connection whose TLS handshake is in progress: it counts, and is not idle."""

    def __init__(self, transport: Any = None) -> None:
        self.transport, self.idle, self.since = transport, False, time.monotonic()


class _Parser(h11.Connection):
    """h11's connection, which also refuses a body in too many small chunks: each one costs time."""

    _n_chunk = _n_byte = 0

    def next_event(self) -> Any:
        """The next event. Raises RemoteProtocolError for such a body, too."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._n_chunk = self._n_byte = 0
        elif isinstance(event, h11.Data):
            self._n_chunk += 1
            self._n_byte += len(event.data)
            if self._n_chunk > FREE_CHUNKS + self._n_byte // CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class _Connection(H11Protocol):
    """uvicorn's connection, closed if a request's head or a reply's reader takes too long."""

    def __init__(self, gate: _Gate, address: str, **given: Any) -> None:
        super().__init__(**given)
        self.conn = _Parser(h11.SERVER, MOST_HEAD)
        self._gate, self._address = gate, address
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self.since = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._gate.add(self, self._address)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.remove(self)
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None and not self.transport.is_closing():
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP; if a reply has begun, only close the connection."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def on_response_complete(self) -> None:
        self.since = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            seconds = self._gate.limits.stall_seconds
            self._stall = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _await_head(self) -> None:
        seconds = self._gate.limits.header_seconds
        self._head = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self) -> None:
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()
        self._head = self._stall = None


class _Uvicorn(uvicorn.Server):
    """uvicorn's server with an accept loop of its own.

    Uvicorn's would raise signals again at its end.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gate: _Gate,
        taken: FrontProcess | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(config)
        self._gate, self._tls = gate, tls
        self._accepting: set[asyncio.Task[None]] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self.front = taken or FrontProcess(LOCAL)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self.servers = []
        self._accepting = {asyncio.create_task(self._accept_by_front(sockets))}
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (*self._accepting, *self._handshakes):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await super().shutdown(sockets)

    async def _accept_by_front(self, listeners: list[socket.socket]) -> None:
        """Take connections that the front process hands over; without one, accept them here."""
        while True:
            try:
                control = await asyncio.to_thread(self.front.start, listeners)
            except OSError as error:
                self._gate.say(f"no process takes connections ({error}): the server does so itself")
                await asyncio.gather(*(self._accept(each) for each in listeners))
                return
            while True:
                try:
                    connection, address = await self.front.next()
                except EOFError:
                    break
                except OSError as error:
                    self._gate.exhausted(error)
                    continue
                await self._take(connection, address)
            control.close()
            self._gate.say("the process that takes connections has ended: another is started")
            await asyncio.sleep(RETRY_SECONDS)

    async def _take(self, connection: socket.socket, address: str) -> None:
        """Serve a connection, or refuse it if there are too many."""
        is_path = connection.family == socket.AF_UNIX
        tls = None if is_path else self._tls
        if not self._gate.admits(address):
            with contextlib.suppress(OSError):
                if tls is None:
                    connection.send(front.FULL)
            connection.close()
            await asyncio.sleep(0)
            return
        with contextlib.suppress(OSError):
            if not is_path:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is None:
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(partial(self._protocol, address), connection)
                return
            # Other connections do not wait for a client's handshake.
            task = asyncio.create_task(self._encrypt(connection, address, tls))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _encrypt(self, connection: socket.socket, address: str, tls: ssl.SSLContext) -> None:
        """Serve a connection over TLS; a client that fails the handshake is dropped."""
        handshake, loop = _Handshake(), asyncio.get_running_loop()
        self._gate.add(handshake, address)

        def protocol() -> _Connection:
            self._gate.remove(handshake)
            return self._protocol(address)

        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(
                protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=self._gate.limits.header_seconds,
            )

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
                address = _address(connection)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._gate.exhausted(error)
                    await asyncio.sleep(RETRY_SECONDS)
                continue  # other errors are of a client that has disconnected
            await self._take(connection, address)

    def _protocol(self, address: str) -> _Connection:
        return _Connection(
            self._gate,
            address,
            config=self.config,
            server_state=self.server_state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )


@contextlib.contextmanager
def _signalled(inner: _Uvicorn, server: Served) -> Iterator[Callable[[], None]]:
    """Stop the server on a signal; yields a function to call once there is an event loop.

    Handlers write to the front process before any Python code runs: it learns of a signal even
    while a call holds the interpreter's lock.
    """
    loops: list[asyncio.AbstractEventLoop] = []
    early: list[int] = []  # signals that came before there was a loop

    def end() -> None:
        inner.force_exit = inner.should_exit  # the second time
        inner.should_exit = True
        server.stop()

    def handler(number: int, frame: Any) -> None:
        early.append(number)
        for loop in loops:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(end)

    def begun() -> None:
        loops.append(asyncio.get_running_loop())
        if early:
            end()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in numbers}
    wakes = signal.set_wakeup_fd(inner.front.signals.fileno(), warn_on_full_buffer=False)
    try:
        yield begun
    finally:
        signal.set_wakeup_fd(wakes)
        for number, each in before.items():
            signal.signal(number, each)


async def _until_signal(
    inner: _Uvicorn,
    listeners: list[socket.socket],
    begun: Callable[[], None],
    ready: Callable[[], None],
) -> None:
    begun()
    for listener in listeners:
        listener.listen(BACKLOG)
    ready()
    await inner.serve(sockets=listeners)
