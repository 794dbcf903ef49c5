"""Fields of requests over all routes: those that are heeded, and those that are named instead."""

import asyncio
import gc
import json

import numpy as np
import pytest
from serving import local_server, reader, said
from starlette.testclient import TestClient

from tamis.bindings.drop_in.tools import NO_PARAMETERS
from tamis.bindings.serve.api import anthropic, openai
from tamis.bindings.serve.api.readers import READERS
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http.app import unless_gone
from tamis.bindings.serve.requests import HARMLESS

HELLO = {"messages": [{"role": "user", "content": "the hand"}]}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLOCK = {"name": "clock", "description": "tells the time"}
ROUTES = [
    (CHAT, HELLO | {"max_tokens": 2}),
    (TEXT, {"prompt": "the hand", "max_tokens": 2}),
    ("/completion", {"prompt": "the hand", "n_predict": 2}),
    ("/v1/messages", HELLO | {"max_tokens": 2}),
    ("/v1/responses", {"input": "the hand", "max_output_tokens": 2}),
    ("/api/chat", HELLO | {"options": {"num_predict": 2}, "stream": False}),
    ("/api/generate", {"prompt": "the hand", "options": {"num_predict": 2}, "stream": False}),
    ("/v1/embeddings", {"input": "the hand"}),
    ("/embedding", {"content": "the hand"}),
    ("/api/embed", {"input": "the hand"}),
    ("/api/embeddings", {"prompt": "the hand"}),
]


@pytest.fixture(scope="module")
def roomy(engine):
    """A client whose context has room for a prompt with tools and for white space in calls."""
    server = local_server(engine, [engine.session(n_ctx=1024, n_ubatch=32)])
    with TestClient(server.app, base_url="http://localhost") as client:
        yield client
    server.stop()
    server.close()


# --- seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 + 7, 2**63 - 1, -(2**63), -2, 7.0])
def test_a_seed_has_64_bits_and_repeats_a_text(client, seed):
    asked = {"prompt": "the", "n_predict": 12, "temperature": 2.0, "top_k": 0, "seed": seed}
    asked |= {"ignore_eos": True}
    one, two = (client.post("/completion", json=asked).json() for _ in range(2))
    assert one["content"] == two["content"]
    assert one["generation_settings"]["seed"] == seed


def test_seeds_that_differ_above_32_bits_draw_other_texts(client, path):
    asked = {"prompt": "the", "n_predict": 12, "temperature": 2.0, "top_k": 0, "ignore_eos": True}
    seeds = [7, 2**32 + 7, 2**40 + 7, 7 - 2**63]
    texts = [client.post("/completion", json=asked | {"seed": s}).json()["content"] for s in seeds]
    assert len(set(texts)) == len(seeds)
    last = READERS["chat"](reader(path), Body(HELLO | {"seed": 2**63 - 1, "n": 2}))
    assert [last.seed_of(i) for i in range(2)] == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**400, "7", 1.5, True])
def test_what_is_no_seed_is_refused_with_the_range(client, seed):
    response = client.post("/completion", json={"prompt": "the", "seed": seed})
    assert response.status_code == 400
    assert f"expected {-(2**63)} to {2**63 - 1}" in response.json()["error"]["message"]


# --- stops and tools ------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["", [""], ["", ""], None, []])
@pytest.mark.parametrize("route", ["/completion", TEXT])
def test_an_empty_stop_string_is_none(client, route, stop):
    asked = {"prompt": "the hand", "max_tokens": 6, "n_predict": 6, "temperature": 0}
    asked |= {"ignore_eos": True}
    free, found = (client.post(route, json=asked | more).json() for more in ({}, {"stop": stop}))
    name = "content" if "content" in free else "choices"
    text = free[name] if name == "content" else free[name][0]["text"]
    assert text
    assert (found[name] if name == "content" else found[name][0]["text"]) == text


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "clock"}}]
)
def test_a_tool_without_parameters_is_called_with_an_empty_object(roomy, parameters, choice):
    tools = [{"type": "function", "function": CLOCK | parameters}]
    asked = HELLO | {"tools": tools, "tool_choice": choice, "max_tokens": 500, "temperature": 0}
    reply = roomy.post(CHAT, json=asked).json()
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("clock", {})


def test_the_same_over_other_apis(path):
    responses = {"input": "the", "tools": [{"type": "function", **CLOCK}]}
    old = HELLO | {"functions": [CLOCK]}
    for name, body in (("messages", HELLO | {"tools": [CLOCK]}), ("responses", responses)):
        (tool,) = READERS[name](reader(path), Body(body)).wanted.tools
        assert tool["function"]["parameters"] == NO_PARAMETERS
    for body in (old, HELLO | {"tools": [{"type": "function", "function": CLOCK}]}):
        (tool,) = READERS["chat"](reader(path), Body(body)).wanted.tools
        assert tool["function"]["parameters"] == NO_PARAMETERS


TWICE = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n' * 2


@pytest.mark.parametrize("n", [1, 7, 500])
@pytest.mark.parametrize("given", [True, None, False])
def test_calls_beyond_the_first_are_dropped_where_parallel_ones_are_off(path, given, n):
    asked = HELLO | {"tools": [{"type": "function", "function": CLOCK}]}
    asked |= {"parallel_tool_calls": given}
    events, whole = said(reader(path), "chat", openai.Chat, asked, TWICE, n=n)
    calls = whole["choices"][0]["message"]["tool_calls"]
    assert len(calls) == (1 if given is False else 2)
    indices = {
        call["index"]
        for event in events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
    }
    assert indices == set(range(len(calls)))
    single = {"type": "auto", "disable_parallel_tool_use": True}
    body = HELLO | {"tools": [CLOCK], "tool_choice": single}
    _, found = said(reader(path), "messages", anthropic.Messages, body, TWICE, n=n)
    assert sum(block["type"] == "tool_use" for block in found["content"]) == 1


# --- embeddings -----------------------------------------------------------------------------------


def rows(client, route, **more):
    name = "content" if route == "/embedding" else "input"
    response = client.post(route, json={name: "the hand over"} | more)
    assert response.status_code == 200, response.text
    reply = response.json()
    if route == "/api/embed":
        return np.array(reply["embeddings"][0])
    return np.array(
        reply[0]["embedding"][0] if name == "content" else reply["data"][0]["embedding"]
    )


@pytest.mark.parametrize("route", ["/embedding", "/v1/embeddings", "/api/embed"])
def test_embeddings_are_normalized_as_embd_normalize_says(client, route):
    raw = rows(client, route, embd_normalize=-1)
    assert abs(np.linalg.norm(raw) - 1) > 1e-3
    expected = {
        0: raw / np.abs(raw).max() * 32760,
        1: raw / np.abs(raw).sum(),
        2: raw / np.linalg.norm(raw),
        3: raw / (np.abs(raw) ** 3).sum() ** (1 / 3),
        1000: raw / np.abs(raw).max(),
    }
    for norm, values in expected.items():
        found = rows(client, route, embd_normalize=norm)
        assert found == pytest.approx(values, rel=2e-3 if norm == 1000 else 1e-5), norm
    assert rows(client, route) == pytest.approx(expected[2], rel=1e-5), "Euclid's by default"


@pytest.mark.parametrize("norm", [-2, 1025, 1.5, "2"])
def test_other_norms_are_refused_with_the_range(client, norm):
    response = client.post("/embedding", json={"content": "x", "embd_normalize": norm})
    assert response.status_code == 400
    assert "expected -1 to 1024" in response.json()["error"]["message"]


@pytest.mark.parametrize(("route", "body"), ROUTES, ids=[route for route, _ in ROUTES])
def test_a_field_that_is_not_heeded_is_named_on_every_route(client, route, body):
    response = client.post(route, json=body | {"frobnicate": 1})
    assert response.status_code == 200, response.text
    assert response.headers["x-tamis-ignored"] == "frobnicate"
    assert "x-tamis-ignored" not in client.post(route, json=body | {"user": "x"}).headers


# A part that cannot be enforced: items that differ from each other, of any text.
SET = {"type": "array", "items": {"type": "string", "maxLength": 1}, "uniqueItems": True}
LOOSE = {"type": "object", "properties": {"a": SET | {"maxItems": 2}}, "required": ["a"]}
FORMS = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOSE}}},
    TEXT: {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOSE}}},
    "/completion": {"json_schema": LOOSE},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": LOOSE}}},
    "/v1/responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": LOOSE}}},
    "/api/chat": {"format": LOOSE},
    "/api/generate": {"format": LOOSE},
}
CALLS = {
    CHAT: {
        "tools": [{"type": "function", "function": {"name": "put", "parameters": LOOSE}}],
        "tool_choice": "required",
    },
    "/v1/messages": {
        "tools": [{"name": "put", "input_schema": LOOSE}],
        "tool_choice": {"type": "any"},
    },
    "/v1/responses": {
        "tools": [{"type": "function", "name": "put", "parameters": LOOSE}],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("route", FORMS)
def test_what_of_a_schema_is_not_enforced_is_named_on_every_route(client, route):
    body = dict(ROUTES)[route] | FORMS[route]
    for field, named in (({}, []), ({"frobnicate": 1}, ["frobnicate"])):
        response = client.post(route, json=body | field)
        assert response.status_code == 200, response.text
        expected = ", ".join([*named, "schema#/properties/a/uniqueItems"])
        assert response.headers["x-tamis-ignored"] == expected


@pytest.mark.parametrize("route", FORMS)
def test_what_of_a_schema_is_not_enforced_is_named_before_a_stream(client, route):
    body = dict(ROUTES)[route] | FORMS[route] | {"stream": True}
    with client.stream("POST", route, json=body) as response:
        assert response.headers["x-tamis-ignored"] == "schema#/properties/a/uniqueItems"
        assert response.read()


@pytest.mark.parametrize("route", CALLS)
def test_what_of_a_tool_is_not_enforced_is_named(roomy, route):
    response = roomy.post(route, json=dict(ROUTES)[route] | CALLS[route])
    assert response.status_code == 200, response.text
    named = response.headers["x-tamis-ignored"]
    assert named.startswith("schema#/")
    assert named.endswith("/properties/a/uniqueItems")


@pytest.mark.parametrize("n_part", [31, 33, 40])
def test_names_beyond_those_of_a_header_are_counted(client, n_part):
    names = [f"a{i}" for i in range(n_part)]
    unknown = dict.fromkeys(names, 1)
    response = client.post(CHAT, json=dict(ROUTES)[CHAT] | FORMS[CHAT] | unknown)
    told = response.headers["x-tamis-ignored"].split(", ")
    everything = [*names, "schema#/properties/a/uniqueItems"]
    if len(everything) <= 32:
        assert told == everything
    else:
        assert told == [*everything[:31], f"{len(everything) - 31} more"]


# --- harmless fields ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field", "named"),
    [
        ("chat", {"options": {"temperature": 0}}, "options"),
        ("chat", {"think": False}, "think"),
        ("chat", {"text": {"verbosity": "low"}}, "text"),
        ("chat", {"verbosity": "low"}, "verbosity"),
        ("chat", {"reasoning": {"effort": "high"}}, "reasoning"),
        ("chat", {"truncate": True}, "truncate"),
        ("messages", {"output_config": {"speed": "fast"}}, "output_config.speed"),
        ("messages", {"output_config": {"effort": "mild"}}, "output_config.effort"),
        ("messages", {"thinking": {"type": "disabled", "display": "no"}}, "thinking.display"),
        ("messages", {"container": "c"}, "container"),
        (
            "messages",
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.clear_tool_uses_20250919",
        ),
        ("responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("responses", {"truncation": "auto"}, "truncation"),
        (
            "responses",
            {"include": ["message.output_text.logprobs"]},
            "include.message.output_text.logprobs",
        ),
    ],
)
def test_what_may_change_an_answer_is_not_left_out_in_silence(path, name, field, named):
    body = {"input": "x"} if name == "responses" else HELLO
    assert READERS[name](reader(path), Body(body | field)).ignored == (named,)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("messages", {"context_management": {"edits": [{"type": "clear", "keep": "all"}]}}),
        ("messages", {"output_config": {"effort": "low"}}),
        ("responses", {"include": ["reasoning.encrypted_content"], "truncation": "disabled"}),
        ("responses", {"reasoning": {"effort": "low", "summary": "auto"}}),
        ("ollama chat", {"think": True, "keep_alive": "5m", "truncate": True}),
        *(("chat", {name: "x"}) for name in sorted(HARMLESS)),
    ],
)
def test_what_changes_no_answer_is_not_named(path, name, field):
    body = {"input": "x"} if name == "responses" else HELLO
    assert READERS[name](reader(path), Body(body | field)).ignored == ()


# --- Anthropic's structured outputs ---------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"side": {"enum": ["left", "right"]}},
    "required": ["side"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize("field", [{"output_config": {"format": FORM}}, {"output_format": FORM}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_the_form_that_is_asked_for(client, field, stream):
    asked = HELLO | field | {"max_tokens": 60, "stream": stream}
    response = client.post("/v1/messages", json=asked)
    assert response.status_code == 200, response.text
    if stream:
        events = [json.loads(x[6:]) for x in response.text.splitlines() if x.startswith("data: ")]
        text = "".join(
            e["delta"].get("text", "") for e in events if "content_block_delta" in e["type"]
        )
    else:
        (block,) = response.json()["content"]
        text = block["text"]
    assert json.loads(text)["side"] in ("left", "right")


@pytest.mark.parametrize("form", [5, {}, {"type": "json_object"}, {"type": "json_schema"}])
@pytest.mark.parametrize("beta", [True, False])
def test_other_forms_are_refused(form, beta):
    field = {"output_format": form} if beta else {"output_config": {"format": form}}
    with pytest.raises(ApiError, match="output_"):
        anthropic.as_chat(Body(HELLO | field))


# --- what replies tell ----------------------------------------------------------------------------


def test_a_reply_names_its_slot(client):
    asked = {"prompt": "the hand", "n_predict": 3, "id_slot": 0}
    assert client.post("/completion", json=asked).json()["id_slot"] == 0
    with client.stream("POST", "/completion", json=asked | {"stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line]
    assert {event["id_slot"] for event in events} == {0}


def test_rates_are_of_decode_steps_of_which_one_token_takes_none(client):
    asked = {"prompt": "the hand", "ignore_eos": True}
    one = client.post("/completion", json=asked | {"n_predict": 1}).json()["timings"]
    assert (one["predicted_n"], one["predicted_per_second"]) == (1, 0)
    assert one["predicted_per_token_ms"] == 0
    some = client.post("/completion", json=asked | {"n_predict": 9}).json()["timings"]
    assert some["predicted_per_second"] == pytest.approx(8000 / some["predicted_ms"])
    none = client.post("/completion", json=asked | {"n_predict": 0}).json()["timings"]
    assert none["predicted_per_second"] == 0


def test_progress_has_times_where_they_are_asked_for(client):
    asked = {"prompt": [5, 6, 7] * 40, "n_predict": 2, "stream": True, "return_progress": True}
    asked |= {"timings_per_token": True, "cache_prompt": False}
    with client.stream("POST", "/completion", json=asked) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line]
    times = [event["timings"] for event in events if "prompt_progress" in event]
    assert len(times) > 2
    assert (times[0]["prompt_n"], times[0]["prompt_ms"]) == (0, 0)
    assert sorted(time["prompt_ms"] for time in times) == [time["prompt_ms"] for time in times]
    assert times[-1]["prompt_n"] == 120


def test_settings_show_the_biases_of_ignore_eos(client, engine):
    asked = {"prompt": "the", "n_predict": 1, "logit_bias": [[5, 1.5]]}
    plain = client.post("/completion", json=asked).json()["generation_settings"]["logit_bias"]
    assert plain == [{"token": 5, "bias": 1.5}]
    more = client.post("/completion", json=asked | {"ignore_eos": True}).json()
    biases = {each["token"]: each["bias"] for each in more["generation_settings"]["logit_bias"]}
    assert biases == {5: 1.5} | dict.fromkeys(engine.tokenizer.eog)


def test_the_tokenizer_is_described_and_asked_in_vllms_words(client, engine):
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == engine.vocab.tokens[engine.vocab.eos]
    assert info["vocab_size"] == len(engine.vocab)
    assert {"bos_token", "pad_token", "unk_token", "chat_template", "add_bos_token"} <= info.keys()
    plain = client.post(
        "/tokenize", json={"prompt": "the hand", "add_special_tokens": False}
    ).json()
    assert (
        plain["tokens"] == client.post("/tokenize", json={"content": "the hand"}).json()["tokens"]
    )
    assert (plain["count"], plain["max_model_len"]) == (len(plain["tokens"]), 512)
    text = client.post("/detokenize", json={"tokens": plain["tokens"]}).json()["prompt"]
    assert text == "the hand"
    asked = {"prompt": "the hand", "return_token_strs": True, "add_special_tokens": False}
    assert "".join(client.post("/tokenize", json=asked).json()["token_strs"]) == "the hand"
    prompt = client.post("/apply-template", json=HELLO).json()["prompt"]
    chat = client.post("/tokenize", json=HELLO).json()["tokens"]
    assert chat == client.post("/tokenize", json={"content": prompt}).json()["tokens"]


# --- clients that leave ---------------------------------------------------------------------------


class Leaving:
    """A request whose client is gone at once."""

    async def receive(self):
        return {"type": "http.disconnect"}


def test_a_client_that_leaves_leaves_no_coroutine_behind():
    """The task of the work has ended before the coroutine is closed, and its error is heard."""
    problems = []

    async def work():
        await asyncio.sleep(60)

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, told: problems.append(told))
        given = work()
        with pytest.raises(ApiError, match="client"):
            await unless_gone(Leaving(), given)
        given.close()
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not problems
