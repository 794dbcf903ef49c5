"""Sockets, processes and order of `listen`, step by step. No model."""

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
from types import SimpleNamespace

import pytest

from tamis.bindings.serve.http import front, listen


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("127.0.0.1", False),
        ("localhost", False),
        ("::1", False),
        ("a.sock", True),
        ("a.sock.example", False),
        ("./a", True),
        ("/run/a", True),
    ],
)
def test_what_is_the_path_of_a_socket(host, found):
    assert listen.is_path(host) is found


def test_an_address_is_shown_as_a_client_asks_for_it():
    assert listen._url("127.0.0.1", 80, "", "http") == "http://127.0.0.1:80"
    assert listen._url("::1", 80, "/llm", "https") == "https://[::1]:80/llm"
    assert listen._url("/run/a.sock", 80, "/llm", "http") == "the socket /run/a.sock"


def test_a_socket_of_a_path_is_its_users_and_goes_with_its_server(tmp_path):
    where, before = tmp_path / "a.sock", os.umask(0o022)
    try:
        with listen._unix_listener(where) as one:
            assert stat.S_IMODE(where.stat().st_mode) == 0o600
            assert not one.getblocking()
            assert os.umask(0o022) == 0o022, "other files have their rights"
        assert not where.exists()
        with (
            pytest.raises(OSError, match=r"b\.sock") as found,
            listen._unix_listener(tmp_path / "none" / "b.sock"),
        ):
            pass
        assert found.value.errno == errno.ENOENT
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_only_a_socket_that_nobody_listens_on_is_removed(tmp_path):
    left, live, text = (tmp_path / name for name in ("left", "live", "text"))
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(left))
    text.write_text("mine")
    pointed = tmp_path / "pointed"
    pointed.symlink_to(left)  # not followed
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(live))
        one.listen(1)
        for each in (live, text, pointed, tmp_path / "absent", left):
            listen._remove_unused(each)
        assert live.is_socket()
    assert text.read_text() == "mine"
    assert pointed.is_symlink()
    assert not left.exists()


def test_a_listener_is_of_its_addresss_family_and_closed_where_it_fails(monkeypatch):
    made, socket_of = [], socket.socket

    def noted(*given, **how):
        made.append(socket_of(*given, **how))
        return made[-1]

    monkeypatch.setattr(listen.socket, "socket", noted)
    with pytest.raises(OSError, match=r"192\.0\.2\.1:80") as found:
        listen._listener("192.0.2.1", 80)  # of nobody
    assert found.value.errno == errno.EADDRNOTAVAIL
    assert "--port" not in str(found.value)
    assert made[0].fileno() == -1
    with contextlib.suppress(OSError), listen._listener("::1", 0):  # a machine without IPv6
        pass
    assert made[1].family is socket.AF_INET6
    assert made[1].fileno() == -1


# --- the process in front -------------------------------------------------------------------------


class Process:
    """A process in front that ends when it is killed, or before."""

    def __init__(self, ends):
        self.log, self._ends = [], ends

    def wait(self, seconds=None):
        self.log.append(("wait", seconds))
        if seconds is not None and not self._ends:
            raise subprocess.TimeoutExpired("front", seconds)

    def kill(self):
        self.log.append("kill")


@pytest.mark.parametrize("ends", [True, False])
def test_one_process_in_front_at_a_time_with_what_it_needs(monkeypatch, ends):
    started = []

    def popen(command, **how):
        started.append((command, how, Process(ends)))
        for number in how["pass_fds"]:
            os.fstat(number)
        return started[-1][2]

    monkeypatch.setattr(listen.subprocess, "Popen", popen)
    made = listen.FrontProcess(["LocalHost"], "/llm")
    signals = made.signals
    assert not signals.getblocking(), "a signal handler never waits"
    with listen._listener("127.0.0.1", 0) as one, listen._listener("127.0.0.1", 0) as two:
        first = made.start([one, two])
        assert not first.getblocking()
        assert first.recv(1) == b"", "the process has its end, nobody here"
        command, how, process = started[0]
        assert command[:4] == [sys.executable, "-P", "-m", "tamis.bindings.serve.http.front"]
        config = front.Config(*json.loads(command[4]).values())
        assert config.listeners == [one.fileno(), two.fileno()]
        assert (config.server, config.hosts, config.prefix) == (os.getpid(), ["localhost"], "/llm")
        assert how["pass_fds"] == [*config.listeners, config.control, config.signals]
        assert config.signals == made._told.fileno()
        assert how["start_new_session"], "a terminal's Ctrl-C is the server's alone"
        assert (how["stdin"], how["stdout"], how["cwd"]) == (
            subprocess.DEVNULL, subprocess.DEVNULL, "/",
        )  # fmt: skip
        assert how["env"]["OPENBLAS_NUM_THREADS"] == "1"
        second = made.start([one, two])
        assert first.fileno() == -1
        assert process.log == [("wait", 0.1), "kill", ("wait", None)]
        assert made._control is second
    made.close()
    assert second.fileno() == signals.fileno() == made._told.fileno() == -1
    assert started[1][2].log[-1] == ("wait", None)
    made.close()
    assert len(started[1][2].log) == 3


def test_a_process_in_front_that_cannot_start_leaves_no_socket(monkeypatch):
    pairs, pair_of = [], socket.socketpair

    def noted():
        pairs.append(pair_of())
        return pairs[-1]

    def none(*given, **how):
        raise OSError(errno.EAGAIN, "no more processes")

    made = listen.FrontProcess([])
    monkeypatch.setattr(listen.socket, "socketpair", noted)
    monkeypatch.setattr(listen.subprocess, "Popen", none)
    with pytest.raises(OSError, match="no more processes"):
        made.start([])
    assert [each.fileno() for each in pairs[0]] == [-1, -1]
    assert made._process is made._control is None
    made.close()


def test_waiting_for_a_socket_leaves_no_reader():
    async def run():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop = asyncio.get_running_loop()
            for _ in range(2):
                waiting = asyncio.create_task(listen._readable(loop, ours))
                await asyncio.sleep(0)
                assert not waiting.done()
                theirs.send(b"x")
                await asyncio.wait_for(waiting, 10)
                assert ours.recv(9) == b"x"
                assert not loop.remove_reader(ours)
            waiting = asyncio.create_task(listen._readable(loop, ours))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not loop.remove_reader(ours)

    asyncio.run(run())


def test_the_address_of_a_client_of_a_path_is_empty():
    one, two = socket.socketpair()
    with one, two:
        assert listen._address(one) == ""


# --- a connection that is taken -------------------------------------------------------------------


def uvicorns(work, total=8, tls=None, log=None):
    """Run work(inner, gate, made) in a loop; made: the protocols of connections, ours noted."""

    async def run():
        limits = listen.Connections(total=total, header_seconds=0.05)
        gate = listen._Gate(limits, (lambda line: None) if log is None else log.append)
        gate._total = total
        inner, made = listen._Uvicorn(SimpleNamespace(loaded=True), gate, tls=tls), []

        class Protocol(asyncio.Protocol):
            def __init__(self, address):
                made.append((address, self))

            def connection_made(self, transport):
                self.transport = transport

        inner._protocol = Protocol
        try:
            await work(inner, gate, made)
        finally:
            for _, each in made:
                each.transport.abort()
            inner.front.close()

    asyncio.run(run())


def over_tcp():
    """The client's end of a connection, and the server's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.setblocking(False)
    client.settimeout(10)
    return client, theirs


def over_path():
    client, theirs = socket.socketpair()
    theirs.setblocking(False)
    client.settimeout(10)
    return client, theirs


@pytest.mark.parametrize("made_by", [over_tcp, over_path])
@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_too_many_gets_an_answer_that_it_can_read(monkeypatch, made_by, tls):
    """Over TLS nothing is said before the handshake; a path's socket has no TLS.

    The next connection waits for a turn of the loop, not longer.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None

    async def sleep(seconds):
        slept.append(seconds)

    async def work(inner, gate, made):
        monkeypatch.setattr(listen.asyncio, "sleep", sleep)
        gate.add(listen._Handshake(), "x")
        client, theirs = made_by()
        with client:
            await inner._take(theirs, "1.2.3.4")
            assert theirs.fileno() == -1
            text = client.recv(1 << 12)
            assert text == (b"" if tls and made_by is over_tcp else front.FULL)
            assert not text or client.recv(1) == b""
        client, theirs = made_by()
        client.close()  # it has gone: nothing is raised
        await inner._take(theirs, "1.2.3.4")
        await inner._take(theirs, "1.2.3.4")
        monkeypatch.undo()
        assert (made, len(gate._open), slept) == ([], 1, [0] * 3)

    slept = []
    uvicorns(work, total=1, tls=context)


@pytest.mark.parametrize("made_by", [over_tcp, over_path])
@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_is_served_at_once(made_by, tls):
    """Small parts of a reply are not kept back; only a path's socket has no TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None

    async def work(inner, gate, made):
        client, theirs = made_by()
        with client:
            kept = theirs.dup()
            with kept:
                await inner._take(theirs, "1.2.3.4")
                if made_by is over_tcp:
                    assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            if tls and made_by is over_tcp:
                assert made == []
                assert len(inner._handshakes) == 1
                return
            assert inner._handshakes == set()
            ((address, protocol),) = made
            assert address == "1.2.3.4"
            protocol.transport.write(b"hello")
            assert client.recv(9) == b"hello"

    uvicorns(work, tls=context)


def test_a_handshake_has_the_time_of_a_head_and_counts_until_it_ends():
    async def work(inner, gate, made):
        seen = []

        async def connect(protocol, connection, *, ssl, ssl_handshake_timeout):
            (held,) = gate._open
            assert isinstance(held, listen._Handshake)
            assert not held.idle
            assert abs(held.since - time.monotonic()) < 10
            seen.append((connection, ssl, ssl_handshake_timeout))
            if connection == "bad":
                raise ConnectionResetError
            protocol().transport = SimpleNamespace(abort=lambda: None)
            assert not gate._open, "the connection counts in its place"

        asyncio.get_running_loop().connect_accepted_socket = connect
        await inner._encrypt("good", "1.2.3.4", "tls")
        assert [address for address, _ in made] == ["1.2.3.4"]
        await inner._encrypt("bad", "1.2.3.4", "tls")
        assert seen == [("good", "tls", 0.05), ("bad", "tls", 0.05)]
        assert len(made) == 1

    uvicorns(work)


def test_what_is_in_progress_ends_with_the_server():
    async def work(inner, gate, made):
        ended = []

        async def forever(name):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(name)

        inner._accepting = {asyncio.create_task(forever("accepting"))}
        inner._handshakes = {asyncio.create_task(forever(f"handshake {i}")) for i in range(2)}
        inner.servers, inner.config.timeout_graceful_shutdown = [], 1
        inner.lifespan = SimpleNamespace(shutdown=lambda: asyncio.sleep(0))
        await asyncio.sleep(0)
        await inner.shutdown([])
        assert sorted(ended) == ["accepting", "handshake 0", "handshake 1"]

    uvicorns(work)


@pytest.mark.parametrize(
    ("number", "waits"),
    [
        (errno.EMFILE, True), (errno.ENFILE, True), (errno.ENOBUFS, True), (errno.ENOMEM, True),
        (errno.ECONNABORTED, False),
    ],
)  # fmt: skip
def test_only_what_the_system_lacks_is_waited_for(monkeypatch, number, waits):
    slept, lines, tries = [], [], []

    async def accept(listener):
        tries.append(listener)
        if len(tries) > 2:
            raise asyncio.CancelledError
        raise OSError(number, "so")

    async def sleep(seconds):
        slept.append(seconds)

    async def work(inner, gate, made):
        asyncio.get_running_loop().sock_accept = accept
        monkeypatch.setattr(listen.asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await inner._accept("listener")
        monkeypatch.undo()

    uvicorns(work, log=lines)
    assert tries == ["listener"] * 3
    assert slept == ([listen.RETRY_SECONDS] * 2 if waits else [])
    assert len(lines) == waits


def test_connections_of_the_process_in_front_are_taken_and_losses_noted(monkeypatch):
    """It is started again where it ends, and its old socket closed."""
    said, lost, taken, slept, controls = [], [], [], [], []
    given = [("one", "a"), OSError(errno.EMFILE, "so"), ("two", "b"), EOFError(), ("three", "c")]

    class Front:
        def start(self, listeners):
            controls.append(SimpleNamespace(closed=0))
            controls[-1].close = lambda at=controls[-1]: setattr(at, "closed", at.closed + 1)
            assert listeners == ["listener"]
            return controls[-1]

        async def next(self):
            if not given:
                raise asyncio.CancelledError
            found = given.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        def close(self):
            pass

    async def take(*what):
        taken.append(what)

    async def sleep(seconds):
        slept.append(seconds)

    async def work(inner, gate, made):
        inner.front.close()
        inner.front, inner._take = Front(), take
        gate.say, gate.exhausted = said.append, lost.append
        monkeypatch.setattr(listen.asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await inner._accept_by_front(["listener"])
        monkeypatch.undo()

    uvicorns(work)
    assert taken == [("one", "a"), ("two", "b"), ("three", "c")]
    assert [error.errno for error in lost] == [errno.EMFILE]
    assert [each.closed for each in controls] == [1, 0]
    assert (len(said), slept) == (1, [listen.RETRY_SECONDS])


# --- the whole ------------------------------------------------------------------------------------


def test_it_is_ready_once_every_address_listens():
    log = []
    listeners = [SimpleNamespace(listen=lambda n, i=i: log.append((i, n))) for i in range(2)]

    async def served(sockets):
        log.append(("serve", sockets is listeners))

    inner = SimpleNamespace(serve=served)
    how = (lambda: log.append("begun")), (lambda: log.append("ready"))
    asyncio.run(listen._until_signal(inner, listeners, *how))
    assert log == ["begun", (0, 512), (1, 512), "ready", ("serve", True)]


def started(monkeypatch, host, address, error=None):
    """What `serve` gives the server of HTTP, and the ends of everything, in order."""
    found, log = SimpleNamespace(), []

    class Uvicorn(listen._Uvicorn):
        def __init__(self, config, gate, taken, tls):
            super().__init__(config, gate, taken, tls)
            found.config, found.gate, found.front, found.tls = config, gate, taken, tls

        async def serve(self, sockets):
            found.names = [each.getsockname() for each in sockets]
            found.sockets = sockets
            if error is not None:
                raise error

    monkeypatch.setattr(listen, "_Uvicorn", Uvicorn)
    close = listen.FrontProcess.close
    ended = lambda self: (log.append("front"), close(self))  # noqa: E731
    monkeypatch.setattr(listen.FrontProcess, "close", ended)
    server = SimpleNamespace(
        app=None, stop=lambda: log.append("stop"), close=lambda: log.append("close")
    )
    limits, urls = listen.Connections(total=7), []
    how = {"connections": limits, "ready": urls.append, "log": log.append, "address": address}
    before = signal.getsignal(signal.SIGTERM)
    broken = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with broken:
        listen.serve(server, host, 0, **how)
    assert signal.getsignal(signal.SIGTERM) is before
    assert log == ["stop", "close", "front"]
    assert [each.fileno() for each in found.sockets] == [-1] * len(found.sockets)
    assert found.gate.limits is limits
    return found, urls


def test_addresses_share_a_port_and_no_header_changes_who_asks(monkeypatch, tmp_path):
    where = tmp_path / "a.sock"
    found, urls = started(
        monkeypatch, f"{where},127.0.0.1,127.0.0.2", listen.Address(("Me",), prefix="/llm")
    )
    port = found.names[1][1]
    assert port > 0
    assert found.names == [str(where), ("127.0.0.1", port), ("127.0.0.2", port)]
    assert urls == [f"the socket {where}"]
    assert not where.exists()
    assert (found.front._names, found.front._prefix, found.tls) == (["me"], "/llm", None)
    config = found.config
    assert (config.proxy_headers, config.server_header, config.access_log) == (False,) * 3
    assert (config.http, config.ws, config.lifespan) == ("h11", "none", "off")
    assert (config.timeout_keep_alive, config.timeout_graceful_shutdown) == (30, 1)


def test_with_tls_nobody_in_front_answers(monkeypatch):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found, (url,) = started(monkeypatch, "127.0.0.1", listen.Address(("Me",), tls, "/llm"))
    assert url == f"https://127.0.0.1:{found.names[0][1]}/llm"
    assert (found.front._names, found.tls) == ([], tls)


def test_a_server_that_fails_leaves_nothing(monkeypatch):
    started(monkeypatch, "127.0.0.1", listen.Address(), RuntimeError("broken"))
