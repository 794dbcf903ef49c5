"""The server of one model, function by function: lists, errors, scopes, vectors, the page."""

import asyncio
import base64
import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.exceptions import HTTPException

from tamis.bindings.drop_in.completion import Request
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http import app, json_reply
from tamis.bindings.serve.http.app import Server, Settings
from tamis.bindings.serve.http.guard import Access
from tamis.bindings.serve.jobs import Embedding, Kept, Started
from tamis.bindings.serve.supervisor import Loaded
from tamis.bindings.serve.tasks import Inputs, Task


def serving(settings=None, **more):
    """A server without a model: what is asked of its worker is noted."""
    found = Server.__new__(Server)
    loaded = Loaded(64, 8, 9, 128, 2, 77, "cpu", pooling="cls")
    found._model = SimpleNamespace(name="tiny", loaded=loaded, text="text")
    found.settings, found.lora_scales = settings or Settings(), ()
    found.created, found.n_slots = 1_700_000_000.75, 2
    found.worker = SimpleNamespace(stopped=False, ready=True, n_waiting=0, n_queue=4)
    for name, value in more.items():
        setattr(found, name, value)
    return found


def asked(coroutine):
    """The status and the JSON of a reply, or of the error instead of it."""
    try:
        reply = asyncio.run(coroutine)
    except ApiError as error:
        return error.status, error.code
    return reply.status_code, json.loads(reply.body)


ENTRY = {
    "id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "tamis", "type": "model",
    "display_name": "tiny", "created_at": "2023-11-14T22:13:20+00:00",
}  # fmt: skip
DESCRIBED = ENTRY | {
    "aliases": ["a"], "tags": ["t"],
    "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    "meta": {"n_ctx": 64, "n_ctx_train": 128, "n_embd": 8, "n_vocab": 9},
}  # fmt: skip


def test_models_are_listed_for_clients_of_both_apis():
    server = serving(Settings(aliases=("a",), tags=("t",)))
    assert app.model_entry("tiny", 1_700_000_000.75) == ENTRY
    assert asked(server.models(None)) == (
        200,
        {"object": "list", "data": [DESCRIBED], "has_more": False, "first_id": "tiny",
         "last_id": "tiny"},
    )  # fmt: skip
    assert app.listing([{"id": "x"}, {"id": "y"}]) == {
        "object": "list", "data": [{"id": "x"}, {"id": "y"}], "has_more": False, "first_id": "x",
        "last_id": "y",
    }  # fmt: skip
    assert app.listing([]) == {
        "object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None,
    }  # fmt: skip
    for name, found in (("tiny", (200, DESCRIBED)), ("a", (200, DESCRIBED)), ("t", None)):
        request = SimpleNamespace(path_params={"name": name})
        assert asked(server.model(request)) == (found or (404, "model_not_found"))


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ({}, (200, {"status": "ok"}), (200, {"status": "ready"})),
        ({"stopped": True}, (503, "stopping"), (503, "stopping")),
        ({"n_waiting": 3}, (200, {"status": "ok"}), (200, {"status": "ready"})),
        ({"n_waiting": 4}, (200, {"status": "ok"}), (503, "queue_full")),
        ({"ready": False}, (200, {"status": "ok"}), (503, "loading")),
    ],
)
def test_a_server_is_well_until_it_stops_and_ready_where_it_takes_requests(state, health, ready):
    server = serving()
    vars(server.worker).update(state)
    assert (asked(server.health(None)), asked(server.ready(None))) == (health, ready)


# --- adapters and scopes --------------------------------------------------------------------------


def test_scales_are_sent_where_they_differ_from_those_of_the_start():
    server = serving(Settings(loras=(("a.gguf", 1.0), ("b.gguf", 0.5))), lora_scales=(1.0, 0.5))
    assert server._other((1.0, 0.5)) is None
    assert server._other((1.0, 0.25)) == (1.0, 0.25)
    assert server._other((0.5, 1.0)) == (0.5, 1.0)
    assert server.scales_of([{"id": 1, "scale": 2.0}]) == (0.0, 2.0)
    with pytest.raises(ApiError) as refused:
        server.scales_of([{"id": 2, "scale": 2.0}])
    assert (refused.value.status, refused.value.param) == (400, "lora")


def test_a_scope_is_of_a_key_a_salt_and_scales():
    plain = serving()
    assert plain._scope("anyone", "salt", (0.5,)) == '["", "salt", 0.5]'
    keyed = serving(Settings(access=Access(key="one\ntwo")))
    keys = keyed.settings.access.keys
    for i, key in enumerate(keys):
        whose = hashlib.sha256(key.encode()).hexdigest()
        assert json.loads(keyed._scope(i, "", ())) == [whose, ""]
    with pytest.raises(AssertionError):
        keyed._scope("", "", ())
    apart = serving(Settings(isolate=True), _requests=iter([3, 4]))
    assert [apart._scope("", "", ()) for _ in range(2)] == ["request 3", "request 4"]


# --- embeddings -----------------------------------------------------------------------------------


def embedding(inputs, pooling=None, **more):
    """A server whose helper has read these inputs and whose model gives [3, 4] for each text."""
    server = serving(Settings(pooling=pooling))

    async def read(request, name, load):
        assert load == server.load_inputs
        return inputs

    async def vectors(request, given, how):
        server.asked = how
        return [np.array([[3, 4]] if how == "none" else [3, 4], np.float32) for _ in given.texts]

    async def written(make, headers=None):
        return json_reply.JsonReply(make(), headers=headers)

    server.read, server.vectors, server.written = read, vectors, written
    return server


def test_embeddings_have_openais_form():
    server = embedding(Inputs([[1, 2], [3]], ignored=("odd",)))
    reply = asyncio.run(server.embeddings(None))
    assert reply.headers["x-tamis-ignored"] == "odd"
    unit = pytest.approx([0.6, 0.8])
    assert json.loads(reply.body) == {
        "object": "list", "model": "tiny", "usage": {"prompt_tokens": 3, "total_tokens": 3},
        "data": [{"object": "embedding", "index": i, "embedding": unit} for i in range(2)],
    }  # fmt: skip
    assert server.asked == "cls"
    packed = asyncio.run(embedding(Inputs([[1]], packed=True, norm=-1)).embeddings(None))
    (one,) = json.loads(packed.body)["data"]
    assert np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() == [3, 4]


@pytest.mark.parametrize(
    ("inputs", "pooled", "rows", "ignored"),
    [
        ({}, True, [0.6, 0.8], ()),
        ({"norm": -1}, True, [3, 4], ()),
        ({"norm": 1, "dimensions": 8}, True, [3 / 7, 4 / 7], ()),
        ({}, False, [[3, 4]], ()),
        ({"norm": 2, "ignored": ("odd",)}, False, [[3, 4]], ("odd", "embd_normalize")),
    ],
)
def test_rows_are_scaled_where_they_are_pooled(inputs, pooled, rows, ignored):
    server = embedding(Inputs([[1]], **inputs), pooling="last")
    found, ((*values,),) = asyncio.run(server.embedded(None, "embeddings", pooled=pooled))
    assert (np.allclose(values, rows), found.ignored) == (True, ignored)
    assert server.asked == ("last" if pooled else "none")


def test_what_cannot_be_embedded_is_refused():
    def refusal(server, **how):
        with pytest.raises(ApiError) as refused:
            asyncio.run(server.embedded(None, "embeddings", **how))
        return refused.value.status, refused.value.code, refused.value.param

    wide = embedding(Inputs([[1]], dimensions=7))
    assert refusal(wide) == (400, "invalid_value", "dimensions")
    assert refusal(embedding(Inputs([[1]]), pooling="rank")) == (501, "unsupported", None)
    with pytest.raises(ApiError, match="ask /embeddings for all"):
        asyncio.run(embedding(Inputs([[1]]), pooling="none").embeddings(None))


def test_a_text_is_a_job_of_its_client_and_of_the_servers_adapters():
    server = serving(Settings(loras=(("a.gguf", 1.0),)), lora_scales=(0.5,))
    jobs = []

    async def gives(request, made, reply):
        jobs.extend(made)
        reply.close()
        found = Embedding(np.ones(2)) if made[0].prompt else Kept(1, 2, 3.0)
        return found

    server._while_connected, server._mailbox = gives, None
    request = SimpleNamespace(scope={"tamis.owner": 3})
    found = asyncio.run(server.vectors(request, Inputs([[5], [6, 7]]), "cls"))
    assert [row.tolist() for row in found] == [[1, 1]] * 2
    assert [(j.prompt, j.owner, j.pooling, j.lora) for j in jobs] == [
        ([5], 3, "cls", (0.5,)), ([6, 7], 3, "cls", (0.5,))
    ]  # fmt: skip
    made = SimpleNamespace(prompt=[])
    server.settings = Settings(loras=(("a.gguf", 1.0),))
    assert asyncio.run(server.run_kept(request, lambda emit: made)) == Kept(1, 2, 3.0)
    assert (made.owner, made.scope, made.lora) == (3, '["", "", 0.5]', (0.5,))


def test_the_first_event_of_a_kind_is_waited_for():
    async def run():
        events = SimpleNamespace(left=[(0, Started(1)), (0, Kept(1, 2, 3.0)), (0, Started(2))])

        async def following():
            return events.left.pop(0)

        events.next = following
        return await app._one(events, Kept), events.left

    assert asyncio.run(run()) == (Kept(1, 2, 3.0), [(0, Started(2))])


@pytest.mark.parametrize(
    ("norm", "found"),
    [(-1, [3, -4]), (0, [24570, -32760]), (1, [3 / 7, -4 / 7]), (2, [0.6, -0.8]),
     (3, [3 / 91 ** (1 / 3), -4 / 91 ** (1 / 3)])],
)  # fmt: skip
def test_the_norms_of_a_vector(norm, found):
    given = np.array([3, -4], np.float32)
    assert app._vector(given, norm) == pytest.approx(found, rel=1e-6)
    assert app._vector(np.zeros(2, np.float32), norm) == [0, 0]
    assert app._vector(given[None], -1) == [[3, -4]]
    huge = np.array([3e38, 3e38], np.float32)
    assert np.isfinite(app._vector(huge, norm)).all()
    with pytest.raises(ApiError) as failed:
        app._vector(np.array([np.nan, 1], np.float32), norm)
    assert (failed.value.status, failed.value.code) == (500, "failed")


# --- jobs -----------------------------------------------------------------------------------------


def task(n=2, **more):
    requests = [Request([5, 6], 4, "tiny") for _ in range(n)]
    given = {
        "requests": requests, "sampling": Sampling(), "seed": (1 << 63) - 1, "stream": False,
        "include_usage": False, "progress": False, "wanted": None, "prompt_tokens": 2,
    }  # fmt: skip
    return Task(**given | more)


@pytest.mark.parametrize("masked", [True, False])
def test_a_task_is_a_job_for_each_choice(masked):
    given = task(masked=masked, slot=1, cached=False, reuse=3)
    found = app.choices(given, lambda i: i, 9, "masks")
    assert [(j.prompt, j.emit, j.number, j.seed) for j in found] == [
        ([5, 6], 0, 0, (1 << 63) - 1), ([5, 6], 1, 1, -(1 << 63))
    ]  # fmt: skip
    assert [j.request for j in found] == given.requests
    assert {(j.slot, j.cached, j.reuse) for j in found} == {(1, False, 3)}
    assert {j.masks for j in found} == {"masks" if masked else None}
    with pytest.raises(ApiError) as refused:
        app.choices(task(sampling=Sampling(mirostat_mode=3)), lambda i: i, 9)
    assert refused.value.status == 400


# --- errors and files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "inner"),
    [
        (ApiError(409, "x", code="c", param="p"), 409, {"message": "x", "code": "c", "param": "p"}),
        (HTTPException(404, "none"), 404, {"message": "none", "code": "not_found"}),
        (HTTPException(405, "not so"), 405, {"message": "not so", "code": None}),
        (ZeroDivisionError("secret"), 500,
         {"message": "a bug of tamis: ZeroDivisionError", "code": "internal"}),
    ],
)  # fmt: skip
def test_an_error_is_a_reply(error, status, inner):
    request = SimpleNamespace(url=SimpleNamespace(path="/v1/x"))
    reply = asyncio.run(app.on_error(request, error))
    body = json.loads(reply.body)["error"]
    assert (reply.status_code, {k: body[k] for k in inner}) == (status, inner)
    allowed = HTTPException(405, "x", headers={"Allow": "GET"})
    assert asyncio.run(app.on_error(request, allowed)).headers["allow"] == "GET"


def test_facts_of_a_file_are_those_that_lists_show(path):
    found = app.facts_of(path)
    assert (found.name, found.n_byte, found.modified) == (
        "tiny.gguf", path.stat().st_size, path.stat().st_mtime,
    )  # fmt: skip
    file = app.GGUFFile(path)
    shapes = [tensor.shape for tensor in file.tensors.values()]
    assert found.n_param == sum(int(np.prod(shape)) for shape in shapes)
    assert found.arch == file.metadata["general.architecture"]
    matrices = [t.type.name for t in file.tensors.values() if len(t.shape) > 1]
    assert found.kind == max(sorted(set(matrices)), key=matrices.count)
    assert found.metadata.keys() < file.metadata.keys(), "lists are left out"
    assert not any(isinstance(value, list) for value in found.metadata.values())


def test_facts_are_read_once_and_what_is_gone_is_unavailable(path, tmp_path):
    server = serving(_facts=None, model_file=str(path))
    assert server.facts() is server.facts()
    gone = serving(_facts=None, model_file=str(tmp_path / "none.gguf"))
    with pytest.raises(ApiError) as refused:
        gone.facts()
    assert (refused.value.status, refused.value.code) == (503, "unavailable")


def test_one_model_has_many_paths(tmp_path):
    one, link, other = (tmp_path / name for name in ("a.gguf", "link.gguf", "b.gguf"))
    one.touch()
    other.touch()
    link.symlink_to(one)
    parts = [str(tmp_path / f"m-0000{i}-of-00002.gguf") for i in (1, 2)]
    assert app.same_model(str(link), str(one))
    assert app.same_model(*parts)
    assert not app.same_model(str(one), str(other))
    assert serving(model_file=str(one)).serves(str(link))


# --- the page and metrics -------------------------------------------------------------------------


def shown(settings):
    return asyncio.run(app.front(settings).endpoint(None))


def test_the_page_says_whether_it_needs_a_key_and_may_be_off():
    page = shown(Settings())
    assert (page.media_type, page.headers["x-frame-options"]) == ("text/html", "DENY")
    assert b"<html data-key " not in page.body
    policy = page.headers["content-security-policy"].split("; ")
    assert [each.split(" ")[0] for each in policy] == [
        "default-src", "script-src", "style-src", "connect-src", "img-src", "base-uri",
        "form-action",
    ]  # fmt: skip
    assert [policy[i] for i in (0, 3, 4, 5, 6)] == [
        "default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'",
        "form-action 'none'",
    ]  # fmt: skip
    for name, rule in (("script", policy[1]), ("style", policy[2])):
        inner = page.body.split(f"<{name}>".encode())[1].split(f"</{name}>".encode())[0]
        digest = base64.b64encode(hashlib.sha256(inner).digest()).decode()
        assert rule == f"{name}-src 'sha256-{digest}'"
    keyed = shown(Settings(access=Access(key="secret")))
    assert keyed.body.count(b"<html data-key ") == 1
    assert len(keyed.body) == len(page.body) + len(b"data-key ")
    assert shown(Settings(page=False)).body == b"tamis is running"


def test_metrics_are_shown_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(app, "exposition", lambda worker: f"of {worker}")
    found = app.measured(Settings(metrics=True), "w")
    assert (found.body, found.headers["process-start-time-unix"]) == (b"of w", str(app.STARTED))
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    with pytest.raises(ApiError) as refused:
        app.measured(Settings(), "w")
    assert (refused.value.status, refused.value.code) == (501, "unsupported")
