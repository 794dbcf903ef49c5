"""A document that a server holds compressed: for prompts that begin with it, and no others."""

import queue

import pytest
from serving import local_server
from starlette.testclient import TestClient
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.drop_in.completion import Piece, Request
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.jobs import Keeping, Kept
from tamis.bindings.serve.worker import Completion, Worker
from tamis.engine.engine import Engine
from tamis.engine.prompt_cache import PromptCache
from tamis.sampling.chain import Sampler, SamplerParams

MIB = 1 << 20
DOCUMENT = [3 + (7 * i) % 90 for i in range(150)]


def sessions(engine, n):
    return [engine.session(n_ctx=512, n_ubatch=64) for _ in range(n)]


def asked(engine, prompt, n, scope="", **fields):
    events = queue.SimpleQueue()
    sampler = Sampler(SamplerParams(temp=0), engine.hp.n_vocab)
    request = Request(prompt, n, "tiny", **fields)
    job = Completion(prompt, events.put, request=request, sampler=sampler, scope=scope)
    return job, events


def tokens_of(events):
    """The tokens of an answer."""
    found = []
    while True:
        event = events.get(timeout=60)
        assert not isinstance(event, ApiError), event
        if isinstance(event, Piece):
            found += event.ids
            if event.finish:
                return found


def run(worker, engine, prompt, n=4, scope="", **fields):
    """The answer's tokens, and how many of the prompt's were held."""
    job, events = asked(engine, prompt, n, scope, **fields)
    worker.submit([job])
    return tokens_of(events), job.n_cached


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("m") / "m.gguf", TinySpec())
    engine = Engine.load(path, n_threads=1)
    yield engine
    engine.close()


@pytest.fixture
def worker(engine):
    worker = Worker(engine, sessions(engine, 2), cache=PromptCache(64 * MIB))
    yield worker
    worker.stop()
    assert worker.join(30)


def compressed(worker, slot=0, keep="0.4", scope=""):
    events = queue.SimpleQueue()
    worker.submit([Keeping([], events.put, action="compress", path=keep, slot=slot, scope=scope)])
    return events.get(timeout=60)


def held(worker, engine):
    """The slot that holds the document after it was read."""
    run(worker, engine, DOCUMENT, 1)
    return next(i for i, s in enumerate(worker.slots()) if s.n_past >= len(DOCUMENT))


def test_prompts_that_begin_with_the_document_go_on_after_what_is_kept(worker, engine):
    found = compressed(worker, held(worker, engine))
    assert isinstance(found, Kept)
    assert found.n_token < found.n_byte
    first, n = run(worker, engine, [*DOCUMENT, 5, 6, 7])
    assert n <= 60 + 1
    again, m = run(worker, engine, [*DOCUMENT, 5, 6, 7])
    assert (again, m >= n) == (first, True)
    assert worker.counts.compressed_tokens == 2 * (found.n_byte - found.n_token)


def test_it_comes_back_from_the_prompt_cache(worker, engine):
    found = compressed(worker, held(worker, engine))
    first, _ = run(worker, engine, [*DOCUMENT, 5, 6, 7])
    for i in range(4):  # both slots hold other texts
        run(worker, engine, [9 + i] * 140)
    again, n = run(worker, engine, [*DOCUMENT, 5, 6, 7])
    assert (again, n >= found.n_token) == (first, True)


def test_others_read_their_own_text(worker, engine):
    compressed(worker, held(worker, engine))
    other = [*DOCUMENT[:-1], 2, 5, 6]
    fresh = Worker(engine, sessions(engine, 1))
    expected, _ = run(fresh, engine, other)
    fresh.stop()
    assert run(worker, engine, other)[0] == expected
    job, events = asked(engine, [*DOCUMENT, 5], 4, "another key")
    worker.submit([job])
    tokens_of(events)
    assert job.n_cached == 0


def test_a_slot_of_another_key_stays_as_it_is(worker, engine):
    slot = held(worker, engine)
    refused = compressed(worker, slot, scope="another key")
    assert isinstance(refused, ApiError)
    assert refused.status == 400
    assert worker.slots()[slot].n_past >= len(DOCUMENT)


def test_over_http(engine):
    server = local_server(engine, sessions(engine, 2))
    with TestClient(server.app, base_url="http://localhost") as client:
        text = "The fox ran over the hill. " * 4
        client.post("/completion", json={"prompt": text, "n_predict": 0, "id_slot": 0})
        reply = client.post("/slots/0?action=compress", json={"keep": 0.5})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        assert abs(found["n_kept"] - found["n_tokens"] / 2) <= 1
        assert client.post("/slots/0?action=compress", json={"keep": 7}).status_code == 400
        more = client.post("/completion", json={"prompt": text + "Why?", "n_predict": 2})
        assert more.status_code == 200
