"""llama.cpp's API: completions in full, gaps, tokens, templates, slots; a tiny model answers."""

import json
import math

import pytest
from serving import local_server, reader
from starlette.testclient import TestClient

from tamis.bindings.serve.api.readers import READERS
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.http.app import Settings
from tamis.engine.engine import Engine

ASKED = {"prompt": "the hand over", "n_predict": 6, "temperature": 0}
MESSAGES = [{"role": "user", "content": "the hand"}]
NO_END = {"logit_bias": [[i, False] for i in range(290, 295)]}


@pytest.fixture(scope="module")
def client(path, tmp_path_factory):
    engine = Engine.load(path, n_threads=2)
    sessions = [engine.session(n_ctx=512, n_ubatch=32) for _ in range(2)]
    settings = Settings(slot_folder=tmp_path_factory.mktemp("slots"), usual={"seed": 42})
    server = local_server(engine, sessions, settings)
    with TestClient(server.app, base_url="http://localhost") as client:
        yield client
    server.stop()
    server.close()
    engine.close()


def stream(client, body):
    with client.stream("POST", "/completion", json=body | {"stream": True}) as response:
        return [json.loads(line[6:]) for line in response.iter_lines() if line]


def test_a_prompt_that_is_only_read_leaves_its_slot_free(client):
    for _ in range(len(client.get("/slots").json()) + 1):
        found = client.post("/completion", json=ASKED | {"n_predict": 0}).json()
        assert (found["content"], found["timings"]["predicted_n"]) == ("", 0)
        slots = client.get("/slots").json()
        assert not any(slot["is_processing"] for slot in slots)
        assert {slot["next_token"][0]["n_remain"] for slot in slots} == {-1}


def test_a_completion_and_its_stream_say_the_same(client):
    body = ASKED | NO_END | {"return_tokens": True, "n_probs": 3}
    whole = client.post("/completion", json=body).json()
    assert (whole["stop_type"], whole["truncated"]) == ("limit", False)
    assert len(whole["tokens"]) == whole["timings"]["predicted_n"] == 6
    assert whole["generation_settings"]["seed"] == 42
    assert whole["prompt"] == ASKED["prompt"]
    likely = whole["completion_probabilities"]
    assert [token["id"] for token in likely] == whole["tokens"]
    assert all(len(token["top_logprobs"]) == 3 for token in likely)
    events = stream(client, body)
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [i for event in events[:-1] for i in event["tokens"]] == whole["tokens"]


def test_probabilities_after_the_samplers_steps(client):
    body = ASKED | NO_END | {"temperature": 1, "n_probs": 40, "post_sampling_probs": True}
    for token in client.post("/completion", json=body).json()["completion_probabilities"]:
        top = {each["id"]: each["prob"] for each in token["top_probs"]}
        assert top[token["id"]] == pytest.approx(token["prob"])
        assert sum(top.values()) == pytest.approx(1)


def test_lists_of_prompts_and_fields(client):
    found = client.post("/completion", json=ASKED | {"prompt": ["the", [5, 6], [5, "hand"]]})
    assert [one["index"] for one in found.json()] == [0, 1, 2]
    fields = ["content", "generation_settings/n_predict"]
    one = client.post("/completion", json=ASKED | {"response_fields": fields}).json()
    assert set(one) == set(fields)


def test_no_tokens_are_asked_for(client):
    found = client.post("/completion", json=ASKED | {"n_predict": 0}).json()
    assert (found["content"], found["tokens_predicted"]) == ("", 0)


def test_completions_echo_with_logprobs(client):
    """What loglikelihoods of continuations are made of: no tokens, and the prompt's."""
    body = {"prompt": "the hand over", "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "the hand over"
    assert logprobs["token_logprobs"][0] is None
    assert all(p < 0 for p in logprobs["token_logprobs"][1:])
    events = client.post("/v1/completions", json=body | {"stream": True}).text.splitlines()
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"]


def test_samplers_and_other_names_of_fields(path):
    given = {
        "repetition_penalty": 1.5,
        "repeat_last_n": -1,
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.5,
        "top_n_sigma": 1.0,
        "dynatemp_range": 0.5,
        "mirostat": 2,
        "min_keep": 2,
        "top_k": -1,
        "ignore_eos": True,
        "logit_bias": [["the", -1], [5, False]],
    }
    task = READERS["chat"](reader(path), Body({"messages": MESSAGES} | given))
    s = task.sampling
    assert (s.repeat_penalty, s.repeat_last_n, s.dry_multiplier) == (1.5, -1, 0.8)
    assert (s.xtc_probability, s.top_n_sigma, s.mirostat_mode, s.top_k) == (0.5, 1.0, 2, 0)
    assert s.logit_bias[5] == -math.inf
    assert task.ignored == ()


@pytest.mark.parametrize("extra", [{"dry_multiplier": 1}, {"mirostat": 1}, {"xtc_probability": 1}])
def test_samplers_run(client, extra):
    assert client.post("/completion", json=ASKED | {"temperature": 1} | extra).status_code == 200


def test_a_last_message_of_the_assistant_is_continued(path):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    chat = {"messages": messages}
    assert READERS["template"](reader(path), Body(chat)).endswith("assistant\nWell")
    explicit = Body(chat | {"continue_final_message": True, "add_generation_prompt": False})
    assert READERS["template"](reader(path), explicit).endswith("assistant\nWell")
    told = READERS["template"](reader(path), Body(chat | {"continue_final_message": False}))
    assert told.endswith("<|im_start|>assistant\n")
    thought = [*MESSAGES, {"role": "assistant", "content": "", "reasoning_content": "Hm"}]
    assert READERS["template"](reader(path), Body({"messages": thought})).endswith("<think>Hm")


def test_thoughts_are_switched_off_and_bounded(path):
    off = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    assert READERS["template"](reader(path), Body(off)).endswith("</think>\n\n")
    task = READERS["chat"](reader(path), Body({"messages": MESSAGES, "thinking_budget": 5}))
    assert (task.requests[0].budget.n_tokens, task.requests[0].budget.is_open) == (5, False)
    usual = reader(path, enable_thinking=False)
    assert READERS["template"](usual, Body({"messages": MESSAGES})).endswith("</think>\n\n")


def test_tokens_and_templates(client):
    pieces = client.post("/tokenize", json={"content": "the hand", "with_pieces": True}).json()
    ids = [token["id"] for token in pieces["tokens"]]
    assert "".join(token["piece"] for token in pieces["tokens"]) == "the hand"
    text = client.post("/detokenize", json={"tokens": ids}).json()
    assert text == {"content": "the hand", "prompt": "the hand"}, "llama.cpp's name, and vLLM's"
    prompt = client.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
    assert prompt.startswith("<|im_start|>user\nthe hand")
    n = client.post("/chat/completions/input_tokens", json={"messages": MESSAGES}).json()
    ids = client.post("/tokenize", json={"content": prompt}).json()["tokens"]
    assert n["input_tokens"] == len(ids)


def test_a_slot_is_saved_restored_and_erased(client):
    asked = ASKED | NO_END | {"id_slot": 1}
    first = client.post("/completion", json=asked).json()
    saved = client.post("/slots/1?action=save", json={"filename": "one.bin"}).json()
    assert saved["n_saved"] == first["tokens_evaluated"] + 5
    restored = client.post("/slots/0?action=restore", json={"filename": "one.bin"}).json()
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    again = client.post("/completion", json=asked | {"id_slot": 0}).json()
    assert again["timings"]["cache_n"] == first["tokens_evaluated"] - 1
    assert again["content"] == first["content"]
    assert client.post("/slots/1?action=erase", json={}).json()["n_erased"] == saved["n_saved"]
    assert client.get("/slots").json()[1]["n_past"] == 0


@pytest.mark.parametrize(
    ("where", "body"),
    [
        ("/slots/7?action=save", {"filename": "x"}),
        ("/slots/" + "9" * 5000 + "?action=save", {"filename": "x"}),
        ("/slots/-1?action=erase", {}),
        ("/slots/0?action=save", {"filename": "\u00e9" * 150}),
        ("/slots/0?action=burn", {"filename": "x"}),
        ("/slots/0?action=save", {"filename": "../x"}),
        ("/slots/0?action=save", {"filename": ".x"}),
        ("/slots/0?action=save", {}),
        ("/slots/0?action=restore", {"filename": "none.bin"}),
        ("/completion", ASKED | {"id_slot": 9}),
        ("/completion", ASKED | {"prompt": {"prompt_string": "x", "multimodal_data": ["AA"]}}),
        ("/completion", ASKED | {"json_schema": 5}),
        ("/completion", ASKED | {"lora": [{"id": 0, "scale": 1}]}),
        ("/detokenize", {"tokens": ["x", None]}),
    ],
)
def test_what_is_wrong_is_refused(client, where, body):
    response = client.post(where, json=body)
    assert response.status_code == 400
    assert "message" in response.json()["error"]


@pytest.mark.parametrize("action", ["save", "restore"])
@pytest.mark.parametrize(
    "name",
    [
        "a/../../x",
        "a/b",
        "a/",
        "a\\..\\x",
        "/x",
        "..",
        ".",
        "",
        "x\n",
        "x\0",
        "a b",
        "x" * 201,
        "-x",
    ],
)
def test_a_slots_file_is_one_of_its_folder(client, name, action, tmp_path_factory):
    """Not the beginning of a name is looked at: all of it must be a file's without a folder."""
    base = tmp_path_factory.getbasetemp()
    before = sorted(base.rglob("*"))
    response = client.post(f"/slots/0?action={action}", json={"filename": name})
    assert response.status_code == 400
    assert "filename is no short name of a file" in response.json()["error"]["message"]
    assert sorted(base.rglob("*")) == before


def test_a_slots_file_may_have_a_name_of_200_bytes(client):
    name = "x" * 200
    saved = client.post("/slots/1?action=save", json={"filename": name})
    assert (saved.status_code, saved.json()["filename"]) == (200, name)


def test_what_this_model_cannot_do_is_501(client):
    for path, body in (
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/rerank", {"query": "x", "documents": ["a"]}),
    ):
        assert client.post(path, json=body).status_code == 501
    assert client.get("/lora-adapters").json() == []
    assert client.post("/lora-adapters", json=[{"id": 0, "scale": 1}]).status_code == 400


def test_properties_and_rows(client):
    found = client.get("/props").json()
    assert found["default_generation_settings"]["params"]["seed"] == 42
    assert (found["total_slots"], found["bos_token"] != "") == (2, True)
    (one,) = client.post("/embedding", json={"content": "the hand"}).json()
    assert len(one["embedding"]) == 1, "pooled"
    assert sum(x * x for x in one["embedding"][0]) == pytest.approx(1, abs=1e-5)


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(client):
    error = client.post("/completion", json=ASKED | {"prompt": [5] * 600}).json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, 512)
    for words in ("exceeds the available context size", "maximum context length is 512 tokens"):
        assert words in error["message"]


def test_an_answer_goes_on_where_the_context_is_full(client):
    body = {"prompt": [5] * 500, "n_predict": 40, "ignore_eos": True, "temperature": 0}
    found = client.post("/completion", json=body).json()
    assert (found["tokens_predicted"], found["truncated"]) == (12, True)
    found = client.post("/completion", json=body | {"context_shift": True, "n_keep": 4}).json()
    assert (found["tokens_predicted"], found["truncated"]) == (40, True)
