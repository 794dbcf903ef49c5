"""The process in front, step by step in this one: its clock stands still until it is moved."""

import os
import signal
import socket
import threading
from types import SimpleNamespace

import pytest

from tamis.bindings.serve.http import front

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
OTHER = b"GET /v1/models HTTP/1.1\r\n"


class World:
    """A process in front, the server that it hands on to, and the clients that connect."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(front, "time", clock)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.control, theirs = socket.socketpair()
        self.signals, told = socket.socketpair()
        self.control.settimeout(0.05)
        config = front.Config(
            [os.dup(self.listener.fileno())], theirs.detach(), told.detach(), 4711, ["localhost"]
        )
        self.front = front.Front(config)
        for each in (*self.front._listeners, self.front._control, self.front._signals):
            each.setblocking(False)
            self.front._select.register(each, front.selectors.EVENT_READ)
        self.clients = []

    def connect(self, data=b""):
        client = socket.create_connection(self.listener.getsockname())
        client.settimeout(5)
        if data:
            client.sendall(data)
        self.clients.append(client)
        self.step()
        return client

    def step(self, data=b"", client=None):
        """One round of what `run` does, without waiting."""
        if client is not None:
            client.sendall(data)
        made = self.front
        for key, _ in made._select.select(0):
            if key.fileobj in made._listeners:
                made._accept(key.fileobj)
            elif key.fileobj in made._ends:
                made._look(key.fileobj)
        made._tick()

    def handed(self):
        """The connections that the server has been handed."""
        found = []
        while True:
            try:
                data, numbers, _, _ = socket.recv_fds(self.control, 1, 1)
            except TimeoutError:
                return found
            assert data == front.HANDED
            found.append(socket.socket(fileno=numbers[0]))

    def close(self):
        made = self.front
        for each in (*made._ends, *made._handed, *made._listeners, made._control, made._signals):
            each.close()
        for each in (*self.clients, self.listener, self.control, self.signals):
            each.close()
        made._select.close()


@pytest.fixture
def world(monkeypatch):
    found = World(monkeypatch)
    yield found
    found.close()


def closed(client):
    """Whether the other end has been closed."""
    client.settimeout(0.05)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def text_of(client):
    data = client.recv(4096)
    assert data.startswith(b"HTTP/1.1 200 OK\r\n")
    return data


def test_health_is_answered_here_and_the_connection_kept_for_its_time(world):
    client = world.connect(HEALTH)
    text = text_of(client).decode()
    head, body = text.split("\r\n\r\n")
    assert body == '{"status":"ok"}'
    fields = dict(line.split(": ") for line in head.splitlines()[1:])
    assert fields.pop("date").endswith("GMT")
    assert fields == {
        "content-length": "15", "content-type": "application/json",
        "x-content-type-options": "nosniff", "cache-control": "no-store",
        "referrer-policy": "no-referrer",
    }  # fmt: skip
    world.now += 29.9
    world.step()
    assert not closed(client)
    world.step(HEALTH, client)  # its time begins again
    text_of(client)
    world.now += 29.9
    world.step()
    assert not closed(client)
    world.now += 0.2
    world.step()
    assert closed(client)
    assert world.handed() == []
    assert not world.front._ends
    assert not world.front._answered


def test_a_head_alone_and_an_end_are_given_where_they_are_asked_for(world):
    client = world.connect(HEALTH.replace(b"GET", b"HEAD"))
    assert text_of(client).endswith(b"referrer-policy: no-referrer\r\n\r\n")
    client = world.connect(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert b"\r\nconnection: close\r\n" in text_of(client)
    assert closed(client)
    assert len(world.front._ends) == 1


def test_two_requests_at_once_are_answered_in_turn(world):
    client = world.connect(HEALTH + HEALTH)
    world.step()
    assert text_of(client).count(b"200 OK") == 2


def test_another_request_is_handed_on_unread(world):
    client = world.connect(OTHER)
    (connection,) = world.handed()
    with connection:
        assert connection.recv(100) == OTHER
        assert connection.getpeername() == client.getsockname()
    assert not world.front._ends


def test_a_connection_that_was_answered_is_handed_on_with_its_next_request(world):
    client = world.connect(HEALTH)
    text_of(client)
    world.step(OTHER, client)
    (connection,) = world.handed()
    with connection:
        assert connection.recv(100) == OTHER
    assert not world.front._answered


def test_half_a_head_is_waited_for_and_no_processor_time_spent(world):
    client = world.connect(HEALTH[:20])
    assert list(world.front._half) == list(world.front._ends)
    assert world.front._timeout() == front.PAUSE
    assert world.front._select.select(0) == []  # not woken by what is there already
    world.step(HEALTH[20:], client)
    text_of(client)
    assert not world.front._half
    world.step(HEALTH, client)  # it is watched again
    text_of(client)


def test_half_a_head_is_handed_on_after_its_time(world):
    world.connect(HEALTH[:20])
    world.now += front.FIRST_SECONDS - 0.01
    world.step()
    assert world.front._ends
    world.now += 0.02
    world.step()
    (connection,) = world.handed()
    connection.close()
    assert not world.front._half
    assert not world.front._ends


def test_half_a_head_after_an_answer_has_the_time_of_a_first_one(world):
    client = world.connect(HEALTH)
    text_of(client)
    world.now += 20
    world.step(HEALTH[:20], client)
    assert not world.front._answered
    world.now += 0.9
    world.step()
    assert world.front._ends
    world.now += 0.2
    world.step()
    (connection,) = world.handed()
    with connection:
        assert connection.recv(100) == HEALTH[:20]


def test_a_silent_connection_is_handed_on_after_its_time(world):
    world.connect()
    world.now += 1.01
    world.step()
    (connection,) = world.handed()
    connection.close()
    assert not world.front._ends


def test_a_client_that_goes_is_dropped(world):
    for data in (b"", HEALTH):
        client = world.connect(data)
        client.close()
        world.step()
        world.step()
        assert not world.front._ends, data
        assert not world.front._half
        assert not world.front._answered
    assert world.handed() == []


def test_of_many_connections_the_oldest_gives_way(world, monkeypatch):
    monkeypatch.setattr(front, "MOST_KEPT", 3)
    answered = world.connect(HEALTH)
    text_of(answered)
    silent = [world.connect(), world.connect()]
    assert len(world.front._ends) == 3
    assert not closed(answered)
    world.connect()
    assert closed(answered)  # it has had its answer
    assert world.handed() == []
    world.connect()
    (connection,) = world.handed()  # not answered: the server's
    assert connection.getpeername() == silent[0].getsockname()
    connection.close()


def test_an_answer_makes_a_connection_the_youngest(world, monkeypatch):
    monkeypatch.setattr(front, "MOST_KEPT", 2)
    first, second = world.connect(HEALTH), world.connect(HEALTH)
    text_of(first)
    text_of(second)
    world.step(HEALTH, first)
    text_of(first)
    world.connect(HEALTH)
    assert closed(second)
    assert not closed(first)


def test_connections_wait_where_the_server_has_no_room_and_too_many_are_refused(world, monkeypatch):
    monkeypatch.setattr(front, "MOST_WAITING", 2)
    send, full = socket.send_fds, [True]

    def send_fds(channel, parts, numbers):
        if full[0]:
            raise BlockingIOError
        return send(channel, parts, numbers)

    monkeypatch.setattr(front.socket, "send_fds", send_fds)
    clients = [world.connect(OTHER) for _ in range(3)]
    assert world.handed() == []
    assert len(world.front._handed) == 2
    assert world.front._timeout() == front.PAUSE
    assert clients[2].recv(1000) == (
        b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
        b"content-length: 0\r\n\r\n"
    )
    assert not closed(clients[0])
    full[0] = False
    world.step()
    found = world.handed()
    assert [each.getpeername() for each in found] == [c.getsockname() for c in clients[:2]]
    assert not world.front._handed
    for each in found:
        each.close()


def test_connections_keep_their_order_where_some_wait(world, monkeypatch):
    send, full = socket.send_fds, [True]

    def send_fds(channel, parts, numbers):
        if full[0]:
            raise BlockingIOError
        return send(channel, parts, numbers)

    monkeypatch.setattr(front.socket, "send_fds", send_fds)
    tick = world.front._tick
    monkeypatch.setattr(world.front, "_tick", lambda: None)
    first = world.connect(OTHER)
    full[0] = False
    second = world.connect(OTHER)
    assert len(world.front._handed) == 2
    tick()
    found = world.handed()
    assert [each.getpeername() for each in found] == [first.getsockname(), second.getsockname()]
    for each in found:
        each.close()


def test_a_server_that_has_gone_takes_no_connection(world):
    client = world.connect()
    world.control.close()
    world.step(OTHER, client)
    assert closed(client)
    assert not world.front._ends
    assert not world.front._handed
    assert not world.front._alive()


def test_the_server_lives_as_long_as_its_socket(world):
    assert world.front._alive()
    world.control.send(b"x")
    assert world.front._alive()
    world.control.shutdown(socket.SHUT_WR)
    assert not world.front._alive()


class Lost:
    """A listener that finds no descriptor."""

    n_try = 0

    def accept(self):
        self.n_try += 1
        raise OSError("too many open files")


def test_without_descriptors_it_pauses_and_the_oldest_gives_way(world):
    silent = world.connect()
    lost = Lost()
    world.front._accept(lost)
    (connection,) = world.handed()
    with connection:
        assert connection.getpeername() == silent.getsockname()
    assert world.front._timeout() == front.PAUSE
    world.front._accept(lost)
    assert lost.n_try == 1
    world.now += front.PAUSE
    world.front._accept(lost)  # nobody is left to give way
    assert lost.n_try == 2
    world.now += front.PAUSE + 0.001
    assert world.front._timeout() == 60


def test_a_listener_that_has_nothing_is_left_alone(world):
    world.front._accept(world.front._listeners[0])
    assert not world.front._ends
    assert world.front._paused == 0.0


def test_how_long_it_sleeps(world):
    assert world.front._timeout() == 60
    world.connect(HEALTH)
    assert world.front._timeout() == 0.1
    world.front._end = world.now + 5
    for each in list(world.front._ends):
        world.front._close(each)
    assert world.front._timeout() == 0.1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_its_time(world, monkeypatch, number):
    killed = []
    monkeypatch.setattr(front.os, "getppid", lambda: 4711)
    monkeypatch.setattr(front.os, "kill", lambda *given: killed.append(given))
    kept = world.connect(HEALTH)
    text_of(kept)
    world.signals.send(bytes([signal.SIGCHLD]))
    world.front._signalled()
    assert world.front._end is None
    world.signals.send(bytes([signal.SIGCHLD, number]))
    world.front._signalled()
    assert closed(kept)
    assert world.front._listeners == []
    assert world.front._timeout() == 0.1
    world.now += front.END_SECONDS - 0.01
    world.signals.send(bytes([number]))
    world.front._signalled()  # once more: the time is the first one's
    assert world.front._timeout() == pytest.approx(0.01)
    world.front._tick()
    assert killed == []
    world.now += 0.02
    assert world.front._timeout() == 0
    world.front._tick()
    assert killed == [(4711, signal.SIGKILL)]
    monkeypatch.setattr(front.os, "getppid", lambda: 1)
    world.front._tick()
    assert len(killed) == 1, "its number may be another's by now"
    world.signals.close()
    world.front._signalled()
    world.front._select.register(world.front._signals, front.selectors.EVENT_READ)  # it was not


def test_it_runs_until_the_server_goes(world, monkeypatch):
    monkeypatch.undo()
    for each in (*world.front._listeners, world.front._control, world.front._signals):
        world.front._select.unregister(each)
        each.setblocking(True)
    client = socket.create_connection(world.listener.getsockname())
    world.clients.append(client)
    client.sendall(HEALTH)
    world.signals.send(bytes([signal.SIGCHLD]))
    world.control.send(b"x")
    client.settimeout(10)

    thread = threading.Thread(target=world.front.run)
    thread.start()
    text_of(client)
    client.sendall(HEALTH)
    text_of(client)
    assert len(world.front._ends) == 1
    world.control.shutdown(socket.SHUT_WR)
    thread.join(10)
    assert not thread.is_alive()


def test_its_limits():
    assert (front.MOST_HEAD, front.MOST_KEPT, front.MOST_WAITING) == (4096, 256, 512)
    assert (front.END_SECONDS, front.FIRST_SECONDS, front.IDLE_SECONDS) == (1.6, 1.0, 30)


# --- which requests are its own -------------------------------------------------------------------


HOSTS = frozenset([b"localhost", b"::1"])
GOOD = b"GET /health HTTP/1.1\r\nHost: localhost:8080\r\n"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (GOOD + b"\r\n", (True, True)),
        (GOOD + b"\r\nGET / HTTP/1.1", (True, True)),
        (GOOD.replace(b"GET", b"HEAD") + b"\r\n", (False, True)),
        (GOOD.replace(b"/health", b"/v1/health") + b"\r\n", (True, True)),
        (GOOD + b"Connection: close\r\n\r\n", (True, False)),
        (GOOD.replace(b"1.1", b"1.0") + b"\r\n", (True, False)),
        (GOOD.replace(b"1.1", b"1.0") + b"Connection: Keep-Alive\r\n\r\n", (True, True)),
        (GOOD.replace(b"localhost", b"[::1]") + b"\r\n", (True, True)),
        (GOOD.replace(b"localhost:8080", b"LOCALHOST") + b"\r\n", (True, True)),
        (GOOD.replace(b"localhost", b"evil.example") + b"\r\n", False),
        (GOOD.replace(b"Host", b"Hast") + b"\r\n", False),
        (GOOD.replace(b"/health", b"/health?x") + b"\r\n", False),
        (GOOD.replace(b"/health", b"/healthy") + b"\r\n", False),
        (GOOD.replace(b"1.1", b"2.0") + b"\r\n", False),
        (GOOD.replace(b"1.1", b"1.1 x") + b"\r\n", False),
        (GOOD + b"Host: localhost\r\n\r\n", False),
        (GOOD + b"Origin: x\r\n\r\n", False),
        (GOOD + b"Content-Length: 3\r\n\r\nabc", False),
        (GOOD + b"Transfer-Encoding: chunked\r\n\r\n", False),
        (GOOD + b"no colon\r\n\r\n", False),
        (GOOD + b" folded: x\r\n\r\n", False),
        (b"POST /health HTTP/1.1\r\n\r\n", False),
        (b"\x16\x03\x01", False),
        (b"GET /health HTTP/1.1\r\n" + b"a" * front.MOST_HEAD, False),
    ],
)
def test_what_is_a_plain_request(data, found):
    judged = front.judge(data, HOSTS)
    assert (judged[1:] if isinstance(judged, front.Asked) else judged) == found


def test_each_part_of_a_plain_request_may_become_one():
    data = GOOD + b"\r\n"
    assert all(front.judge(data[:n], HOSTS) is True for n in range(len(data)))
    assert front.judge(data, HOSTS) == front.Asked(len(data), True, True)
