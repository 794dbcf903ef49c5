"""Models that come and go: loaded when asked for, unloaded when unused, within a budget."""

import asyncio
import contextlib
import itertools
import json
import math
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from serve_process import ServeProcess
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.serve.body import seconds_of
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.router import Router, asked_of
from tamis.bindings.serve.jobs import Counts
from tamis.bindings.serve.models import Models, Offer, named
from tamis.bindings.serve.supervisor import Loaded, LoadError
from tamis.bindings.serve.text import TextModel
from tamis.cli import main
from tamis.cli.commands import serve
from tamis.cli.options import Parser
from tamis.cli.options.errors import UsageError
from tamis.formats.gguf import GGUFFile
from tests.support.mmproj_files import write_mmproj

TEXT = "/v1/completions"


class Worker:
    """Stands in for a supervisor: loading takes a moment."""

    def __init__(self, source, offer):
        self._source, self._offer, self.counts = source, offer, Counts(jobs=1)
        self.failed, self.n_running, self.n_waiting, self.ready = False, 0, 0, True
        self.loaded = None

    def wait(self):
        time.sleep(0.02)
        error = self._source.error(self._offer)
        if error is not None:
            raise error
        self._source.held.append(self._offer.name)
        self._source.most = max(self._source.most, len(self._source.held))
        self._source.order.append(self._offer.name)
        self.loaded = Loaded(64, 8, 9, 64, 1, self._offer.n_byte, "cpu")
        return self.loaded

    def stop(self):
        if self._offer.name in self._source.held:
            assert not self._source.users(self._offer.name), "unloaded while it was used"
            self._source.held.remove(self._offer.name)

    def join(self):
        pass


class Served:
    app = None

    def stop(self):
        pass

    def close(self):
        pass


class Source:
    def __init__(self, room=math.inf):
        self.held, self.most, self.order, self._room = [], 0, [], room
        self.models = None

    def users(self, name):
        return sum(one.users for one in self.models.running if one.offer.name == name)

    def error(self, offer):
        if offer.name == "broken":
            return LoadError("no model file")
        if len(self.held) >= self._room:
            error = LoadError("no more memory")
            error.memory = True
            return error
        return None

    def offers(self):
        return [offer(name) for name in "abc"]

    def sees(self, offer):
        return False

    def start(self, offer):
        return Worker(self, offer)

    def serve(self, offer, worker):
        return Served()


def offer(name, n_byte=10):
    return Offer(name, f"/models/{name}", n_byte, 0.0)


def run(work, room=math.inf, keep=60.0, n_byte=None, n_queue=64, **how):
    """Work of a coroutine with models, and the source that they came from."""

    async def inner():
        source, lines = Source(room), []
        models = Models(source, keep=keep, n_byte=n_byte, n_queue=n_queue, log=lines.append, **how)
        source.models = models
        await work(models, source)
        assert all(one.users == 0 for one in models.running)
        models.stop()
        models.close()

    asyncio.run(asyncio.wait_for(inner(), 60))


async def use(models, name, seconds=0.0, keep=None):
    one = await models.take(offer(name), keep)
    await asyncio.sleep(seconds)
    models.give_back(one)


async def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", [{"n_byte": 10}, {"room": 1}], ids=["budget", "memory"])
def test_two_models_with_room_for_one_lose_no_request(how):
    async def work(models, source):
        await asyncio.gather(*(use(models, "ab"[i % 2], 0.001 * (i % 5)) for i in range(60)))
        assert source.most == 1
        assert source.order == ["a", "b"], "requests of one model are answered together"

    run(work, **how)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain", "Origin": "https://other.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "http://localhost.other.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "http://[other"}, 403),
        ({"Content-Type": "text/plain", "Origin": "null"}, 415),
        ({"Content-Type": "text/plain", "Sec-Fetch-Site": "cross-site"}, 415),
        ({"Content-Type": "text/plain"}, 404),  # curl -d
        ({"Content-Type": "application/json", "Origin": "http://localhost:3000"}, 404),
    ],
)
def test_no_page_of_another_site_pulls_deletes_or_erases(headers, status):
    models = Models(Source(), keep=60, n_byte=None, n_queue=8, log=lambda line: None)
    server = Router(models, Settings(), lambda line: None, None)
    with TestClient(server.app, base_url="http://localhost") as client:
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
            found = client.request(method, path, content=b'{"model": "none"}', headers=headers)
            assert found.status_code == status
        of_page = {k: v for k, v in headers.items() if k != "Content-Type"}
        if status == 415:
            assert client.post("/slots/0?action=erase", headers=of_page).status_code == 415
        assert client.get("/api/version", headers=headers).status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/props?model=b", "/slots?model=b", "/v2/models/b?model=b", "/any?model=b"]
)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://other.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_no_page_of_another_site_loads_or_unloads_by_reading(headers, path, method):
    source = Source()
    models = Models(source, keep=60, n_byte=None, n_queue=8, log=lambda line: None, n_model=1)
    source.models = models
    server = Router(models, Settings(), lambda line: None, None)
    with TestClient(server.app, base_url="http://localhost") as client:
        client.post("/models/load", json={"model": "a"})
        end = time.monotonic() + 10
        while not models.running:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert client.request(method, path, headers=headers).status_code in (403, 415)
        assert source.order == ["a"]
        for harmless in ("/props", "/v1/models", "/v1/models/b", "/api/ps", "/health", "/"):
            assert client.get(harmless, headers=headers).status_code == 200
        assert source.order == ["a"]
        assert source.held == ["a"]
        server.stop()


def test_a_program_may_load_by_reading_as_llama_cpps_do():
    loaded = []

    async def app(scope, receive, send):
        loaded.append(scope["path"])
        await PlainTextResponse("")(scope, receive, send)

    source = Source()
    source.serve = lambda offer, worker: SimpleNamespace(app=app, stop=list, close=list)
    models = Models(source, keep=60, n_byte=None, n_queue=8, log=lambda line: None)
    source.models = models
    server = Router(models, Settings(), lambda line: None, None)
    with TestClient(server.app, base_url="http://localhost") as client:
        assert client.get("/props?model=b").status_code == 200
        assert (source.order, loaded) == (["b"], ["/props"])
        server.stop()


def test_a_model_in_use_is_not_unloaded_and_the_longest_unused_goes_first():
    async def work(models, source):
        await use(models, "a")
        held = await models.take(offer("b"))
        await use(models, "c")  # a goes
        assert sorted(source.held) == ["b", "c"]
        await use(models, "a")  # c goes: b was used before it but is used still
        assert sorted(source.held) == ["a", "b"]
        models.give_back(held)

    run(work, n_byte=20)


def test_who_waits_long_for_room_has_a_turn(monkeypatch):
    monkeypatch.setattr("tamis.bindings.serve.models.PATIENCE", 0.1)

    async def work(models, source):
        done = asyncio.Event()

        async def always():  # never without a request of model a
            while not done.is_set():
                await asyncio.gather(use(models, "a", 0.03), use(models, "a", 0.05))

        async def many():
            await asyncio.gather(always(), asyncio.sleep(0.02), always())

        busy = asyncio.ensure_future(many())
        await asyncio.sleep(0.1)
        await asyncio.wait_for(use(models, "b"), 5)
        done.set()
        await busy

    run(work, n_byte=10)


def test_a_model_is_unloaded_when_its_time_has_come():
    async def work(models, source):
        await use(models, "a")
        await use(models, "b", keep=0)
        await until(lambda: source.held == ["a"])  # b at once
        await until(lambda: not source.held)
        assert models.counts.jobs == 2  # what the ones that are gone have done is counted
        await use(models, "a", keep=math.inf)
        await asyncio.sleep(0.3)
        assert source.held == ["a"]
        assert models.unload("a")
        await until(lambda: not source.held)
        assert not models.unload("a")

    run(work, keep=0.15)


def test_a_model_that_cannot_be_loaded_fails_its_own_requests():
    async def work(models, source):
        found = await asyncio.gather(
            use(models, "broken"), use(models, "a"), use(models, "broken"), return_exceptions=True
        )
        assert [getattr(each, "status", 200) for each in found] == [503, 200, 503]

    run(work)


def test_a_model_above_the_budget_says_so():
    async def work(models, source):
        with pytest.raises(ApiError, match="--memory"):
            await models.take(offer("a", 11))

    run(work, n_byte=10)


def test_a_request_that_is_cancelled_gives_its_model_back():
    async def work(models, source):
        first = await models.take(offer("a"))
        waiting = asyncio.ensure_future(use(models, "b"))
        granted = asyncio.ensure_future(models.take(offer("a")))
        await asyncio.sleep(0.05)
        waiting.cancel()
        models.give_back(await granted)
        models.give_back(first)
        await asyncio.gather(waiting, return_exceptions=True)

    run(work, n_byte=10)


def test_too_many_requests_for_models_are_refused():
    async def work(models, source):
        first = await models.take(offer("a"))
        waiting = [asyncio.ensure_future(use(models, "b")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refusal:
            await models.take(offer("c"))
        assert refusal.value.status == 429
        assert models.full
        models.give_back(first)
        await asyncio.gather(*waiting)

    run(work, n_byte=10, n_queue=2)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *[("5m", 300), ("1h30m", 5400), (90, 90), ("90", 90), ("250ms", 0.25), (0, 0), ("0", 0)],
        *[(-1, math.inf), ("-1m", math.inf), ("-1", math.inf)],
        *[("1e300", math.inf), (1e12, math.inf), (10**30, math.inf), ("9" * 90 + "h", math.inf)],
    ],
)
def test_times_are_written_as_in_ollama(value, seconds):
    assert seconds_of(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        "5 minutes",
        "m",
        True,
        None,
        [],
        "--5m",
        "nan",
        "5m!",
        "1" * 90 + "x",
        "1" * 200_000 + "x",
    ],
)
def test_times_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match="keep_alive"):
        seconds_of(value)


@pytest.mark.parametrize(
    ("body", "name", "keep"),
    [
        (b'{"model": "a"}', "a", None),
        (b'{"mod\\u0065l": "a"}', "a", None),
        (b'{"metadata": {"model": "x"}, "model": "a", "keep_alive": "1m"}', "a", 60),
        (b'{"messages": [{"content": "\\"model\\": \\"x\\""}], "model": "a"}', "a", None),
        (b'{"prompt": "x"}', None, None),
        (b"[" * 9999, None, None),
        (b'{"model": "\\ud8', None, None),
    ],
)
def test_the_model_of_a_body(body, name, keep):
    assert asked_of(body) == (name, keep)


LARGE = "x" * (1 << 15)


@pytest.mark.parametrize(
    ("body", "name", "keep"),
    [
        ({"a": LARGE, "model": "a", "keep_alive": "5m"}, "a", 300),
        ({"model": 'a\\"b', "a": [{"model": "no", "keep_alive": 1}], "b": LARGE}, 'a\\"b', None),
        ({"name": "n", "a": LARGE}, "n", None),
        ({"a": {"model": "no"}, "b": LARGE}, None, None),
        ({"a": "model", "b": LARGE, "keep_alive": -1}, None, math.inf),
        ({"model": None, "b": LARGE}, None, None),
        ([{"model": "no"}, LARGE], None, None),
    ],
)
def test_the_model_of_a_large_body(body, name, keep):
    for how in ({}, {"indent": 2}, {"ensure_ascii": False}):
        assert asked_of(json.dumps(body, **how).encode()) == (name, keep)


def test_a_field_of_a_large_body_is_named_with_escapes_and_the_last_one_holds():
    body = b'{"mod\\u0065l": "a", "x": "%s", "model" : "b"}' % LARGE.encode()
    assert asked_of(body).name == "b"
    assert asked_of(body.replace(b'"model"', b'"other"')).name == "a"
    for wrong in (b"5", b"[1]", b'{"model": "a"}'):
        with pytest.raises(ApiError, match="no string"):
            asked_of(b'{"x": "%s", "model": %s}' % (LARGE.encode(), wrong))


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b"a" * (4 << 20),
        b'{"a":"' + b'\\"' * (2 << 20),
        b'{"a":"' + b"\\" * (4 << 20),
        b'"model":"a' * 400_000,
        b'{"model":"' * 400_000,
        b"[" * (1 << 20),
        b'{"a":[' + b"[]," * (1 << 19),
        b'{"keep_alive":' + b"1" * (4 << 20),
        b"{" + b'"model":' * 500_000,
        b"{" + b'"model"' + b" " * (4 << 20),
    ],
)
def test_the_model_of_a_hostile_body_takes_time_by_its_length(body):
    begin = time.process_time()
    with contextlib.suppress(ApiError):
        asked_of(body)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("body", [b"[" * (4 << 20), b'{"a":[' + b"[]," * (4 << 18) + b"[]]}"])
def test_brackets_are_counted_at_once(body):
    begin = time.process_time()
    assert asked_of(body) == (None, None)
    assert time.process_time() - begin < 0.5, "one by one they took 2 to 5 s"
    after = body[:-1] + b',"model":"m]{","x":{"model":"no"},"keep_alive":5}'
    assert asked_of(after) == ((None, None) if body[0] == ord("[") else ("m]{", 5))


def test_names_as_clients_write_them():
    offers = [
        Offer("smollm2", "/m/SmolLM2-135M-Instruct.Q4_1.gguf", 1, 0),
        Offer("hf:owner/repo/file.gguf", "/m/owner/repo/file.gguf", 1, 0),
    ]
    for name in ("smollm2", "smollm2:latest", "SmolLM2-135M-Instruct.Q4_1"):
        assert named(name, offers) == offers[0]
    for name in ("hf:owner/repo/file.gguf", "owner/repo/file.gguf", "file"):
        assert named(name, offers) == offers[1]
    assert named("/m/owner/repo/file.gguf", offers) is None  # no path of a client's is opened


def test_a_model_of_the_hub_is_named_by_its_quantisation():
    offers = [offer(f"hf:owner/repo/model-{kind}.gguf") for kind in ("Q4_K_M", "Q8_0")]
    assert named("owner/repo:Q8_0", offers) == offers[1]
    assert named("hf:owner/repo:q4_k_m", offers) == offers[0]
    for name in ("owner/repo", "owner/repo:Q4", "owner/other:Q8_0", "owner/repo:"):
        assert named(name, offers) is None


def test_no_more_models_are_loaded_than_may_be():
    async def work(models, source):
        for name in "abab":
            await use(models, name)
        assert source.order == ["a", "b"]
        await use(models, "c")
        assert sorted(source.held) == ["b", "c"]
        assert [models.state(name) for name in "abc"] == [
            "unloaded",
            "loaded",
            "loaded",
        ]

    run(work, n_model=2)


def test_asking_what_models_are_loads_none(tmp_path):
    """VS Code and others ask /api/show of each model in a list."""
    path = write_tiny_model(tmp_path / "a.gguf", TinySpec())
    source = Source()
    source.offers = lambda: [Offer("a", str(path), 1, 0.0), offer("b")]
    source.text = lambda offer: TextModel.load(offer.path, 0)
    models = Models(source, keep=60, n_byte=None, n_queue=8, log=lambda line: None)
    server = Router(models, Settings(page=False), lambda line: None, None)
    with TestClient(server.app, base_url="http://localhost") as client:
        for body in ({"model": "a"}, {"name": "a:latest"}):
            shown = client.post("/api/show", json=body).json()
            assert shown["model_info"]["general.architecture"] == "llama"
            assert shown["capabilities"] == ["completion", "tools"]
            assert shown["template"]
        assert client.post("/api/show", json={"model": "b"}).status_code == 503  # no such file
        assert client.post("/api/show", json={"model": "none"}).status_code == 404
        assert client.post("/api/show", json={}).status_code == 400
        assert client.get("/").text == "tamis is running"
        assert client.get("/v1/health").status_code == 200
        assert client.get("/v1/models").json()["last_id"] == "b"
    assert source.order == []


def test_models_are_loaded_only_where_that_is_asked_for():
    async def work(models, source):
        with pytest.raises(ApiError, match="/models/load") as refusal:
            await models.take(offer("a"))
        assert refusal.value.status == 400
        models.load(offer("broken"))
        models.load(offer("a"))
        assert models.state("a") == "loading"
        await use(models, "a")  # waits until it is loaded
        await until(lambda: models.state("broken") == "unloaded")
        assert source.held == ["a"]

    run(work, autoload=False)


def test_llama_cpps_router_paths():
    source = Source()
    models = Models(source, keep=60, n_byte=None, n_queue=8, log=lambda line: None, n_model=2)
    source.models = models
    server = Router(models, Settings(), lambda line: None, None)
    with TestClient(server.app, base_url="http://localhost") as client:

        def state(name):
            listed = client.get("/models").json()["data"]
            return {each["id"]: each["status"]["value"] for each in listed}[name]

        def becomes(name, wanted):
            end = time.monotonic() + 10
            while state(name) != wanted:
                assert time.monotonic() < end
                time.sleep(0.01)

        props = client.get("/props").json()
        assert (props["role"], props["max_instances"], props["models_autoload"]) == (
            "router",
            2,
            True,
        )
        assert state("a") == "unloaded"
        assert client.post("/models/load", json={"model": "a"}).json() == {"success": True}
        becomes("a", "loaded")
        assert client.post("/models/unload", json={"model": "a"}).json() == {"success": True}
        becomes("a", "unloaded")
        assert client.post("/models/unload", json={"model": "a"}).status_code == 400
        assert client.post("/models/load", json={"model": "none"}).status_code == 404
        assert client.post("/models/load", json={}).status_code == 400
        server.stop()


def test_a_request_of_a_loaded_model_opens_no_file_and_lists_open_each_once(tmp_path, monkeypatch):
    """What lies beside a model says whether it takes pictures, which lists alone tell."""
    write_tiny_model(tmp_path / "a.gguf", TinySpec())
    write_mmproj(tmp_path / "mmproj-a.gguf", "gemma3", 64)
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    parser = Parser()
    serve.add_arguments(parser)
    given = parser.parse_args(["--no-page"])
    given.argv = ["--no-page"]
    settings = serve._settings(given, serve._access(given))
    source = serve.Source(given, settings)
    models = Models(source, keep=60, n_byte=None, n_queue=8, log=lambda line: None)
    (own,) = [each for each in source.offers() if each.name == "a.gguf"]
    worker, served = Worker(Source(), own), Served()
    worker.wait()
    served.app = PlainTextResponse("answered")
    models.adopt(own, worker, served)
    opened, begin = [], GGUFFile.__init__

    def counted(file, path, *rest, **named):
        opened.append(os.path.basename(path))
        begin(file, path, *rest, **named)

    monkeypatch.setattr(GGUFFile, "__init__", counted)
    server = Router(models, settings, lambda line: None, None)
    with TestClient(server.app, base_url="http://localhost") as client:
        for _ in range(3):
            assert client.post(TEXT, json={"model": "a.gguf"}).text == "answered"
        assert opened == []
        for _ in range(3):
            listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
            shown = listed["a.gguf"]["architecture"]["input_modalities"]
            assert shown == ["text", "image"]
            assert client.get("/v1/models/a.gguf").json() == listed["a.gguf"]
        assert opened == ["mmproj-a.gguf"]
        (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")  # another file of that name
        shown = client.get("/v1/models/a.gguf").json()["architecture"]["input_modalities"]
        assert (shown, opened) == (["text"], 2 * ["mmproj-a.gguf"])
        shown = client.post("/api/show", json={"model": "a.gguf"}).json()["capabilities"]
        assert "vision" not in shown
        write_mmproj(tmp_path / "mmproj-a.gguf", "gemma3", 64)
        shown = client.post("/api/show", json={"model": "a.gguf"}).json()["capabilities"]
        assert "vision" in shown


def test_two_real_models_with_a_budget_for_one(tmp_path, capsys):
    """Switching under load: no request is lost, and `tamis ps` says what there is."""
    folder = tmp_path / "models"
    folder.mkdir()
    write_tiny_model(folder / "one.gguf", TinySpec())
    write_tiny_model(folder / "two.gguf", TinySpec(seed=1))
    flags = "-c", "512", "--parallel", "2", "--memory", "3MiB", "--metrics"
    with ServeProcess(None, tmp_path, *flags, env={"TAMIS_MODELS": str(folder)}) as server:
        listed = json.loads(server.get("/v1/models")[1])["data"]
        assert [each["id"] for each in listed] == ["one.gguf", "two.gguf"]
        assert server.get("/ready")[0] == 200
        where = ["--port", str(server.port)]
        assert main(["ps", *where]) == 0
        assert "no model is loaded" in capsys.readouterr().out

        def ask(name, **how):
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
            return server.post(body | how, TEXT, timeout=120)

        def streamed(name, n_line=None):
            """The text of a stream, or of its first lines: the client goes then."""
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
            with server.open(TEXT, body | {"stream": True}, timeout=120) as response:
                lines = list(itertools.islice(response, n_line))
            chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
            if n_line is None:
                assert lines[-2] == b"data: [DONE]\n"
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        alone = {name: ask(name)[1]["choices"][0]["text"] for name in ("one", "two")}
        found, listed = [], []

        def client(i):
            for j in range(3):
                name = ("one", "two")[(i + j) % 2]
                found.append((name, ask(name), len(server.children())))
                if j == 0:
                    assert alone[name].startswith(streamed(name, 1))
                if j == 1:
                    streams.append(streamed(name) == alone[name])
                listed.append(json.loads(server.get("/api/ps")[1])["models"])

        streams: list[bool] = []
        threads = [threading.Thread(target=client, args=[i]) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 18
        assert streams == [True] * 6
        assert all(len(models) <= 1 for models in listed), "there is room for one"
        for name, (status, reply), _ in found:
            assert status == 200, reply
            assert reply["choices"][0]["text"] == alone[name]
            assert reply["model"] == f"{name}.gguf"
        text = server.log.read_text()
        assert text.count("loading one.gguf") >= 2
        assert ask("two", keep_alive=-1)[0] == 200
        assert main(["ps", *where]) == 0
        shown = capsys.readouterr().out
        assert "two.gguf" in shown
        assert "one.gguf" not in shown
        assert "for ever" in shown
        assert main(["ps", "--json", *where]) == 0
        (model,) = json.loads(capsys.readouterr().out)["models"]
        assert (model["requests"], model["device"], model["size_vram"]) == (0, "cpu", 0)
        assert ask("three")[0] == 404
        assert ask(os.fspath(folder / "one.gguf"))[0] == 404
        assert ask("two", keep_alive="soon")[0] == 400
        assert ask("two", keep_alive=0)[0] == 200
        end = time.monotonic() + 10
        while json.loads(server.get("/api/ps")[1])["models"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert "tamis_jobs_total" in server.get("/metrics")[1].decode()


def test_a_model_has_several_names_and_a_server_several_addresses(tmp_path):
    path = write_tiny_model(tmp_path / "one.gguf", TinySpec())
    flags = ["--host", "127.0.0.1,::1", "--alias", "tiny,fim", "--tags", "small,chat"]
    flags += ["--chat-template", "{{ messages[0].content }}!"]
    with ServeProcess(path, tmp_path, *flags, env=None) as server:
        (listed,) = json.loads(server.get("/v1/models")[1])["data"]
        assert (listed["id"], listed["aliases"]) == ("fim", ["fim", "tiny"])
        assert listed["tags"] == ["chat", "small"]
        for name in ("fim", "tiny"):
            assert server.get(f"/v1/models/{name}")[0] == 200
        messages = {"messages": [{"role": "user", "content": "hi"}]}
        assert server.post(messages, "/apply-template") == (200, {"prompt": "hi!"})
        try:
            other = socket.create_connection(("::1", server.port), timeout=30)
        except OSError:
            pytest.skip("this machine has no IPv6")
        with other:
            other.sendall(b"GET /health HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n")
            assert other.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    ("given", "part"),
    [("llama3", "<|start_header_id|>"), ("command-r", "<|CHATBOT_TOKEN|>"), ("a {{ b }}", "a {{")],
)
def test_a_template_is_given_by_name_or_as_text(given, part):
    assert part in serve._template(None, given)


def test_a_name_of_no_template_is_refused():
    with pytest.raises(UsageError, match="chatml"):
        serve._template(None, "chatmll")
