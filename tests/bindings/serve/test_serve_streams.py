"""Streams that are silent for long, and replies to what is no request for an answer."""

import asyncio
import gzip
import json
import time

import pytest
from serving import N_CTX, local_server, reader
from starlette.testclient import TestClient

from tamis.bindings.drop_in.completion import Counts, Likely, Piece, TokenInfo
from tamis.bindings.serve import replies
from tamis.bindings.serve.api import anthropic, llamacpp, ollama, openai, responses
from tamis.bindings.serve.api.readers import READERS
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.jobs import Progress, PromptTokens
from tamis.bindings.serve.replies import About, Events, Mailbox

CHAT = {"messages": [{"role": "user", "content": "the hand"}], "stream": True}
FORMS = [
    ("chat", openai.Chat, CHAT),
    ("completion", openai.Text, {"prompt": "the", "stream": True}),
    ("llama completion", llamacpp.Completion, {"prompt": "the", "stream": True}),
    ("responses", responses.Responses, {"input": "the hand", "stream": True}),
    ("messages", anthropic.Messages, CHAT | {"max_tokens": 5}),
    ("ollama chat", ollama.Chat, CHAT),
    ("ollama generate", ollama.Generate, {"prompt": "the hand", "stream": True}),
]


def test_a_stream_that_is_read_too_slowly_ends_with_an_error(path, monkeypatch):
    monkeypatch.setattr(replies, "MOST_UNREAD", 20)

    async def run():
        task = READERS["chat"](reader(path), Body(CHAT))
        events = Events(Mailbox())
        emit = events.emitter(0)
        reply = openai.Chat(task, About("tiny", "b0", N_CTX, lambda: reader(path).format))
        text = replies.stream(reply, events, "/v1/chat/completions")
        found = [await anext(text)]
        for i in range(22):  # while the first of them waits for the client
            emit(Piece("x", [], None, (5,), None, Counts(0, 4, i, 0.5, 0.25)))
        return found + [part async for part in text]

    found = asyncio.run(run())
    assert len(found) == 2
    assert "read faster" in found[-1]


def streamed(path, name, form, body, wait):
    """The frames of a stream whose prompt is being read while `wait` goes on."""

    async def run():
        about = About("tiny", "b0", N_CTX, lambda: reader(path).format)
        task = READERS[name](reader(path), Body(body))
        events = Events(Mailbox())
        emit = events.emitter(0)
        found = []

        async def listen():
            async for text in replies.stream(form(task, about), events, "/"):
                found.append(text)

        listening = asyncio.ensure_future(listen())
        await asyncio.wait_for(wait(emit, found), 60)
        emit(Piece("Hi", [], "stop", (5,), None, Counts(0, 5, 1, 0.1, 0.1)))
        await asyncio.wait_for(listening, 10)
        return found

    return asyncio.run(run())


async def silence(_emit, found):
    """Until the client has heard something four times."""
    n = len(found)
    while len(found) < n + 4:
        await asyncio.sleep(0.01)


async def reading(emit, found):
    """The same, while more and more of the prompt has been read."""
    n, done = len(found), 0
    while len(found) < n + 4:
        emit(Progress(done, 10_000, 0))
        done += 1
        await asyncio.sleep(0.01)


async def nothing(_emit, _found):
    pass


@pytest.mark.parametrize(("name", "form", "body"), FORMS, ids=[name for name, *_ in FORMS])
def test_a_client_hears_that_a_long_prompt_is_being_read(path, monkeypatch, name, form, body):
    monkeypatch.setattr(replies, "QUIET", 0.05)
    usual = streamed(path, name, form, body, nothing)
    for wait in (silence, reading):
        found = streamed(path, name, form, body, wait)
        assert len(found) >= len(usual) + 2, "the first may be the role of a message"
        for text in filter(None, found):
            assert text.endswith("\n")
            assert all(line[:1] in ("d", "e", ":", "{", "") for line in text.split("\n"))


def test_openais_streams_have_comments_and_no_empty_chunks(path, monkeypatch):
    monkeypatch.setattr(replies, "QUIET", 0.05)
    found = streamed(path, *FORMS[0], silence)
    assert ": still here\n\n" in found
    data = [json.loads(t[6:]) for t in found if t.startswith("data: {")]
    assert all(chunk["choices"] for chunk in data)


def test_a_method_that_a_path_has_not_is_named(client):
    found = client.get("/v1/chat/completions")
    assert (found.status_code, found.headers["allow"]) == (405, "POST")
    assert found.json()["error"]["code"] is None
    assert client.get("/v1/none").json()["error"]["code"] == "not_found"
    for path in ("/", "/v1/models", "/api/tags", "/api/version", "/health"):
        found = client.head(path)
        assert (found.status_code, found.content) == (200, b"")


def test_a_body_that_is_compressed_is_refused_by_that_name(client):
    data = gzip.compress(json.dumps({"content": "a"}).encode())
    kind = {"Content-Type": "application/json"}
    found = client.post("/tokenize", content=data, headers=kind | {"Content-Encoding": "gzip"})
    assert found.status_code == 415
    assert "compressed (gzip)" in found.json()["error"]["message"]
    plain = client.post(
        "/tokenize", content=b'{"content": "a"}', headers=kind | {"Content-Encoding": "identity"}
    )
    assert plain.status_code == 200


def test_without_the_page_clients_find_a_server_all_the_same(engine):
    server = local_server(engine, [engine.session(n_ctx=64)], Settings(page=False))
    with TestClient(server.app, base_url="http://localhost") as client:
        found = client.get("/")
        assert (found.status_code, found.text) == (200, "tamis is running")
        assert client.head("/").status_code == 200
    server.stop()
    server.close()


def test_the_logprobs_of_a_long_prompt_keep_nobody_waiting(path):
    """They are one event, as of OpenAI: of 30,000 tokens, each with its 20 likeliest others."""
    likely = [Likely(j, b"other%d" % j, -0.125 * j) for j in range(20)]
    token = TokenInfo(5, b"word", -0.5, likely)
    body = {"prompt": "the hand", "echo": True, "logprobs": 20, "stream": True}

    async def run():
        task = READERS["completion"](reader(path), Body(body))
        reply = openai.Text(task, About("tiny", "b0", N_CTX, lambda: reader(path).format))
        events, found, worst = Events(Mailbox()), [], 0.0
        emit = events.emitter(0)

        async def listen():
            async for text in replies.stream(reply, events, "/v1/completions"):
                found.append(text)

        listening = asyncio.ensure_future(listen())
        for _ in range(30):
            emit(PromptTokens([token] * 1000))
        emit(Piece("Hi", [token], "stop", (5,), None, Counts(0, 5, 1, 0.1, 0.1)))
        while not listening.done():
            begin = time.thread_time()  # the loop's own, whatever else the machine does
            await asyncio.sleep(0.001)
            worst = max(worst, time.thread_time() - begin)
        await listening
        return found, worst

    found, worst = asyncio.run(run())
    chunks = [json.loads(text.removeprefix("data: ")) for text in found[:-1]]
    logprobs = chunks[0]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["word"] * 30_000
    assert len(logprobs["top_logprobs"][-1]) == 21, "the token's own, too"
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks[1:]]
    assert sum(len(more["tokens"]) for more in told if more) == 1, "the prompt is sent once"
    assert worst < 0.3
