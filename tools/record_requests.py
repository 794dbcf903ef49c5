"""Requests of a client, recorded without its texts, and built again from the record.

`python -m tamis.tools.record_requests RECORD.json --to http://127.0.0.1:8080` listens on a port and
passes on what a client sends to a server; at Ctrl-C it writes the record. This holds the structure
of the requests, names of tools, and the sizes of texts: no text, path, address, id or parameter's
name of the client.
"""

import argparse
import http.client
import json
import re
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEPT = frozenset(("$schema", "type", "role", "model", "pattern", "format"))
WORD = re.compile(r"[A-Za-z][\w.-]{0,39}")
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}|[0-9a-f]{16}")
BILLING = re.compile(r"x-[\w-]+: (?:\w+=[\w.-]+; ?)+")
VALUE = re.compile(r"[\w.,/+*=; -]{1,300}")
NOT_KEPT = frozenset(("host", "connection", "content-length", "authorization", "x-api-key"))
LEAST = 64  # characters that two texts have in common, to be recorded as such
WORDS = ("the", "file", "holds", "one", "more", "line", "that", "a", "test", "reads", "and")


class Recorder:
    """Makes a record of requests; what they have in common is in it once."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._sizes: list[Any] = []  # characters, or [characters, an earlier text, in common]
        self._ids: dict[str, int] = {}
        self._names: dict[str, str] = {}  # of parameters of tools
        self._requests: list[dict[str, Any]] = []
        self._first: dict[str, Any] = {}
        self._about: dict[str, Any] = {}

    def add(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
        """Add a request with a JSON object."""
        found = {key: self._value(key, value) for key, value in body.items()}
        if not self._requests:
            self._first = found
            agent = headers.get("User-Agent", headers.get("user-agent", "unknown"))
            self._about = {"client": agent.split()[0], "path": path, "headers": _plain(headers)}
        same = self._requests and {k for k, v in self._first.items() if found.get(k, v) == v}
        self._requests.append({k: v for k, v in found.items() if k not in (same or ())})

    def record(self) -> dict[str, Any]:
        """The record, for JSON."""
        return {**self._about, "texts": self._sizes, "requests": self._requests}

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("role") == "assistant":
                return self._answer(value)
            named = key in ("properties", "input")
            return {self._name(k) if named else k: self._value(k, v) for k, v in value.items()}
        if isinstance(value, list):
            if key == "required" and all(isinstance(item, str) for item in value):
                return [self._name(item) for item in value]
            return [self._value("" if isinstance(item, dict) else key, item) for item in value]
        return self._text(key, value) if isinstance(value, str) else value

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, f"p{len(self._names)}")

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """An assistant's message, whose first text is to be the one that the server gave."""
        found = {k: self._value(k, v) for k, v in message.items() if k != "content"}
        content = message.get("content")
        if not isinstance(content, list):
            return found | {"content": {"$answer": True} if content else content}
        parts, rest = list[Any](), True
        for part in content:
            made = self._value("content", part)
            if rest and isinstance(part, dict) and "text" in part:
                made, rest = made | {"text": {"$answer": True}}, False
            parts.append(made)
        return found | {"content": parts}

    def _text(self, key: str, text: str) -> Any:
        if BILLING.fullmatch(text) or not text:
            return text
        if ID.search(text) and " " not in text and len(text) < 80:
            return {"$id": self._ids.setdefault(text, len(self._ids))}
        if key in KEPT or WORD.fullmatch(text):
            return text
        if text not in self._texts:
            common = [_n_common(text, other) for other in self._texts]
            most = max(common, default=0)
            size = [len(text), common.index(most), most] if most >= LEAST else len(text)
            self._texts.append(text)
            self._sizes.append(size)
        return {"$text": self._texts.index(text)}


def _plain(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that name no machine and no person."""
    return {
        name: value.split(" (")[0]
        for name, value in headers.items()
        if name.lower() not in NOT_KEPT
        and VALUE.fullmatch(value.split(" (")[0])
        and not ID.search(value)
    }


def _n_common(a: str, b: str) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def texts_of(record: Mapping[str, Any], scale: int = 1) -> list[str]:
    """A text in place of each of a record, as long or `scale` times shorter."""
    found: list[str] = []
    for i, size in enumerate(record["texts"]):
        n, other, common = size if isinstance(size, list) else (size, 0, 0)
        start = found[other][: common // scale] if common else ""
        found.append((start + _written(i, n))[: max(1, n // scale)])
    return found


def _written(i: int, n: int) -> str:
    """Words of at least n characters, which differ from those of other numbers."""
    words, length = [f"{i}."], 0
    while length < n:
        word = WORDS[(i * 7 + len(words) * (i % 5 + 1)) % len(WORDS)]
        words.append(word)
        length += len(word) + 1
    return " ".join(words)


def bodies(record: Mapping[str, Any], answers: list[str], scale: int = 1) -> Iterator[Any]:
    """The bodies of a record's requests, each made when it is asked for.

    answers: what the server has said to the requests before; the caller appends to it. A text that
    is missing is "So.".
    """
    texts = texts_of(record, scale)
    for request in record["requests"]:
        said = iter(answers)
        yield _filled(record["requests"][0] | request, texts, said)


def _filled(value: Any, texts: list[str], said: Iterator[str]) -> Any:
    if isinstance(value, list):
        return [_filled(item, texts, said) for item in value]
    if not isinstance(value, dict):
        return value
    if "$text" in value:
        return texts[value["$text"]]
    if "$id" in value:
        return f"id_{value['$id']}"
    if "$answer" in value:
        return next(said, "") or "So."
    return {key: _filled(item, texts, said) for key, item in value.items()}


class _Proxy(BaseHTTPRequestHandler):
    """Passes requests on, and gives a recorder those that are JSON objects."""

    protocol_version = "HTTP/1.1"
    recorder: Recorder
    host = ""
    lock = threading.Lock()

    def log_message(self, *_arguments: Any) -> None:
        """Write no log."""

    def do_POST(self) -> None:
        """Pass a request on, and its reply back as it arrives."""
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if data:
            with self.lock:
                self.recorder.add(self.path, dict(self.headers.items()), json.loads(data))
        self._pass_on(data)

    def do_GET(self) -> None:
        """Pass a request on."""
        self._pass_on(b"")

    do_HEAD = do_GET

    def _pass_on(self, data: bytes) -> None:
        self.close_connection = True
        upstream = http.client.HTTPConnection(self.host)
        dropped = ("host", "connection", "accept-encoding")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        upstream.request(self.command, self.path, data or None, headers)
        reply = upstream.getresponse()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        while piece := reply.read1(1 << 16):
            self.wfile.write(piece)
            self.wfile.flush()
        upstream.close()


def written(record: Mapping[str, Any]) -> str:
    """A record as JSON, a request a line."""
    lines = [
        f'"{key}": {json.dumps(value, separators=(",", ":"))}'
        for key, value in record.items()
        if key != "requests"
    ]
    requests = ",\n".join(json.dumps(r, separators=(",", ":")) for r in record["requests"])
    return "{" + ",\n".join([*lines, f'"requests": [\n{requests}]']) + "}\n"


def main() -> int:
    """Record until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="the file to write")
    parser.add_argument("--to", required=True, metavar="URL", help="the server")
    parser.add_argument("--port", type=int, default=8081, help="where clients are to ask")
    arguments = parser.parse_args()
    _Proxy.recorder, _Proxy.host = Recorder(), urllib.parse.urlsplit(arguments.to).netloc
    with ThreadingHTTPServer(("127.0.0.1", arguments.port), _Proxy) as server:
        sys.stderr.write(f"recording at http://127.0.0.1:{server.server_port}; Ctrl-C writes it\n")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            arguments.record.write_text(written(_Proxy.recorder.record()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
