"""Unusual clients beside those of load_serve: grammars, tools, embeddings, hostile and slow ones.

Each must get a certain answer: the one it got alone, or a refusal in time.
"""

import base64
import http.client
import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

MOST = (4 << 20) - 4096  # bytes of a body
SLOW = 60  # the time that a refusal may take
CITIES = ["Paris", "Rome", "Oslo"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
WORDS = ["red ship", "blue house", "the capital of France", "rain and wind"]
CLOSE = 1e-3  # distance of an embedding from the one alone; both have length 1


class Strangers:
    """Counts what these clients asked, and what was wrong. `run` is the function of a thread.

    pause: seconds of a client between its requests.
    """

    def __init__(self, port: int, pause: float = 0) -> None:
        self._port, self._pause = port, pause
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.asked: list[tuple[str, float, float]] = []  # each request's kind, begin and end
        self._lock = threading.Lock()
        self._vectors = [self._embed(text) for text in WORDS]
        self._kinds: list[tuple[str, Callable[[int], str | None]]] = [
            ("grammar", self._grammar),
            ("embedding", self._embedding),
            ("tool", self._tool),
            ("deep", self._deep),
            ("costly", self._costly),
            ("too_long", self._too_long),
            ("no_json", self._no_json),
            ("half_open", self._half_open),
            ("left", self._left),
            ("at_limits", self._at_limits),
            ("spaces", self._spaces),
        ]

    def run(self, me: int, end: float) -> None:
        """Ask one after another until the time is over."""
        turn = me
        while time.monotonic() < end:
            name, ask = self._kinds[turn % len(self._kinds)]
            turn += 1
            time.sleep(self._pause)
            begin = time.monotonic()
            try:
                wrong = ask(turn)
            except Exception as error:
                wrong = repr(error)
            with self._lock:
                self.asked.append((name, begin, time.monotonic()))
                self.counts["busy" if wrong == "busy" else name] += 1
                if wrong not in (None, "busy"):
                    self.wrong.append(f"{name}: {wrong}")

    def _post(self, path: str, body: bytes) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def _chat(self, turn: int, **more: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": f"What is the weather in {CITIES[turn % 3]}?"}]
        body = {"messages": messages, "temperature": 1.0, "seed": turn, "max_tokens": 60} | more
        return self._post("/v1/chat/completions", json.dumps(body).encode())

    def _grammar(self, turn: int) -> str | None:
        schema = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, reply = self._chat(turn, response_format=form, n=1 + turn % 2)
        if status != 200:
            return "busy" if status == 429 else f"status {status}: {reply}"
        for choice in reply["choices"]:
            text, reason = choice["message"]["content"], choice["finish_reason"]
            if reason == "stop" and json.loads(text)["city"] not in CITIES:
                return repr(text)
        return None

    def _tool(self, turn: int) -> str | None:
        choice = {"type": "function", "function": {"name": "get_weather"}}
        status, reply = self._chat(turn, tools=[WEATHER], tool_choice=choice)
        if status != 200:
            return "busy" if status == 429 else f"status {status}: {reply}"
        found = reply["choices"][0]
        if found["finish_reason"] == "length":
            return None
        call = json.loads(found["message"]["tool_calls"][0]["function"]["arguments"])
        right = call["city"] in CITIES and isinstance(call["days"], int) and call["days"] <= 9
        return None if right else repr(call)

    def _embed(self, text: str) -> list[float] | None:
        status, reply = self._post("/v1/embeddings", json.dumps({"input": text}).encode())
        vector: list[float] = reply["data"][0]["embedding"] if status == 200 else []
        return None if status == 429 else vector

    def _embedding(self, turn: int) -> str | None:
        right, found = self._vectors[turn % len(WORDS)], self._embed(WORDS[turn % len(WORDS)])
        if found is None or right is None:
            return "busy"
        return None if math.dist(right, found) < CLOSE else "another vector"

    def _refused(self, path: str, body: bytes) -> str | None:
        begin = time.monotonic()
        status, reply = self._post(path, body)
        if status == 429:
            return "busy"
        seconds = time.monotonic() - begin
        return None if status == 400 and seconds < SLOW else f"{status} in {seconds:.1f} s: {reply}"

    def _deep(self, turn: int) -> str | None:
        """Ask with a schema of 6,000 references, the last to a string: the answer is a string."""
        defs: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(6000)}
        schema = {"$ref": "#/$defs/d0", "$defs": defs | {"d6000": {"type": "string"}}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, reply = self._chat(turn, response_format=form, max_tokens=8)
        if status != 200:
            return "busy" if status == 429 else f"status {status}: {reply}"
        text = reply["choices"][0]["message"]["content"].lstrip()
        return None if text.startswith('"') or not text else repr(text)

    def _costly(self, turn: int) -> str | None:
        """Ask with patterns whose automata take minutes to compile: a limit refuses them."""
        schema = {"oneOf": [{"type": "string", "pattern": f"^{'.' * i}x.*$"} for i in range(150)]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
        return self._refused("/v1/chat/completions", json.dumps(body).encode())

    def _too_long(self, turn: int) -> str | None:
        return self._refused("/v1/completions", b'{"prompt": "' + b"word " * 600_000 + b'"}')

    def _no_json(self, turn: int) -> str | None:
        return self._refused("/v1/completions", b'{"prompt": ' + b"[" * (100 << turn % 9))

    def _at_limits(self, turn: int) -> str | None:
        """Send bodies of the largest size that are as slow to read as possible."""
        html = base64.b64encode(b"<!--" * 500_000).decode()
        bodies = [
            ("/v1/chat/completions", b"[" * MOST),
            ("/tokenize", b'{"a":[' + b"[]," * (MOST // 4) + b"[]]}"),
            ("/v1/messages", b'{"a":"' + b"\\ud800" * (MOST // 7) + b'"}'),
            ("/v1/embeddings", b'{"model":"' + b'\\"' * (MOST // 2)),
            ("/extract", json.dumps({"name": "a.html", "data": html}).encode()),
        ]
        path, body = bodies[turn // 2 % len(bodies)]
        status, reply = self._post(path, body)
        if status == 429:
            return "busy"
        # what is not "content" is nothing to tokenize, and no error, as in llama.cpp
        empty = reply == {"tokens": []} if path == "/tokenize" else path == "/extract"
        right = status == 200 if empty else 400 <= status < 500
        return None if right else f"{path}: status {status}: {str(reply)[:200]}"

    def _spaces(self, turn: int) -> str | None:
        """Send a call without an end: the client determines what the parser of calls reads."""
        grammar = 'root ::= "<function=" " "{200} "x"'
        status, reply = self._chat(turn, tools=[WEATHER], grammar=grammar, max_tokens=100)
        if status != 200:
            return "busy" if status == 429 else f"status {status}: {reply}"
        return None

    def _half_open(self, turn: int) -> str | None:
        """Open connections with incomplete requests.

        They are closed here, or by the server when old.
        """
        held = [socket.create_connection(("127.0.0.1", self._port), 30) for _ in range(40)]
        for connection in held:
            connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: local")
        time.sleep(0.5)
        for connection in held:
            connection.close()
        return None

    def _left(self, turn: int) -> str | None:
        """Close a stream with a grammar after its first bytes, and a long text at once."""
        body = {"prompt": "a", "max_tokens": 200, "stream": True, "grammar": "root ::= [a-z ]*"}
        for path, data in (
            ("/v1/completions", json.dumps(body).encode()),
            ("/tokenize", b'{"content": "' + b"abcdefgh" * 100_000 + b'"}'),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            if path != "/tokenize":
                connection.getresponse().read(16)
            connection.close()
        return None
