"""/health is answered and SIGTERM heeded whatever the loop does."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "support" / "blocked_server.py"
PROMPT = 0.5  # seconds


class Program:
    """blocked_server, and connections to it."""

    def __init__(self, *arguments):
        command = [sys.executable, str(PROGRAM), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())

    def __enter__(self):
        self.get("/word")  # the process in front has begun
        return self

    def __exit__(self, *_error):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def get(self, path, headers=None, timeout=30):
        """Status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", path, headers=headers or {})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def block(self, path):
        """Have the loop do something for a minute."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        time.sleep(0.3)
        return connection

    def children(self):
        """Processes that it has started."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(stat.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    found.append(int(stat.parent.name))
            except (OSError, IndexError):
                continue
        return found


@pytest.mark.parametrize("path", ["/sleep", "/spin", "/hold"])
def test_a_blocked_loop_is_healthy_and_ends(path):
    with Program() as program:
        kept = http.client.HTTPConnection("127.0.0.1", program.port, timeout=5)
        kept.request("GET", "/health")
        kept.getresponse().read()
        program.block(path)
        for _ in range(20):
            begin = time.monotonic()
            status, _, body = program.get("/health", timeout=5)
            assert (status, body) == (200, b'{"status":"ok"}')
            kept.request("GET", "/v1/health")
            assert kept.getresponse().read() == b'{"status":"ok"}'
            assert time.monotonic() - begin < PROMPT
        children = program.children()
        begin = time.monotonic()
        program.process.send_signal(signal.SIGTERM)
        program.process.wait(10)
        assert time.monotonic() - begin < 2
        deadline = time.monotonic() + 5
        while any(Path(f"/proc/{child}/fd").exists() and _lives(child) for child in children):
            assert time.monotonic() < deadline, "the process in front is left"
            time.sleep(0.02)


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_does_nothing_ends_by_itself(number):
    with Program() as program:
        program.process.send_signal(number)
        assert program.process.wait(10) == 0


def test_an_end_that_takes_long_is_made_short():
    with Program("slow to end") as program:
        begin = time.monotonic()
        program.process.send_signal(signal.SIGTERM)
        program.process.wait(10)
        assert time.monotonic() - begin < 2


def test_other_requests_reach_the_loop_on_any_connection():
    with Program() as program:
        plain, other = {"Host": "localhost"}, {"Origin": "http://localhost"}
        assert "x-from" not in program.get("/health", plain)[1]
        assert program.get("/health", other)[1]["x-from"] == "the loop"
        connection = socket.create_connection(("127.0.0.1", program.port), timeout=10)
        ask = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        data = ask % b"health" + ask % b"word" + ask % b"health"
        for letter in data[:-1]:  # a byte at a time, then the loop's own
            connection.sendall(bytes([letter]))
        connection.sendall(data[-1:])
        text = b""
        while text.count(b'{"status":"ok"}') < 2:
            text += connection.recv(1 << 16)
        assert text.count(b"200 OK") == 3
        assert b"a word" in text
        connection.close()


def test_a_process_in_front_that_ends_is_started_again():
    with Program() as program:
        (first,) = program.children()
        os.kill(first, signal.SIGKILL)
        assert program.get("/word")[2] == b"a word"
        assert program.get("/health")[0] == 200
        assert first not in program.children()


def test_many_silent_connections_keep_health_from_nobody():
    with Program() as program:
        held = [socket.create_connection(("127.0.0.1", program.port)) for _ in range(400)]
        for connection in held[::2]:
            connection.sendall(b"GET /hea")
        worst = 0.0
        for _ in range(30):
            begin = time.monotonic()
            assert program.get("/health")[0] == 200
            worst = max(worst, time.monotonic() - begin)
        assert worst < PROMPT
        for connection in held:
            connection.close()


def test_a_blocked_loop_takes_what_has_waited_later():
    with Program() as program:
        found = []
        block = program.block("/sleep")
        asking = threading.Thread(
            target=lambda: found.append(_refused(program, "/word")), daemon=True
        )
        asking.start()
        time.sleep(0.2)
        assert program.get("/health")[0] == 200
        assert found == []
        program.process.kill()
        asking.join(10)
        assert found == [True]
        block.close()


def _refused(program, path):
    try:
        program.get(path)
    except OSError:
        return True
    return False
