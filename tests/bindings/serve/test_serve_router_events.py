"""Events of a router's models, and models that are fetched, removed and read anew over HTTP."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from tamis.bindings.serve.http import model_events, ollama_routes
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.model_events import ModelEvents
from tamis.bindings.serve.http.router import Router
from tamis.bindings.serve.models import Models, Offer
from tamis.fetch import registry


class Source:
    """Two models, of which a reload may take one away."""

    def __init__(self):
        self.names, self.error = ["a", "b"], None

    def offers(self):
        return [Offer(name, f"/none/{name}", 1, 0.0, hidden=name == "h") for name in self.names]

    def sees(self, offer):
        return False

    def reload(self):
        if self.error is not None:
            raise self.error
        self.names = ["b", "c", "h"]


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def router(source):
    models = Models(source, keep=60, n_byte=None, n_queue=8, log=lambda line: None)
    return Router(models, Settings(), lambda line: None, None)


@pytest.fixture
def told(router, monkeypatch):
    """The events that clients get."""
    lines = []
    monkeypatch.setattr(router._events, "tell", lambda *event: lines.append(event))
    return lines


@pytest.fixture
def client(router):
    with TestClient(router.app, base_url="http://localhost") as client:
        yield client


def ids(client, query=""):
    return [each["id"] for each in client.get(f"/models{query}").json()["data"]]


def read(stream, n):
    async def lines():
        return [json.loads((await anext(stream)).removeprefix("data: ")) for _ in range(n)]

    return lines()


def test_clients_get_what_happens_after_they_came():
    async def work():
        events = ModelEvents()
        events.tell("model_status", "early", {"status": "loaded"})
        streams = [events.stream() for _ in range(2)]
        events.tell("model_status", "m", {"status": "loading"})
        await asyncio.to_thread(events.tell, "model_remove", "m")
        found = [await read(stream, 2) for stream in streams]
        assert events.n_client == 2
        for stream in streams:
            await stream.aclose()
        assert events.n_client == 0
        return found

    expected = [
        {"model": "m", "event": "model_status", "data": {"status": "loading"}},
        {"model": "m", "event": "model_remove"},
    ]
    assert asyncio.run(work()) == [expected, expected]


def test_streams_end_with_the_server_and_for_who_does_not_read(monkeypatch):
    monkeypatch.setattr(model_events, "MOST_WAITING", 3)

    async def work():
        events = ModelEvents()
        slow, last = events.stream(), events.stream()
        for _ in range(5):
            events.tell("model_status", "m", {"status": "loaded"})
        await asyncio.sleep(0)
        found = [line async for line in slow]
        other = ModelEvents()
        stream = other.stream()
        other.end()
        await last.aclose()
        return found, [line async for line in stream]

    found, none = asyncio.run(work())
    assert len(found) < 5
    assert none == []


def test_a_client_hears_something_now_and_then(monkeypatch):
    monkeypatch.setattr(model_events, "SECONDS_BETWEEN", 0.01)

    async def work():
        return await anext(ModelEvents().stream())

    assert asyncio.run(work()) == ":\n\n"


def test_a_list_is_read_anew_only_when_asked(client, source, told):
    assert ids(client) == ["a", "b"]
    assert ids(client, "?reload=1") == ["b", "c"]
    assert told == [("models_reload", "*")]
    source.error = ValueError("models.ini [d]: no such model")
    reply = client.get("/models?reload=1")
    assert reply.status_code == 500
    assert "the presets stay as they were: models.ini [d]" in reply.json()["error"]["message"]
    assert ids(client) == ["b", "c"]


def test_a_model_is_fetched_beside_and_its_progress_told(client, told, monkeypatch):
    def pull(name, progress):
        progress("reading", 5, 10)
        progress("reading", 10, 10)

    monkeypatch.setattr(registry, "pull", pull)
    assert client.post("/models", json={"model": "smollm2"}).json() == {"success": True}
    for _ in range(200):
        if told and told[-1][0] == "download_finished":
            break
        client.get("/health")
    assert told[-1] == ("download_finished", "smollm2")
    done = {"smollm2": {"done": 10, "total": 10}}
    assert ("download_progress", "smollm2", done) in told


def test_a_fetch_that_fails_says_why(client, told, monkeypatch):
    def pull(name, progress):
        raise registry.ModelError("the disk is full")

    monkeypatch.setattr(registry, "pull", pull)
    assert client.post("/models", json={"model": "smollm2"}).status_code == 200
    for _ in range(200):
        if told:
            break
        client.get("/health")
    assert told == [("download_failed", "smollm2", {"error": "the disk is full"})]


@pytest.mark.parametrize(
    ("name", "status"), [("a", 404), ("no such", 404), ("hf:bad", 400), ("", 404)]
)
def test_what_cannot_be_fetched_is_refused(client, name, status):
    assert client.post("/models", json={"model": name}).status_code == status


def test_an_installed_model_is_not_fetched_again(client, source, monkeypatch):
    source.names = ["smollm2"]
    reply = client.post("/models", json={"model": "smollm2"})
    assert (reply.status_code, "installed already" in reply.text) == (400, True)


def test_a_model_is_removed_by_its_name(client, told, monkeypatch):
    gone = []
    monkeypatch.setattr(ollama_routes, "remove", lambda server, name: gone.append(name))
    assert client.delete("/models?model=a").json() == {"success": True}
    assert (gone, told) == (["a"], [("model_remove", "a")])
    assert client.delete("/models").status_code == 400


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_no_page_of_another_site_fetches_or_removes(client, method):
    headers = {"Origin": "https://other.example", "Content-Type": "application/json"}
    reply = client.request(method, "/models?model=a", headers=headers, content=b'{"model": "a"}')
    assert reply.status_code == 403


def test_a_request_says_whether_its_model_may_be_loaded(client, router, monkeypatch):
    asked = []

    async def take(offer, keep=None, autoload=None):
        asked.append(autoload)
        raise ollama_routes.invalid("enough", "model")

    monkeypatch.setattr(router.models, "take", take)
    for query in ("", "?autoload=true", "?autoload=0"):
        client.post(f"/v1/completions{query}", json={"model": "a"})
    assert asked == [None, True, False]
    wrong = client.post("/v1/completions?autoload=maybe", json={"model": "a"})
    assert "autoload is 'maybe', expected true or false" in wrong.text


def test_states_are_sent_as_models_come_and_go(router, told):
    router.models.changed("a", "loading")
    assert told == [("model_status", "a", {"status": "loading"})]


def test_a_changed_model_leaves_once_it_is_unused(source):
    models = Models(source, keep=60, n_byte=None, n_queue=8, log=lambda line: None)
    ones = {}
    for name, args in (("a", ()), ("b", ()), ("c", ("--ctx=1",))):
        offer = Offer(name, f"/none/{name}", 1, 0.0, args=args)
        ones[name] = SimpleNamespace(offer=offer, keep=60, users=1, served=None, leaving=False)
    models._running = ones
    models._turn = lambda: None
    asyncio.run(models.reload())
    assert {name: one.keep for name, one in ones.items()} == {"a": 0, "b": 60, "c": 0}
