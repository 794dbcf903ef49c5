"""Ollama's API: options, NDJSON, lists of models; a tiny model answers."""

import asyncio
import json
import math
import threading
import time
from types import SimpleNamespace

import pytest
from serving import local_server, reader, said
from starlette.testclient import TestClient

from tamis.bindings.serve.api import ollama
from tamis.bindings.serve.api.readers import READERS
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.http import app, ollama_routes
from tamis.bindings.serve.http.app import same_model
from tamis.fetch import registry

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "the hand"}]}
FEW = {"options": {"num_predict": 4}}


def test_options_are_the_samplers_fields(path):
    options = {"num_predict": 7, "temperature": 0.5, "seed": 3, "stop": ["x"], "num_gpu": 99}
    body = ASKED | {"options": options | {"num_ctx": 4096, "repeat_last_n": 8}, "think": False}
    task = READERS["ollama chat"](reader(path), Body(body))
    assert (task.requests[0].max_tokens, task.requests[0].stop) == (7, ("x",))
    assert (task.sampling.temp, task.seed, task.sampling.repeat_last_n) == (0.5, 3, 8)
    assert task.stream, "ollama streams unless told"
    assert task.ignored == ("options.num_ctx",), "a context above the server's is named"
    assert task.wanted.tail.endswith("</think>\n\n")


@pytest.mark.parametrize("n", [1, 6, 500])
def test_lines_of_a_chat_with_thoughts_and_a_call(path, n):
    call = '{"name": "f", "arguments": {"x": 1}}'
    text = f"<think>\nHm.\n</think>\n\nWell.\n<tool_call>\n{call}\n</tool_call>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = ASKED | {"tools": tools}
    lines, whole = said(reader(path), "ollama chat", ollama.Chat, body, text, n=n)
    messages = [line["message"] for line in lines]
    assert "".join(m.get("thinking", "") for m in messages) == "Hm."
    assert "".join(m["content"] for m in messages) == "Well."
    calls = [call["function"] for m in messages for call in m.get("tool_calls", ())]
    assert calls == [{"name": "f", "arguments": {"x": 1}}], "whole, as ollama has them"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert whole["message"]["thinking"] == "Hm."
    assert (whole["done_reason"], whole["prompt_eval_duration"]) == ("stop", 500_000_000)
    assert whole["eval_count"] == lines[-1]["eval_count"]


def test_chats_and_completions(client):
    lines = client.post("/api/chat", json=ASKED | FEW)
    assert lines.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in lines.text.splitlines()]
    assert found[-1]["done"] is True
    assert found[-1]["eval_count"] == 4
    whole = client.post("/api/chat", json=ASKED | FEW | {"stream": False}).json()
    assert whole["message"]["role"] == "assistant"
    asked = {"model": "tiny", "prompt": "the hand", "stream": False}
    found = client.post("/api/generate", json=asked | FEW).json()
    raw = client.post("/api/generate", json=asked | FEW | {"raw": True}).json()
    assert found["prompt_eval_count"] > raw["prompt_eval_count"], "raw has no template"
    assert set(raw) >= {"response", "created_at", "total_duration", "eval_duration"}


def test_a_format_is_kept_to(client):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    body = ASKED | {"format": schema, "stream": False, "options": {"num_predict": 64}}
    found = client.post("/api/chat", json=body).json()
    assert json.loads(found["message"]["content"])["a"] in (1, 2)
    few = ASKED | {"stream": False, "options": {"num_predict": 4, "temperature": 0}}
    plain = client.post("/api/chat", json=few).json()["message"]
    for none in ("", None):
        asked = few | {"format": none}
        assert client.post("/api/chat", json=asked).json()["message"] == plain
    assert client.post("/api/chat", json=few | {"format": "json"}).status_code == 200


def test_a_request_without_a_prompt_loads_the_model(client):
    found = client.post("/api/generate", json={"model": "tiny"}).json()
    assert (found["done"], found["done_reason"]) == (True, "load")
    found = client.post("/api/chat", json={"model": "tiny", "messages": [], "keep_alive": 0}).json()
    assert found["done_reason"] == "unload"


def test_embeddings(client):
    begin = time.monotonic()
    found = client.post("/api/embed", json={"model": "tiny", "input": ["a", "b"]}).json()
    assert [len(row) for row in found["embeddings"]] == [64, 64]
    assert found["load_duration"] == 0
    assert 0 < found["total_duration"] <= 1e9 * (time.monotonic() - begin)
    long = client.post("/api/embed", json={"model": "tiny", "input": "the hand " * 600})
    assert long.json()["prompt_eval_count"] == 512, "it is cut, as truncate says there"
    body = {"model": "tiny", "input": "the hand " * 600, "truncate": False}
    assert client.post("/api/embed", json=body).status_code == 400
    assert len(client.post("/api/embeddings", json={"prompt": "a"}).json()["embedding"]) == 64
    assert client.post("/api/embed", json={"input": []}).json()["embeddings"] == []
    options = {"num_thread": 2, "num_ctx": 9}  # of the server, and how much of a text is read
    for path, name in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        reply = client.post(path, json={name: "a", "options": options})
        assert reply.headers["x-tamis-ignored"] == "options.num_ctx"


def test_what_there_is(client):
    (model,) = client.get("/api/tags").json()["models"]
    assert (model["name"], model["details"]["family"]) == ("tiny", "llama")
    shown = client.post("/api/show", json={"model": "tiny"}).json()
    assert shown["model_info"]["general.architecture"] == "llama"
    assert "completion" in shown["capabilities"]
    assert client.get("/api/version").json() == {"version": ollama_routes.API_VERSION}


@pytest.mark.parametrize(
    ("where", "body"),
    [
        ("chat", ASKED | {"format": 5}),
        ("chat", ASKED | {"format": "xml"}),
        ("chat", ASKED | {"think": "deeply"}),
        ("chat", ASKED | {"options": {"temperature": "hot"}}),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["AA"]}]}),
        ("generate", {"prompt": "x", "images": ["AA"]}),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}),
        ("show", {}),
    ],
)
def test_errors_have_ollamas_form(client, where, body):
    response = client.post(f"/api/{where}", json=body)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}


def test_models_are_pulled_and_deleted(client, monkeypatch, tmp_path):
    files = [tmp_path / f"other-0000{i}-of-00002.gguf" for i in (1, 2)]
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))

    def pull(name, progress):
        progress("downloading", 5, 10)
        for file in files:
            file.write_bytes(b"x")
        progress("downloading", 10, 10)

    monkeypatch.setattr(registry, "pull", pull)
    lines = client.post("/api/pull", json={"model": "smollm2"}).text.splitlines()
    found = [json.loads(line) for line in lines]
    assert found[-1] == {"status": "success"}
    assert any(line.get("completed") == line.get("total") == 10 for line in found)
    once = client.post("/api/pull", json={"model": "smollm2", "stream": False}).json()
    assert once == {"status": "success"}
    assert client.post("/api/pull", json={"model": "no-such-model"}).status_code == 404
    assert client.request("DELETE", "/api/delete", json={"model": "none"}).status_code == 404
    name = files[0].name
    assert client.request("DELETE", "/api/delete", json={"model": name}).status_code == 200
    assert not any(file.exists() for file in files)  # no part is left


@pytest.mark.parametrize(
    "name", ["hf:", "hf:a", "hf:../b", "hf:a/b/c", "hf:a/" + "b" * 999, "../x"]
)
def test_a_wrong_name_is_said_to_be(client, name):
    for stream in (True, False):
        found = client.post("/api/pull", json={"model": name, "stream": stream})
        assert found.status_code == 400
        assert len(found.json()["error"]) < 300
    found = client.request("DELETE", "/api/delete", json={"model": name})
    assert found.status_code == (400 if len(name) > 512 else 404)


def test_a_pull_that_fails_whatever_way_says_so(client, monkeypatch):
    def pull(name, progress):
        raise KeyError("a bug of a library")

    monkeypatch.setattr(registry, "pull", pull)
    for _ in range(ollama_routes.MOST_PULLS + 1):  # each makes room for the next one
        lines = client.post("/api/pull", json={"model": "smollm2"}).text.splitlines()
        assert json.loads(lines[-1]) == {"error": "a bug of tamis: KeyError"}
    found = client.post("/api/pull", json={"model": "smollm2", "stream": False})
    assert (found.status_code, found.json()) == (500, {"error": "a bug of tamis: KeyError"})


@pytest.mark.parametrize(
    ("name", "pulled"),
    [
        ("smollm2", "smollm2"),
        ("smollm2:latest", "smollm2"),
        ("hf:a/b:Q4_0", "hf:a/b:Q4_0"),
        ("a/b:Q4_0", "hf:a/b:Q4_0"),
        ("hf.co/a/b:Q4_0", "hf:a/b:Q4_0"),
        ("huggingface.co/a/b:Q4_0", "hf:a/b:Q4_0"),
    ],
)
def test_a_model_is_pulled_by_any_of_its_names(client, monkeypatch, name, pulled):
    names = []

    def pull(name, progress):
        assert threading.current_thread().daemon, "the process ends without it"
        names.append(name)

    monkeypatch.setattr(registry, "pull", pull)
    reply = client.post("/api/pull", json={"model": name, "stream": False})
    assert reply.json() == {"status": "success"}
    assert names == [pulled]


@pytest.mark.parametrize(("think", "more"), [(None, []), (("<think>", "</think>"), ["thinking"])])
def test_abilities_are_those_of_the_template_and_the_vocabulary(monkeypatch, think, more):
    form = SimpleNamespace(think=think)
    made = SimpleNamespace(parsed=lambda *, tools: form if tools else None)
    monkeypatch.setattr(ollama_routes, "ChatFormat", lambda text, name: made)
    text = SimpleNamespace(vocab=SimpleNamespace(fim={}))
    assert ollama_routes._capabilities(text) == ["completion", "tools", *more]
    text.vocab.fim = {"pre": 1, "suf": 2, "mid": 3}
    assert ollama_routes._capabilities(text) == ["completion", "tools", *more, "insert"]


def test_a_wrong_time_to_keep_a_model_is_refused_without_a_prompt(client):
    reply = client.post("/api/generate", json={"model": "tiny", "keep_alive": "soon"})
    assert reply.status_code == 400
    assert "keep_alive is 'soon', expected seconds" in reply.json()["error"]


def test_a_model_is_not_deleted_that_is_served_by_another_path(engine, tmp_path, monkeypatch):
    """By a link to its file, and by any part of a split one."""
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    (tmp_path / "folder.gguf").mkdir()
    file = tmp_path / "m.gguf"
    file.symlink_to(engine.path)
    server = local_server(engine, [engine.session(n_ctx=64)])
    with TestClient(server.app, base_url="http://localhost") as client:
        assert client.request("DELETE", "/api/delete", json={"model": "m.gguf"}).status_code == 409
        found = client.request("DELETE", "/api/delete", json={"model": "folder.gguf"})
        assert found.status_code == 404
    server.stop()
    server.close()
    assert file.exists()
    assert same_model("/a/m-00001-of-00002.gguf", "/a/m-00002-of-00002.gguf")
    assert not same_model("/a/m-00001-of-00002.gguf", "/a/m-00001-of-00003.gguf")


def test_the_servers_end_waits_for_no_pull_and_few_run_at_once(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(registry, "pull", lambda name, progress: over.wait(5))

    async def begun(n):
        pulls = [ollama_routes.pulled("smollm2") for _ in range(n)]
        first = [await anext(pull) for pull in pulls]
        later = [asyncio.ensure_future(anext(pull, None)) for pull in pulls]
        await asyncio.sleep(0.2)
        return first, [task.result() for task in later if task.done()]

    begin = time.monotonic()
    most = ollama_routes.MOST_PULLS
    first, told = asyncio.run(begun(most + 2))
    assert time.monotonic() - begin < 3
    over.set()
    assert first[:most] == [{"status": "pulling manifest"}] * most
    assert [list(line) for line in first[most:]] == [["error"]] * 2
    assert told == [None, None]  # those that were refused are over, the others wait


def test_what_a_models_file_has_that_json_has_not_is_left_as_nothing(monkeypatch, client):
    facts = app.ModelFile("m", 1, 0.0, "llama", 9, "F32", {"a": math.nan, "b": "x\udcff", "c": 1})
    monkeypatch.setattr(app.Server, "facts", lambda server: facts)
    found = client.post("/api/show", json={"model": "tiny"})
    assert found.json()["model_info"] == {"a": None, "b": "x\ufffd", "c": 1}


@pytest.mark.parametrize("header", ["origin", "sec-fetch-site"])
def test_bodies_of_any_type_are_read_but_not_of_pages(client, header):
    data = json.dumps(ASKED | FEW | {"stream": False}).encode()
    kind = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/api/chat", content=data, headers=kind).status_code == 200
    page = kind | {header: "null"}
    assert client.post("/api/chat", content=data, headers=page).status_code == 415
    assert client.post("/v1/chat/completions", content=data, headers=kind).status_code == 415
