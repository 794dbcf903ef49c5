"""Nothing that a client sends keeps the loop from others: /health is answered throughout.

A plain request for /health is answered by the process in front; with an Origin it is the loop's.
"""

import base64
import contextlib
import http.client
import itertools
import json
import math
import threading
import time

import numpy as np
import pytest
from request_bodies import TOOL
from serve_process import ServeProcess

from tamis.bindings.serve.http.json_reply import JsonReply
from tamis.bindings.serve.json_text import in_parts

LIMITS = {"front": 0.5, "loop": 0.5, "ordinary": 2.0}  # seconds
MOST = (4 << 20) - 4096  # bytes of a body
POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/completion",
    "/infill",
    "/v1/embeddings",
    "/embeddings",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/extract",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/v1/chat/completions/input_tokens",
    "/rerank",
    "/slots/0?action=save",
    "/lora-adapters",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/show",
    "/api/pull",
]
GETS = (
    "/ /v1/models /v1/models/x /props /slots /lora-adapters /api/tags /api/version /api/ps /ready"
)


def text(data):
    return json.dumps(data).encode()


def hostile():
    """Bodies at their limits, for every route."""
    yield b"[" * MOST
    yield b'{"a":' * (MOST // 5)
    yield b'{"a":[' + b"[]," * (MOST // 4) + b"[]]}"
    yield b'{"a":"' + b"\\ud800" * (MOST // 7) + b'"}'
    yield b"{" + b",".join(b'"%d":0' % i for i in range(MOST // 12)) + b"}"
    yield b'{"model":"' + b'\\"' * (MOST // 2)


def costly():
    """Right requests that take as much as they may, by path."""
    word = "the hand over there, "
    long = word * (MOST // 2 // len(word))
    chat = [{"role": "user", "content": "hi"}] * 4000
    odd = "".join(map(chr, range(0x4E00, 0x9000)))
    yield "/tokenize", {"content": odd * 20, "with_pieces": True}
    yield "/tokenize", {"content": long}
    yield "/detokenize", {"tokens": [5] * 1900}
    yield "/v1/chat/completions", {"messages": chat, "max_tokens": 2}
    yield "/apply-template", {"messages": chat}
    yield "/extract", {"name": "a.html", "data": base64.b64encode(b"<!--" * 500_000).decode()}
    yield "/extract", {"name": "a.html", "data": base64.b64encode(b"<a b='" * 300_000).decode()}
    yield "/extract", {"name": "a.txt", "data": base64.b64encode(long.encode()).decode()}
    yield "/embeddings", {"content": [word * 200] * 4}
    yield "/v1/embeddings", {"input": [word * 100] * 30}
    asked = {"prompt": word * 250, "echo": True, "logprobs": 20, "max_tokens": 20, "n": 4}
    yield "/v1/completions", asked
    yield "/v1/completions", asked | {"stream": True}
    spaces = 'root ::= "<function=" " "{1600} "x"'
    yield (
        "/v1/chat/completions",
        {"messages": chat[:1], "tools": [TOOL], "grammar": spaces, "max_tokens": 1700},
    )
    deep = {"type": "object"}
    for _ in range(100):
        deep = {"anyOf": [deep, {"type": "array", "items": deep}]}
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [long[:200_000]]}}}
    yield "/v1/chat/completions", {"messages": chat[:1], "response_format": form, "max_tokens": 5}
    yield "/rerank", {"query": "a", "documents": [word * 100] * 1000}
    yield "/v1/chat/completions", {"messages": chat[:1], "stop": ["a" * 256] * 16, "max_tokens": 9}


class Watch:
    """A second client, which asks for /health and an ordinary route all the time."""

    ORDINARY = ("POST", "/tokenize", b'{"content":"the hand"}')

    def __init__(self, port):
        self._port, self._over = port, threading.Event()
        self.worst = dict.fromkeys(LIMITS, 0.0)
        self.n = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        health = ("GET", "/health", b"")
        calls = {
            "front": (*health, {}),
            "loop": (*health, {"Origin": "http://localhost"}),
            "ordinary": (*self.ORDINARY, {}),
        }
        while not self._over.is_set():
            for name, call in calls.items():
                begin = time.monotonic()
                assert asked(self._port, *call) == 200
                self.worst[name] = max(self.worst[name], time.monotonic() - begin)
                self.n += 1
            time.sleep(0.02)

    def late(self):
        """What took longer than it may since the last call of this."""
        found = {name: took for name, took in self.worst.items() if took >= LIMITS[name]}
        self.worst = dict.fromkeys(LIMITS, 0.0)
        return found

    def end(self):
        self._over.set()
        self._thread.join()


def asked(port, method, path, data, headers=None, timeout=60):
    head = {"Content-Type": "application/json"} | (headers or {})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, data, head)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def calls(seed):
    """Every route with a body, head or query at its limit; seed: which body each route gets."""
    bodies = itertools.islice(itertools.cycle(hostile()), seed, None)
    yield from (("POST", where, next(bodies), {}) for where in POSTS)
    yield from (("POST", where, text(body), {}) for where, body in costly())
    long = {"X-Long": "a, " * 15_000}
    yield from (("GET", where, b"", long) for where in GETS.split())
    yield from (("GET", f"{where}?{'a=b&' * 12_000}", b"", {}) for where in GETS.split())


@pytest.mark.parametrize("several", [False, True], ids=["one model", "several"])
def test_no_input_at_its_limit_keeps_the_loop_from_others(path, tmp_path, several):
    flags = ["--timeout-prepare", "2", "--parallel", "2", "--slot-save-path", str(tmp_path)]
    if several:
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "tiny.gguf").symlink_to(path)
    where = None if several else path
    env = {"TAMIS_MODELS": str(tmp_path / "models")}
    slow = {}
    with ServeProcess(where, tmp_path, *flags, env=env) as server:
        assert asked(server.port, *Watch.ORDINARY) == 200
        watch = Watch(server.port)
        try:
            for method, where_, data, headers in calls(3 * several):
                for _ in range(3):  # the machine's own delays do not come again, an input's do
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        status = asked(server.port, method, where_, data, headers)
                        assert status != 500, (where_, data[:80])
                    if not (late := watch.late()):
                        break
                else:
                    slow[f"{where_[:40]} {data[:40]!r}"] = late
        finally:
            watch.end()
    assert not slow
    assert watch.n > 50


VALUES = [
    {},
    [],
    {"a": []},
    {"a": {}, "b": [{}, [], None, True, 1.5, "é\n"]},
    list(range(1000)),
    [[0.5] * 700] * 3,
    {"a": [{"b": list(range(300))}] * 300},
    {1: "a", "b": (1, 2)},
    "x",
    None,
    {"a": "\ud800", "b": [math.nan, 1.0]},
    [np.float64(0.5)] * 3,
]


@pytest.mark.parametrize("value", VALUES)
def test_what_is_written_in_parts_is_what_is_written_at_once(value):
    assert in_parts(value) == JsonReply(value).body


def test_many_numbers_are_written_without_keeping_others_waiting():
    """Other threads have their turn every 5 ms, or where one call of C ends."""
    over, worst = threading.Event(), 0.0

    def look():
        nonlocal worst
        while not over.is_set():
            begin = time.monotonic()
            time.sleep(0.001)
            worst = max(worst, time.monotonic() - begin)

    thread = threading.Thread(target=look)
    thread.start()
    in_parts({"data": [{"embedding": [0.123456789] * 1_000_000}]})
    over.set()
    thread.join()
    assert worst < 0.3
