"""Whatever stands in a field of a request: an answer, or an error that says what is wrong."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from request_bodies import BODIES, TOOL, VALUES, wrong
from serving import local_server, reader
from starlette.testclient import TestClient

from tamis.bindings.drop_in.tools import allowed, forced
from tamis.bindings.serve.api.readers import READERS, read
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.router import Router
from tamis.bindings.serve.models import Models, Offer
from tamis.bindings.serve.tasks import Task, from_json, to_json
from tamis.bindings.serve.text import TextModel

LONGEST = 1000  # characters of an error's message: it repeats none of a client's long texts


def test_there_is_a_body_of_each_kind():
    assert BODIES.keys() == READERS.keys()


@pytest.mark.parametrize("name", sorted(BODIES))
def test_a_right_body_is_read(path, name):
    texts = reader(path)
    if name == "infill":  # the model has no tokens for that
        with pytest.raises(ApiError, match="infill is not supported"):
            read(name, texts, json.dumps(BODIES[name]).encode())
    else:
        read(name, texts, json.dumps(BODIES[name]).encode())


def test_a_task_is_the_same_after_its_way_as_json(path):
    texts, n_task = reader(path), 0
    for name in sorted(BODIES.keys() - {"infill"}):
        found = read(name, texts, json.dumps(BODIES[name] | {"n": 1}).encode())
        if isinstance(found, Task):
            n_task += 1
            wanted = found.wanted and found.wanted._replace(grammar=None)
            bare = found._replace(
                sampling=replace(found.sampling, grammar=None), wanted=wanted,
                masked=found.grammar is not None, about=dict(found.about),
            )  # fmt: skip
            assert from_json(to_json(found), len(texts.text.vocab)) == bare
    assert n_task > 3


@pytest.mark.parametrize("name", sorted(BODIES))
def test_no_value_of_a_field_is_a_bug(path, name):
    texts = reader(path)
    for body in wrong(BODIES[name]):
        try:
            found = read(name, texts, json.dumps(body).encode())
        except ApiError as error:
            found = error
        if isinstance(found, ApiError):
            assert 400 <= found.status < 502
            assert len(found.message) < LONGEST
        elif isinstance(found, Task):
            from_json(to_json(found), len(texts.text.vocab))


def checked(response):
    """No reply that is the server's own fault."""
    assert response.status_code < 500 or response.status_code in (501, 503), response.text
    assert "bug of tamis" not in response.text
    assert response.status_code < 400 or len(response.content) < 2 * LONGEST


def sent(client, method, path, body):
    """The reply to a body that may have what UTF-8 has not."""
    head = {"Content-Type": "application/json"}
    return client.request(method, path, content=json.dumps(body).encode(), headers=head)


@contextmanager
def served(engine, tmp_path):
    settings = Settings(slot_folder=tmp_path)
    server = local_server(engine, [engine.session(n_ctx=64)], settings)
    with TestClient(server.app, base_url="http://localhost") as client:
        yield client
    server.stop()
    server.close()


OTHERS = [
    ("POST", "/slots/0?action=save", {"filename": "a"}),
    ("POST", "/slots/0?action=restore", {"filename": "b"}),
    ("POST", "/lora-adapters", [{"id": 0, "scale": 1.0}]),
    ("POST", "/rerank", {"query": "a", "documents": ["b"], "top_n": 1, "return_documents": True}),
    ("POST", "/api/show", {"model": "x", "name": "y"}),
    ("POST", "/api/pull", {"model": "x", "name": "y", "stream": False}),
    ("DELETE", "/api/delete", {"model": "x", "name": "y"}),
    ("POST", "/api/chat", {"model": "x", "messages": [], "keep_alive": 5}),
    ("POST", "/api/generate", {"model": "x", "keep_alive": "5m"}),
]


@pytest.mark.parametrize(("method", "path_", "body"), OTHERS)
def test_no_value_of_the_other_routes_is_a_bug(engine, tmp_path, monkeypatch, method, path_, body):
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path / "models"))
    with served(engine, tmp_path) as client:
        for each in wrong(body):
            checked(sent(client, method, path_, each))


PARTS = ["", "0", "9" * 400, "-1", "a", "é", "..", "%00", "%2e%2e%2fa", "a" * 5000, "[]", "hf:a/b"]


@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_an_address_is_a_bug(engine, tmp_path, part):
    with served(engine, tmp_path) as client:
        for path in (
            f"/v1/models/{part}",
            f"/slots?fail_on_no_slot={part}",
            f"/props?model={part}",
        ):
            checked(client.get(path))
        for path in (f"/slots/{part}?action=erase", f"/slots/0?action={part}"):
            checked(client.post(path, json={"filename": "a"}))


@pytest.mark.parametrize("name", ["a/../../x", "../x", "a/b", "x\0", "..", ".x", "x\n", "é/x", ""])
def test_a_slots_file_is_in_its_folder(engine, tmp_path, name):
    inner = tmp_path / "in"
    inner.mkdir()
    with served(engine, inner) as client:
        found = client.post("/slots/0?action=save", json={"filename": name})
        assert found.status_code == 400
    assert list(tmp_path.rglob("*")) == [inner]


def test_a_slot_takes_no_other_files_place(engine, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with served(engine, tmp_path) as client:
        found = client.post("/slots/0?action=save", json={"filename": "notes.txt"})
        assert found.status_code == 400
        assert "it stays" in found.json()["error"]["message"]
        assert client.post("/slots/0?action=save", json={"filename": "b"}).status_code == 200
        assert client.post("/slots/0?action=save", json={"filename": "b"}).status_code == 200
    assert (tmp_path / "notes.txt").read_text() == "mine"


class Source:
    """Models whose files are not there: whatever is asked, none can be loaded."""

    def offers(self):
        return [Offer(name, f"/none/{name}", 1, 0.0) for name in ("a", "hf:b/c/d-Q4_0.gguf")]

    def sees(self, offer):
        return False

    def start(self, offer):
        raise OSError("no such file")

    def text(self, offer):
        return TextModel.load(offer.path, 0)


ROUTED = [
    ("/models/load", {"model": "a"}),
    ("/models/unload", {"model": "a", "name": "a"}),
    ("/api/show", {"model": "a", "name": "a"}),
    ("/v1/completions", {"model": "a", "keep_alive": "5m"}),
]


@pytest.mark.parametrize(("path_", "body"), ROUTED)
def test_no_value_is_a_bug_of_a_server_of_several(path_, body):
    models = Models(Source(), keep=60, n_byte=None, n_queue=8, log=lambda line: None)
    server = Router(models, Settings(), lambda line: None, None)
    with TestClient(server.app, base_url="http://localhost") as client:
        for each in wrong(body):
            checked(sent(client, "POST", path_, each))
        for part in PARTS:
            checked(client.get(f"/v1/models/{part}"))
            checked(client.get(f"/props?model={part}"))
            checked(client.post(path_, json=body | {"model": part}))
        server.stop()


@pytest.mark.parametrize("value", VALUES)
def test_a_choice_of_tools_is_one_or_an_error(value):
    """Of the class Llama as well, which hands on what it is given."""
    for choice in (value, {"type": "allowed_tools", "tools": value}, {"function": value}):
        for one in (choice, {"type": "allowed_tools", "allowed_tools": choice}):
            said = ""
            try:
                tools, mode = allowed([TOOL], one)
                forced(tools, mode, None)
            except ValueError as error:
                said = str(error)
            assert len(said) < LONGEST
