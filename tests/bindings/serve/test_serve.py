"""The server's parts on a tiny model: limits, keys, queue, cancelling, prefixes, mixed requests."""

import base64
import contextlib
import json
import queue
import threading

import numpy as np
import pytest
from serving import local_server, reader
from small_pdf import pdf
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from tamis.bindings.compat import Llama
from tamis.bindings.drop_in.completion import Piece, Request
from tamis.bindings.serve.api.readers import read
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.guard import Access, Guard
from tamis.bindings.serve.jobs import Progress
from tamis.bindings.serve.worker import Completion, Worker
from tamis.cli import main
from tamis.sampling.chain import Sampler, SamplerParams

N_CTX, N_UBATCH = 512, 32
HELLO = {"messages": [{"role": "user", "content": "the hand over there"}], "max_tokens": 8}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def sessions(engine, n):
    return [engine.session(n_ctx=N_CTX, n_ubatch=N_UBATCH) for _ in range(n)]


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module")
def client(engine, lines):
    settings = Settings(max_body=1 << 16, metrics=True)
    server = local_server(engine, sessions(engine, 2), settings, lines.append)
    with TestClient(server.app, base_url="http://localhost") as client:
        yield client
    server.stop()
    server.close()


# --- what is refused ------------------------------------------------------------------------------


def refused(response, status, param=None):
    assert response.status_code == status
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert param is None or error["param"] == param
    return error


def extracted(client, name, data):
    data = base64.b64encode(data).decode()
    return client.post("/extract", json={"name": name, "data": data})


def test_the_text_of_a_file_is_extracted_in_a_process_of_its_own(client):
    pytest.importorskip("pypdf")
    found = extracted(client, "a.pdf", pdf("first page", "third")).json()
    assert found == {"text": "first page\n\nthird", "kind": "pdf"}
    page = b"<p>The text.</p><script>evil()</script>"
    assert extracted(client, "a.html", page).json() == {"text": "The text.", "kind": "html"}
    large = b"Many words of text. " * 10_000  # above what other requests may have
    assert extracted(client, "a.txt", large).json()["text"] == large.decode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"%PDF-1.4 x", "damaged PDF"),
        (b"a\0b", "is binary"),
        (b"PK\x03\x04", "ZIP"),
        (b"", "no text"),
    ],
)
def test_a_file_without_text_is_refused_with_the_reason(client, data, message):
    pytest.importorskip("pypdf")
    assert message in refused(extracted(client, "a", data), 400, "data")["message"]


def test_a_file_that_is_no_base64_or_is_missing_is_refused(client):
    refused(client.post("/extract", json={"data": "%"}), 400, "data")
    refused(client.post("/extract", json={"name": "a"}), 400, "data")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}, "messages"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -(1 << 70)}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"context_shift": True, "max_tokens": 1 << 30}, "context_shift"),
        ({"stop": ["y" * 1000]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, None),
        ({"response_format": {"type": "verse"}}, "response_format"),
        ({"grammar": "root ::= ("}, None),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": {"function": {"name": "none of them"}}}, "tool_choice"),
    ],
)
def test_a_wrong_argument_is_named(client, change, param):
    refused(client.post(CHAT, json=HELLO | change), 400, param)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"prompt": NaN}', b'{"prompt": ' + b"[" * 50_000]
)
def test_a_body_that_is_no_json_object_is_refused(client, body):
    headers = {"Content-Type": "application/json"}
    refused(client.post(TEXT, content=body, headers=headers), 400)


def test_what_is_nested_as_deeply_as_json_may_be_is_read_or_refused(path):
    task_reader, n_read = reader(path), 0
    for n in range(700, 1000):
        body = b'{"messages": [{"role": "user", "content": "x"}], "json_schema": '
        body += b'{"a":' * n + b"1" + b"}" * n + b"}"
        with contextlib.suppress(ApiError):
            read("chat", task_reader, body)
            n_read += 1
    assert 0 < n_read < 300


HALF_A_PAIR = "x \ud800"


@pytest.mark.parametrize(
    ("route", "change"),
    [
        ("/apply-template", {"messages": [{"role": "user", "content": HALF_A_PAIR}]}),
        (CHAT, {"messages": [{"role": "user", "content": HALF_A_PAIR}], "verbose": True}),
        ("/completion", {"prompt": "the", "n_predict": 2, "stop": [HALF_A_PAIR]}),
        ("/v1/responses", {"input": "the", "max_output_tokens": 2, "metadata": {HALF_A_PAIR: "a"}}),
        (CHAT, {"tools": [{"function": {"name": HALF_A_PAIR, "parameters": {}}}]}),
    ],
)
def test_half_a_surrogate_pair_is_a_replacement_character(client, route, change):
    headers = {"Content-Type": "application/json"}
    response = client.post(route, content=json.dumps(HELLO | change), headers=headers)
    assert response.status_code == 200
    if route == "/apply-template":
        assert "x \ufffd" in response.json()["prompt"]


def test_a_body_in_another_encoding_than_utf_8_is_refused(client):
    headers = {"Content-Type": "application/json"}
    for encoding, status in (("utf-8-sig", 200), ("utf-16", 400), ("utf-32", 400)):
        data = json.dumps(HELLO).encode(encoding)
        assert client.post(CHAT, content=data, headers=headers).status_code == status
    raw = b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}'
    refused(client.post(CHAT, content=raw, headers=headers), 400)


def test_fields_that_nobody_knows_are_named_in_a_header_that_can_be_sent(client):
    odd = "a\r\nSet-Cookie: b\0\x85\u2028\u00e9" + "x" * 20_000
    response = client.post(CHAT, json=HELLO | {odd: 1, "plain": 1})
    named = response.headers["x-tamis-ignored"]
    assert "Set-Cookie" in named
    assert named.endswith(", plain")
    assert named.isascii()
    assert named.isprintable()
    assert len(named) < 400


def test_a_body_with_two_lengths_is_refused_and_ends_the_connection(client):
    headers = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
    request = client.build_request("POST", CHAT, content=json.dumps(HELLO), headers=headers)
    request.headers["Content-Length"] = "5"
    response = client.send(request)
    refused(response, 400)
    assert response.headers["connection"] == "close"


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(client):
    error = refused(client.post(TEXT, json={"prompt": [5] * 600}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "600" in error["message"]
    assert str(N_CTX) in error["message"]
    refused(client.post("/v1/embeddings", json={"input": [5] * 600}), 400)


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [-1], [10**30], [1.5], {"a": 1}, [True]])
def test_a_prompt_that_is_none_is_refused(client, prompt):
    response = client.post(TEXT, json={"prompt": prompt, "max_tokens": 1})
    if prompt == "":  # the beginning of any text
        assert response.status_code == 200
    else:
        refused(response, 400, "prompt")


def test_large_bodies_other_types_and_other_paths_are_refused(client):
    refused(client.post(CHAT, json=HELLO | {"user": "x" * (1 << 17)}), 413)
    refused(client.post(CHAT, content=json.dumps(HELLO)), 415)
    refused(client.get("/v1/nothing"), 404)
    refused(client.get(CHAT), 405)
    refused(client.get("/v1/models/other"), 404)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("LOCALHOST:1", True),
        ("evil.example", False),
        ("localhost.evil.example:8080", False),
        ("", False),
    ],
)
def test_only_known_hosts_are_answered(client, host, allowed):
    response = client.get("/v1/models", headers={"Host": host})
    assert response.status_code == (200 if allowed else 403)


def test_no_other_site_may_read_answers(client):
    response = client.post(CHAT, json=HELLO, headers={"Origin": "https://evil.example"})
    refused(response, 403)
    assert "access-control-allow-origin" not in response.headers
    for own in ("http://localhost:3000", "http://127.0.0.1", "vscode-file://vscode-app", "null"):
        assert client.post("/tokenize", json={"content": "a"}, headers={"Origin": own}).is_success
    asked = client.options(CHAT, headers={"Access-Control-Request-Method": "POST"})
    assert "access-control-allow-origin" not in asked.headers


def test_a_key_opens_everything_but_health_and_the_page(engine):
    access = Access(key="sésame")
    server = local_server(engine, sessions(engine, 1), Settings(access=access))
    with TestClient(server.app, base_url="http://localhost") as client:
        assert client.get("/health").status_code == 200
        assert client.get("/").status_code == 200
        for given in ("", "Bearer", "Bearer wrong", "Basic sésame", "sésame"):
            found = client.get("/v1/models", headers={"Authorization": given.encode()})
            refused(found, 401)
            assert found.headers["www-authenticate"] == "Bearer"
        key = "Bearer sésame".encode()
        assert client.get("/v1/models", headers={"Authorization": key}).status_code == 200
        assert client.get("/metrics", headers={"Authorization": key}).status_code == 501
    server.stop()
    server.close()


@pytest.mark.parametrize("key", ["voilà", "a b", "x\u0085", "sp\u00a0", "z\u2028", "q\x1f"])
def test_a_key_is_compared_as_it_is(key):
    """Some end with a byte that is a space in Latin-1, as which headers are read."""
    assert Access(key=f" {key}\t\r\n\n").keys == (key,)
    guard = Guard(None, Access(key=key), lambda line: None)
    for scheme in ("Bearer", "bearer ", "Bearer  "):
        given = f"{scheme} {key}".encode().decode("latin-1")
        assert guard._owner(Headers({"authorization": given})) == 0
    assert guard._owner(Headers({"x-api-key": key.encode().decode("latin-1")})) == 0
    for other in (key[:-1], f"{key}\u00a0", key.strip()):
        if other != key:
            wrong = f"Bearer {other}".encode().decode("latin-1")
            assert guard._owner(Headers({"authorization": wrong})) is None


def test_each_of_several_keys_opens(engine):
    access = Access(key="one\n\n  two \n")
    server = local_server(engine, sessions(engine, 1), Settings(access=access))
    with TestClient(server.app, base_url="http://localhost") as client:
        for key, status in (
            ("one", 200),
            ("two", 200),
            ("three", 401),
            ("", 401),
            ("one\ntwo", 401),
        ):
            found = client.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
            assert found.status_code == status
    server.stop()
    server.close()


@pytest.mark.parametrize(
    ("key", "isolate", "salts", "shared"),
    [
        ("", False, ("", ""), True),
        ("one", False, ("", ""), True),
        ("one\ntwo", False, ("", ""), False),
        ("", True, ("", ""), False),
        ("", False, ("x", "x"), True),
        ("", False, ("x", "y"), False),
        ("", False, ("", "x"), False),
        ("one\ntwo", False, ("x", "x"), False),
    ],
)
def test_which_clients_share_the_prompt_cache(engine, key, isolate, salts, shared):
    settings = Settings(access=Access(key=key), isolate=isolate)
    server = local_server(engine, sessions(engine, 2), settings)
    keys = (key.splitlines() or [""]) * 2
    prompt = {"prompt": list(range(5, 90)), "max_tokens": 1}
    cached = []
    with TestClient(server.app, base_url="http://localhost") as client:
        for given, salt in zip(keys, salts, strict=False):
            body = prompt | ({"cache_salt": salt} if salt else {})
            found = client.post(TEXT, json=body, headers={"Authorization": f"Bearer {given}"})
            cached.append(found.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        if not isolate:  # one's own is always reused
            body = prompt | ({"cache_salt": salts[0]} if salts[0] else {})
            head = {"Authorization": f"Bearer {keys[0]}"}
            found = client.post(TEXT, json=body, headers=head).json()
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 84
    assert cached == [0, 84 if shared else 0]
    server.stop()
    server.close()


@pytest.mark.parametrize("salt", ["", 5, "x" * 5000])
def test_a_salt_that_is_none_is_refused(client, salt):
    refused(client.post(TEXT, json={"prompt": "the", "cache_salt": salt}), 400)


def test_other_machines_are_let_in_with_a_key_only(capsys):
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "--api-key-file" in capsys.readouterr().err


BLANK = ["", " ", "\t", "\n", " \n \r\n", "\u00a0"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("key", [*BLANK, "a\0b"])
def test_a_blank_key_is_none_to_serve_with(key, host, tmp_path, monkeypatch, capsys):
    """As an unset variable makes one: a key that is given is no wish for a server without."""
    (tmp_path / "key").write_text(key)
    flags = "serve", "--host", host
    assert main([*flags, "--api-key", key]) == 2
    assert main([*flags, "--api-key-file", str(tmp_path / "key")]) == 2
    assert main([*flags, "--api-key-file", ""]) == 2
    if "\0" not in key:
        monkeypatch.setenv("TAMIS_API_KEY", key)
        assert main([*flags]) == 2
    said = capsys.readouterr().err.splitlines()
    assert all("key" in line for line in said)
    (tmp_path / "config.toml").write_text(f"[serve]\napi-key = {json.dumps(key)}\n")
    monkeypatch.setenv("TAMIS_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("TAMIS_API_KEY", raising=False)
    assert main([*flags]) == 2
    if not key.strip() and key:
        with pytest.raises(ValueError, match="blank"):
            Access(key=key)


@pytest.mark.parametrize("name", ["", " "])
def test_a_blank_name_is_none_to_be_called_by(name, capsys):
    assert main(["serve", "--allow-host", name]) == 2
    assert "--allow-host" in capsys.readouterr().err


def test_the_log_has_no_text_of_prompts(client, lines):
    lines.clear()
    client.post(TEXT, json={"prompt": "the secret of others", "max_tokens": 2})
    client.post(CHAT, json={"messages": [{"role": "user", "content": "secret"}], "n": "secret"})
    assert len(lines) == 2
    assert all("POST '/v1/" in line and "secret" not in line for line in lines)


# --- answers --------------------------------------------------------------------------------------


def test_answers_are_those_of_the_class_llama(client, path):
    llama = Llama(str(path), n_ctx=N_CTX, n_ubatch=N_UBATCH, verbose=False)
    how = {"temperature": 0, "max_tokens": 12}
    chat = llama.create_chat_completion(HELLO["messages"], logprobs=True, top_logprobs=2, **how)
    prompt = "<|im_start|>the hand over"  # with a template of the client's own
    text = llama.create_completion(prompt, logprobs=2, echo=False, **how)
    llama.close()
    found = client.post(CHAT, json=HELLO | how | {"logprobs": True, "top_logprobs": 2}).json()
    assert found["choices"][0]["message"] == chat["choices"][0]["message"]
    tokens = [
        [token["token"] for token in each["choices"][0]["logprobs"]["content"]]
        for each in (found, chat)
    ]
    assert tokens[0] == tokens[1]
    found = client.post(TEXT, json={"prompt": prompt, "logprobs": 2} | how).json()
    assert found["choices"][0]["text"] == text["choices"][0]["text"]
    assert found["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"]
    offsets = [each["choices"][0]["logprobs"]["text_offset"] for each in (found, text)]
    assert offsets[0] == offsets[1]


def test_a_text_completion_keeps_to_a_response_format(client):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "hand"}}}
    body = {"prompt": "the hand", "max_tokens": 40, "response_format": form}
    assert client.post(TEXT, json=body).json()["choices"][0]["text"].strip() == '"hand"'


def test_logprobs_without_likeliest_tokens_are_of_the_answer_alone(client):
    how = {"temperature": 0, "max_tokens": 3, "logit_bias": {"2": -100}, "logprobs": True}
    for n in (0, 2):  # as many as are asked for, whether or not the answer's is one of them
        found = client.post(CHAT, json=HELLO | how | {"top_logprobs": n}).json()
        assert [len(token["top_logprobs"]) for token in logprobs_of(found)["content"]] == [n] * 3
    found = client.post(TEXT, json={"prompt": "the hand"} | how | {"logprobs": 0}).json()
    assert [len(top) for top in logprobs_of(found)["top_logprobs"]] == [1, 1, 1]


def logprobs_of(completion):
    return completion["choices"][0]["logprobs"]


def stream(client, path, body):
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def test_a_stream_is_the_whole_answer_in_parts(client):
    body = HELLO | {"temperature": 0, "max_tokens": 12, "n": 2}
    whole = client.post(CHAT, json=body).json()
    options = {"stream_options": {"include_usage": True}, "return_progress": True}
    chunks = stream(client, CHAT, body | options)
    texts, finished = ["", ""], []
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            finished += [choice["index"]] if choice["finish_reason"] else []
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert sorted(finished) == [0, 1]
    total = whole["usage"]["prompt_tokens"]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[-1]["processed"] == progress[-1]["total"] == total
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(usage) == 1
    assert usage[0] | {"prompt_tokens_details": None} == whole["usage"] | {
        "prompt_tokens_details": None
    }


def test_a_seed_gives_the_same_text_again_and_choices_differ(client):
    body = {"prompt": "the hand", "max_tokens": 16, "temperature": 1.5, "top_k": 0, "seed": 7}
    texts = [
        [choice["text"] for choice in client.post(TEXT, json=body | {"n": 2}).json()["choices"]]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_prompts_as_tokens_lists_and_echo(client):
    ids = client.post("/tokenize", json={"content": "the hand over"}).json()["tokens"]
    body = {"prompt": [ids, "the hand over"], "max_tokens": 6, "temperature": 0, "echo": True}
    choices = client.post(TEXT, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(choice["text"].lstrip().startswith("the hand over") for choice in choices)
    body = r'{"prompt": "\ud83d over", "max_tokens": 1, "echo": true}'
    found = client.post(TEXT, content=body, headers={"Content-Type": "application/json"}).json()
    assert found["choices"][0]["text"].startswith("\ufffd"), "half an emoji"


def test_embeddings_have_length_one_as_numbers_and_packed(client):
    body = {"input": ["the hand", "over there is another"]}
    data = client.post("/v1/embeddings", json=body).json()["data"]
    assert [len(item["embedding"]) for item in data] == [64, 64]
    for item in data:
        assert sum(x * x for x in item["embedding"]) == pytest.approx(1)
    packed = client.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()
    assert isinstance(packed["data"][0]["embedding"], str)


def test_metrics_count_what_was_done(client):
    def counts():
        lines = client.get("/metrics").text.splitlines()
        return dict(line.split() for line in lines if not line.startswith("#"))

    before = counts()
    usage = client.post(TEXT, json={"prompt": "over there", "max_tokens": 5}).json()["usage"]
    after = counts()
    for name, n in (("jobs", 1), ("answer_tokens", usage["completion_tokens"])):
        assert int(after[f"tamis_{name}_total"]) - int(before[f"tamis_{name}_total"]) == n


def test_metrics_have_llama_cpps_names_beside_our_own(client):
    def counts():
        lines = client.get("/metrics").text.splitlines()
        return {k: float(v) for k, v in (x.split() for x in lines if x.startswith("llamacpp:"))}

    before = counts()
    asked = {"prompt": "over there", "max_tokens": 5, "ignore_eos": True}
    timings = client.post(TEXT, json=asked).json()["timings"]
    response = client.get("/metrics")
    assert int(response.headers["process-start-time-unix"]) > 0
    after = counts()
    took = {name.removeprefix("llamacpp:"): after[name] - n for name, n in before.items()}
    assert took["prompt_tokens_total"] == timings["prompt_n"]
    assert took["prompt_tokens_cached_total"] == timings["cache_n"]
    assert (took["tokens_predicted_total"], took["requests_processing"]) == (5, 0)
    assert took["n_decode_total"] >= 5
    assert 0 < took["prompt_seconds_total"] < 60
    assert took["tokens_predicted_seconds_total"] == pytest.approx(timings["predicted_ms"] / 1000)
    assert after["llamacpp:n_tokens_max"] >= 5
    assert after["llamacpp:n_busy_slots_per_decode"] >= 1
    assert after["llamacpp:predicted_tokens_seconds"] > 0
    for name in before:
        assert f"# HELP {name} " in response.text
        assert f"# TYPE {name} " in response.text


def test_the_page_may_load_nothing_from_elsewhere(client):
    response = client.get("/")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    text = response.text.replace("xmlns='http://www.w3.org/2000/svg'", "")  # a name of the icon's
    assert "http://" not in text
    assert "https://" not in text


# --- the worker -----------------------------------------------------------------------------------


def job(engine, prompt, n=8):
    events, prompt = queue.SimpleQueue(), [i % engine.hp.n_vocab for i in prompt]
    sampler = Sampler(SamplerParams(temp=0), engine.hp.n_vocab)
    request = Request(prompt, n, "tiny")
    return Completion(prompt, events.put, request=request, sampler=sampler), events


def answer(events):
    """The text of an answer, or the error that ended it; and how many chunks its prompt took."""
    text, n_chunk = "", 0
    while True:
        event = events.get(timeout=60)
        if isinstance(event, ApiError):
            return event, n_chunk
        n_chunk += isinstance(event, Progress) and event.done > event.cached
        if isinstance(event, Piece):
            text += event.text
            if event.finish:
                return text, n_chunk


@pytest.fixture
def worker(engine):
    worker = Worker(engine, sessions(engine, 2))
    yield worker
    worker.stop()
    worker.join()


def test_jobs_at_once_get_the_answers_they_get_alone(engine, worker):
    prompts = [list(range(10 + i, 30 + 7 * i)) for i in range(5)]
    alone = []
    for prompt in prompts:
        each, events = job(engine, prompt, 24)
        worker.submit([each])
        alone.append(answer(events)[0])
    several = [job(engine, prompt, 24) for prompt in prompts]
    worker.submit([each for each, _ in several])
    assert [answer(events)[0] for _, events in several] == alone
    assert worker.counts.steps < worker.counts.answer_tokens  # some steps were of two answers


def test_a_cancelled_job_frees_its_slot_and_leaves_no_trace(engine, worker):
    expected, begun, go_on = [], threading.Event(), threading.Event()
    for cancel in (False, True):
        if cancel:
            long, _ = job(engine, range(5, 450), 40)
            long.emit = lambda event: (begun.set(), go_on.wait(60))
            worker.submit([long])
            assert begun.wait(60)  # its prompt is being read
            assert sorted(slot.n_left for slot in worker.slots()) == [-1, 40]
            long.cancelled = True
            go_on.set()
        each, found = job(engine, range(7, 80), 16)
        worker.submit([each])
        expected.append(answer(found)[0])
    assert expected[0] == expected[1]
    assert worker.counts.cancelled == 1


def test_what_was_read_of_a_prompt_stays_for_a_client_that_asks_again(engine, worker):
    alone, found = job(engine, range(5, 450), 8)
    worker.submit([alone])
    expected, n_all = answer(found)
    other = Worker(engine, sessions(engine, 1))
    read, go_on = threading.Event(), threading.Event()

    def emit(event):  # holds the worker up once half of the prompt has been read
        if isinstance(event, Progress) and event.done > 200:
            read.set()
            go_on.wait(60)

    impatient, _ = job(engine, range(5, 450), 8)
    impatient.emit = emit
    other.submit([impatient])
    assert read.wait(60)
    impatient.cancelled = True
    go_on.set()
    again, found = job(engine, range(5, 450), 8)
    other.submit([again])
    text, n_chunk = answer(found)
    assert (text, other.counts.cancelled) == (expected, 1)
    assert again.n_cached > 200
    assert n_chunk < n_all
    other.stop()
    other.join()


def test_what_another_slot_holds_is_not_read_again(engine, worker):
    shared = list(range(5, 5 + 2 * N_UBATCH + 70))
    first, events = job(engine, [*shared, 300], 200)
    worker.submit([first])
    while not isinstance(events.get(timeout=60), Piece):
        pass
    second, other = job(engine, [*shared, 301], 8)  # while the first is being answered
    worker.submit([second])
    text, n_chunk = answer(other)
    assert second.n_cached == len(shared)
    assert n_chunk == 1
    alone, events = job(engine, [*shared, 301], 8)
    fresh = Worker(engine, sessions(engine, 1))
    fresh.submit([alone])
    assert answer(events)[0] == text
    fresh.stop()
    fresh.join()


def test_jobs_that_come_at_once_read_the_beginning_that_they_share_once(engine, worker):
    shared = list(range(5, 45))
    jobs = [job(engine, [*shared, 300 + i]) for i in range(3)]
    worker.submit([each for each, _ in jobs])
    found = [answer(events)[0] for _, events in jobs]
    assert [each.n_cached for each, _ in jobs] == [0, len(shared), len(shared)]
    fresh = Worker(engine, sessions(engine, 1))
    alone, events = job(engine, [*shared, 301])
    fresh.submit([alone])
    assert answer(events)[0] == found[1]
    fresh.stop()
    fresh.join()


def test_one_that_fails_fails_alone(engine, worker):
    class Failing(Sampler):
        def sample(self, logits):
            raise ZeroDivisionError("within")

    wrong, events = job(engine, range(5, 40))
    wrong.sampler = Failing(SamplerParams(temp=0), engine.hp.n_vocab)
    right, others = job(engine, range(6, 40))
    worker.submit([wrong, right])
    error, _ = answer(events)
    assert error.status == 500
    assert "within" not in error.message  # a client is not shown the inside
    assert isinstance(answer(others)[0], str)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_are_the_models_fault(engine, worker, monkeypatch, bad):
    def damaged(*given):
        return np.full(engine.hp.n_vocab, bad, np.float32)

    each, events = job(engine, range(5, 40))
    sample = each.sampler.sample
    each.sampler.sample = lambda row: sample(damaged(row))
    worker.submit([each])
    error, _ = answer(events)
    assert error.status == 500
    assert error.body["error"]["type"] == "server_error"
    assert "logit" in error.message


def test_scheduling_is_fair_between_owners(engine):
    worker = Worker(engine, sessions(engine, 1))
    order, go_on = [], threading.Event()
    first, _ = job(engine, range(5, 20), 1)
    first.emit = lambda event: go_on.wait(60)
    worker.submit([first])
    waits = []
    for i, owner in enumerate("aaaab"):
        each, events = job(engine, range(6 + i, 30), 1)
        each.owner = owner

        def emit(event, owner=owner, events=events):
            order.extend(owner for _ in [event] if isinstance(event, Piece) and event.finish)
            events.put(event)

        each.emit = emit
        worker.submit([each])
        waits.append(events)
    go_on.set()
    for events in waits:
        answer(events)
    assert order.index("b") <= 1
    worker.stop()
    worker.join()
