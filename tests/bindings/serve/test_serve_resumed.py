"""Streams that outlive their connection: what is sent again, to whom, and what ends them."""

import asyncio
import http.client
import json
import socket
import time
import urllib.parse

import pytest
from serve_process import CHAT, ServeProcess
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.serve.http import resumable
from tamis.bindings.serve.http.resumable import HEADER, KeptStream, Resumable

ID = "conv-1::org/a-model"
BODY = {"messages": [{"role": "user", "content": "So?"}], "stream": True, "temperature": 0}
LONG = BODY | {"max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    model = write_tiny_model(folder / "m.gguf", TinySpec(n_ctx=2048))
    (folder / "keys").write_text("one\ntwo\n")
    with ServeProcess(model, folder, "--api-key-file", str(folder / "keys"), "-t", "1") as server:
        yield server


def ask(server, method, path, body=None, key="one", **headers):
    """Status and bytes of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, head)
    reply = connection.getresponse()
    found = reply.status, reply.read()
    connection.close()
    return found


def of(name=ID, start=0):
    return f"/v1/stream?conv_id={urllib.parse.quote(name, safe='')}&from={start}"


def begun(server, body, name=ID):
    """A connection on which an answer has begun."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer one\r\nX-Conversation-Id: {name}\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    assert b" 200 " in connection.recv(4096)
    return connection


def test_a_finished_stream_is_sent_again_from_any_byte_until_it_is_deleted(served):
    status, whole = ask(served, "POST", CHAT, BODY | {"max_tokens": 8}, **{HEADER: ID})
    assert (status, whole[-14:]) == (200, b"data: [DONE]\n\n")
    for start in (0, 7, len(whole) - 1, len(whole)):
        assert ask(served, "GET", of(start=start)) == (200, whole[start:])
    for _ in range(2):
        assert ask(served, "DELETE", of()) == (204, b"")
        assert ask(served, "GET", of())[0] == 404


def test_an_answer_whose_client_has_gone_is_written_to_its_end(served):
    begun(served, LONG).close()
    status, whole = ask(served, "GET", of())
    assert status == 200
    assert whole.endswith(b"data: [DONE]\n\n")
    events = [json.loads(e[6:]) for e in whole.split(b"\n\n") if e[:7] == b"data: {"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert ask(served, "GET", of()) == (200, whole)


def test_without_the_header_an_answer_ends_with_its_connection_and_is_not_kept(served):
    assert ask(served, "POST", CHAT, BODY | {"max_tokens": 2})[0] == 200
    assert ask(served, "GET", of("unknown"))[0] == 404
    quiet = {HEADER: "quiet"}  # what is no stream is answered as ever
    status, reply = ask(served, "POST", CHAT, BODY | {"max_tokens": 2, "stream": False}, **quiet)
    assert (status, json.loads(reply)["object"]) == (200, "chat.completion")
    assert ask(served, "GET", of("quiet"))[0] == 404


def test_a_deletion_ends_the_answer_and_its_readers(served):
    name = "to-end"
    endless = BODY | {"max_tokens": 1900, "ignore_eos": True}
    connection = begun(served, endless, name)
    assert ask(served, "DELETE", of(name))[0] == 204
    while connection.recv(65536):
        pass
    connection.close()
    end = time.monotonic() + 30
    while any(slot["is_processing"] for slot in json.loads(ask(served, "GET", "/slots")[1])):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert ask(served, "GET", of(name))[0] == 404


def test_streams_are_their_key_s_own(served):
    name = "mine::m"
    ask(served, "POST", CHAT, BODY | {"max_tokens": 2}, **{HEADER: name})
    assert ask(served, "GET", of(name), key="two")[0] == 404
    assert ask(served, "DELETE", of(name), key="two")[0] == 204
    assert ask(served, "GET", of(name))[0] == 200
    asked = {"conversation_ids": ["mine", "other", ""]}
    (found,) = json.loads(ask(served, "POST", resumable.LOOKUP, asked)[1])
    assert (found["conversation_id"], found["is_done"]) == (name, True)
    assert found["total_bytes"] == len(ask(served, "GET", of(name))[1])
    assert found["started_at"] <= found["completed_at"]
    assert json.loads(ask(served, "POST", resumable.LOOKUP, asked, key="two")[1]) == []
    assert ask(served, "GET", of(name), key="none")[0] == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "wrong"),
    [
        ("GET", "/v1/stream", None, "conv_id has 0 characters, expected 1 to 512"),
        ("GET", of("x" * 513), None, "conv_id has 513 characters"),
        ("GET", of("kept", "-1"), None, "from is '-1', expected a number of bytes"),
        ("GET", of("kept", "9" * 19), None, "expected a number of bytes"),
        ("POST", resumable.LOOKUP, ["kept"], "conversation_ids is no list of texts"),
        ("POST", resumable.LOOKUP, {"conversation_ids": [1]}, "is no list of texts"),
    ],
)
def test_a_wrong_request_is_an_error_that_names_what_is_wrong(served, method, path, body, wrong):
    ask(served, "POST", CHAT, BODY | {"max_tokens": 1}, **{HEADER: "kept"})
    status, reply = ask(served, method, path, body)
    assert (status, wrong in json.loads(reply)["error"]["message"]) == (400, True), reply


class App:
    """An application whose reply waits for `go`, and ends with its connection."""

    def __init__(self):
        self.go, self.began = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send):
        await receive()
        self.began.set()
        going, gone = (asyncio.ensure_future(w) for w in (self.go.wait(), receive()))
        await asyncio.wait([going, gone], return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        gone.cancel()
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def run(app, method, path, name="", query=b""):
    """Status and bytes of a reply to a client that stays."""
    sent, first = [], [{"type": "http.request", "body": b"{}"}]

    async def receive():
        if first:
            return first.pop()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    headers = [(HEADER.encode(), name.encode())] if name else []
    scope = {"type": "http", "method": method, "path": path, "query_string": query}
    await app(scope | {"headers": headers, "tamis.owner": 0}, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


def test_a_request_that_waits_is_resumed_later_and_one_that_is_cancelled_is_an_error():
    async def main():
        app = App()
        kept = Resumable(app, 10)
        waiting = asyncio.create_task(run(kept, "POST", CHAT, "a"))
        await app.began.wait()
        assert (await run(kept, "GET", "/v1/stream", query=b"conv_id=a"))[0] == 503
        assert (await run(kept, "DELETE", "/v1/stream", query=b"conv_id=a"))[0] == 204
        status, body = await waiting
        assert status == 400
        assert "cancelled" in json.loads(body)["error"]["message"]
        app.go.set()
        assert await run(kept, "POST", CHAT, "a") == (200, b"data: 1\n\n")
        assert await run(kept, "GET", "/v1/stream", query=b"conv_id=a") == (200, b"data: 1\n\n")

    asyncio.run(main())


def test_streams_expire_and_there_are_so_many_at_most(monkeypatch):
    monkeypatch.setattr(resumable, "MOST_STREAMS", 2)

    async def main():
        app = App()
        app.go.set()
        kept = Resumable(app, 10)
        for name in "abc":
            await run(kept, "POST", CHAT, name)
        found = [
            (await run(kept, "GET", "/v1/stream", query=f"conv_id={n}".encode()))[0] for n in "abc"
        ]
        assert found == [404, 200, 200]
        monkeypatch.setattr(resumable, "KEPT_S", 0)
        await run(kept, "POST", CHAT, "c")
        await asyncio.sleep(0.01)
        assert (await run(kept, "GET", "/v1/stream", query=b"conv_id=c"))[0] == 404
        app.go.clear()
        running = [asyncio.create_task(run(kept, "POST", CHAT, name)) for name in "de"]
        await asyncio.sleep(0.01)
        assert (await run(kept, "POST", CHAT, "f"))[0] == 429
        app.go.set()
        assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]

    asyncio.run(main())


def test_a_lookup_whose_body_does_not_come_ends():
    async def main():
        sent = []

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/streams/lookup", "headers": []}
        await Resumable(App(), 0.01)(scope | {"tamis.owner": 0}, receive, send)
        assert sent[0]["status"] == 408

    asyncio.run(main())


def test_of_a_long_stream_the_oldest_bytes_are_dropped(monkeypatch):
    monkeypatch.setattr(resumable, "MOST_BYTES", 8)

    async def main():
        kept = KeptStream()
        kept.add(b"0123456789")
        assert (kept.first, kept.total) == (2, 10)

        async def rest(offset):
            return b"".join([part async for part in kept.read(offset)])

        reading = asyncio.create_task(rest(4))
        await asyncio.sleep(0)
        kept.add(b"ab")
        kept.end()
        assert await reading == b"456789ab"
        assert await rest(1) == b""
        assert await rest(12) == b""

    asyncio.run(main())
