"""Connections of `tamis serve`: slow and many ones, no descriptors left, and its end."""

import asyncio
import contextlib
import errno
import json
import signal
import threading
import time

import h11
import pytest
from serve_process import ServeProcess

from tamis.bindings.serve.http import listen

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "the hand"}], "max_tokens": 4}
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc"


def closed(connection, seconds):
    """Whether the server closes a connection in so many seconds."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1 << 16) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_half_open_connections_end_and_keep_nobody_out(path, tmp_path):
    flags = "--timeout-header", "2", "--max-connections", "64"
    with ServeProcess(path, tmp_path, *flags) as server:
        before = server.n_open()
        held = [server.connect(HALF) for _ in range(200)]
        assert server.post(ASKED)[0] == 200
        assert server.n_open() <= before + 64 + 8  # the helper's own are among these
        assert closed(held[-1], 5)
        time.sleep(0.3)
        assert server.n_open() <= before + 8
        for connection in held:
            connection.close()


def test_a_head_that_trickles_in_is_cut_off_also_on_a_connection_used_before(path, tmp_path):
    with ServeProcess(path, tmp_path, "--timeout-header", "1") as server:
        connection = server.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        text = b""
        while b'{"status":"ok"}' not in text:
            text += connection.recv(1 << 16)
        begin = time.monotonic()
        connection.settimeout(0.1)
        for letter in HALF * 4:
            try:
                connection.send(bytes([letter]))
                assert connection.recv(1) == b""
                break
            except TimeoutError:
                pass
            except OSError:
                break
        assert 0.9 < time.monotonic() - begin < 4


def test_a_body_that_trickles_in_is_cut_off(path, tmp_path):
    with ServeProcess(path, tmp_path, "--timeout-request", "1") as server:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = server.connect(head + b"Content-Length: 99\r\n\r\n{")
        connection.settimeout(10)
        assert b" 408 " in connection.recv(1 << 16)
        # No HTTP behind a reply that has been sent, and before one that is to come.
        chunked = b"Transfer-Encoding: chunked\r\n\r\n"
        for before in (chunked + b"1\r\n{\r\n", b"Content-Encoding: br\r\n" + chunked):
            connection = server.connect(head + before)
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                connection.sendall(b"\0\r\n\r\n")
            assert any(closed(connection, 5) for _ in range(8))  # after a reply in pieces
        assert "Traceback" not in server.log.read_text()


def test_few_descriptors_make_fewer_connections_and_a_short_log(path, tmp_path):
    with ServeProcess(path, tmp_path, "--timeout-header", "5", n_file=160) as server:
        held = []
        for _ in range(300):
            held.append(server.connect(HALF))
        assert server.post(ASKED)[0] == 200
        form = {"type": "json_schema", "json_schema": {"schema": {"const": "hand"}}}
        assert server.post(ASKED | {"response_format": form})[0] == 200
        time.sleep(1)
        assert server.log.stat().st_size < 2000


def test_without_descriptors_the_accept_loop_waits_and_logs_once(monkeypatch):
    lines, n_try = [], 0

    class Config:
        loaded = True

    async def run():
        nonlocal n_try
        loop = asyncio.get_running_loop()

        async def none_left(_listener):
            nonlocal n_try
            n_try += 1
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(loop, "sock_accept", none_left)
        inner = listen._Uvicorn(Config(), listen._Gate(listen.Connections(), lines.append))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inner._accept(None), 1)

    begin = time.process_time()
    asyncio.run(run())
    assert n_try <= 6
    assert time.process_time() - begin < 0.5
    assert len(lines) == 1


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def events_of(data):
    parser = listen._Parser(h11.SERVER, listen.MOST_HEAD)
    parser.receive_data(HEAD + data)
    while (event := parser.next_event()) is not h11.NEED_DATA:
        yield event


def test_a_body_in_a_great_many_small_chunks_is_refused():
    large = b"100\r\n" + bytes(256) + b"\r\n"
    assert sum(isinstance(event, h11.Data) for event in events_of(large * 3000)) == 3000
    with pytest.raises(h11.RemoteProtocolError, match="too small"):
        list(events_of(b"1\r\n \r\n" * 3000))


def test_one_address_leaves_room_for_others():
    class Connection:
        idle, since = False, 0.0

        def __init__(self):
            self.transport = self

        def abort(self):
            self.idle = None

    gate = listen._Gate(listen.Connections(total=6, per_address=4), lambda line: None)
    held = []
    for _ in range(4):
        assert gate.admits("a")
        held.append(Connection())
        gate.add(held[-1], "a")
    assert not gate.admits("a")  # none of its own is idle
    held[2].idle = True
    assert gate.admits("a")
    assert held[2].idle is None  # it was closed for the new one
    gate.add(Connection(), "a")
    for _ in range(2):
        assert gate.admits("b")
        gate.add(Connection(), "b")
    assert not gate.admits("c")
    held[0].idle = True
    assert gate.admits("c")


def test_sigterm_ends_streams_and_what_is_being_prepared_within_two_seconds(path, tmp_path):
    with ServeProcess(path, tmp_path, "--parallel", "2") as server:
        long = {"max_tokens": 1900, "stream": True, "temperature": 0}
        body = json.dumps(ASKED | long | {"logit_bias": {"2": -100}}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        stream = server.connect(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert b"200 OK" in stream.recv(1 << 10)
        word = "".join(chr(97 + i * i % 23) for i in range(23))
        slow = {"content": word * 170_000}  # near a body's limit: two seconds of a fast processor
        found = []
        preparing = threading.Thread(
            target=lambda: found.append(server.post(slow, "/tokenize", timeout=60))
        )
        preparing.start()
        held = server.connect(HALF)
        time.sleep(1)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        text = b"".join(iter(lambda: stream.recv(1 << 16), b""))
        assert server.process.wait(20) == 0
        assert time.monotonic() - begin < 2
        preparing.join()
        assert b"[DONE]" in text or b'"code":"stopping"' in text
        assert text.endswith(b"0\r\n\r\n")  # a whole reply of HTTP
        assert found[0][0] == 503
        held.close()
        assert "Traceback" not in server.log.read_text()
