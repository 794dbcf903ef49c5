"""What people reported of other servers, asked here: each test names the report."""

import json

import pytest
from serving import reader

from tamis.bindings.serve.api.readers import READERS
from tamis.bindings.serve.body import Body

HELLO = {"messages": [{"role": "user", "content": "the hand"}]}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NO_END = {"ignore_eos": True, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"side": {"enum": ["left", "right"]}},
    "required": ["side"],
}
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["a"]}}}}


def events(client, path, body):
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    lines = [x[6:] for x in response.text.splitlines() if x.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_text_held_back_for_a_stop_string_comes_once(client):
    """ggml-org/llama.cpp#10914: a text that begins like a stop string was sent twice."""
    asked = {"prompt": "the hand over", "n_predict": 24} | NO_END
    whole = client.post("/completion", json=asked).json()["content"]
    for i in range(len(whole) - 2):
        stops = [whole[i : i + 3] + "\u2603", whole[i + 1] + "\u2603"]  # each begins, none comes
        found = events(client, "/completion", asked | {"stop": stops})
        assert "".join(event["content"] for event in found) == whole


def test_nothing_of_a_stop_text_over_several_tokens_is_streamed(client):
    """vllm-project/vllm#3574, SharpAI/SwiftLM#126: its first tokens were sent."""
    asked = {"prompt": "the hand over", "max_tokens": 24} | NO_END
    whole = client.post(TEXT, json=asked).json()["choices"][0]["text"]
    for i in range(1, len(whole) - 7, 3):
        stop = whole[i : i + 7]
        choices = [e["choices"][0] for e in events(client, TEXT, asked | {"stop": [stop]})]
        assert "".join(each["text"] for each in choices) == whole[: whole.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


def test_the_rendered_prompt_is_in_a_stream_too(client):
    """llama.cpp's server has `__verbose` in the last part of a stream."""
    asked = HELLO | {"max_tokens": 2, "verbose": True}
    *others, last = events(client, CHAT, asked)
    assert "the hand" in last["__verbose"]["prompt"]
    assert not any("__verbose" in event for event in others)


def test_a_schema_beside_json_object_holds(path):
    """ggml-org/llama.cpp#7149: json_schema was dropped where response_format was json_object."""
    wanted = reader(path)

    def form(**more):
        return vars(READERS["chat"](wanted, Body(HELLO | more)).sampling.grammar)

    any_object = {"type": "json_object"}
    schema = form(json_schema=SCHEMA)
    assert form(json_schema=SCHEMA, response_format=any_object) == schema
    own = any_object | {"schema": SCHEMA}
    assert form(json_schema={"type": "string"}, response_format=own) == form(response_format=own)
    text = form(grammar='root ::= "x"')
    assert form(grammar='root ::= "x"', response_format={"type": "text"}) == text
    assert form(grammar='root ::= "x"', response_format=any_object) == text


@pytest.mark.parametrize(
    ("route", "body"),
    [("/v1/embeddings", {"input": ""}), ("/embedding", {"content": ""}), (TEXT, {"prompt": ""})],
)
def test_an_empty_text_is_answered(client, route, body):
    """ggml-org/llama.cpp#5246, #5724: the server hung."""
    assert client.post(route, json=body | {"max_tokens": 2}).status_code == 200


def test_embeddings_of_tokens(client):
    """ggml-org/llama.cpp#7221: langchain sends lists of tokens, which ended the server."""
    ids = client.post("/tokenize", json={"content": "the hand"}).json()["tokens"]
    texts = client.post("/v1/embeddings", json={"input": ["the hand", "over"]}).json()["data"]
    for given, n in ((ids, 1), ([ids], 1), ([ids, ids], 2)):
        found = client.post("/v1/embeddings", json={"input": given}).json()["data"]
        assert [each["index"] for each in found] == list(range(n))
        for each in found:
            assert each["embedding"] == pytest.approx(texts[0]["embedding"], abs=1e-5)


def test_a_call_without_content_is_taken_back(client):
    """lmstudio-ai/lmstudio-bug-tracker#261: `"content": null` beside calls was refused."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for content in ({"content": None}, {}, {"content": ""}):
        said = {"role": "assistant", "tool_calls": [call]} | content
        answer = {"role": "tool", "tool_call_id": "c", "content": "42.69"}
        asked = {"messages": [*HELLO["messages"], said, answer], "max_tokens": 2}
        assert client.post(CHAT, json=asked).status_code == 200


def test_a_message_without_calls_has_no_list_of_them(client):
    """lmstudio-ai/lmstudio-bug-tracker#1318, sst/opencode#4255: an empty list in each reply."""
    tools = [{"type": "function", "function": LOOK}]
    for more in ({}, {"tools": tools, "tool_choice": "none"}):
        reply = client.post(CHAT, json=HELLO | more | {"max_tokens": 2}).json()
        assert "tool_calls" not in reply["choices"][0]["message"]
        for event in events(client, CHAT, HELLO | more | {"max_tokens": 2}):
            assert all("tool_calls" not in choice["delta"] for choice in event["choices"])


def test_responses_take_several_items(client):
    """lmstudio-ai/lmstudio-bug-tracker#1064: more than one was a 400."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "the"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "hand"}]},
        {"role": "user", "content": "over"},
    ]
    asked = {"input": items, "instructions": "", "store": False, "max_output_tokens": 2}
    assert client.post("/v1/responses", json=asked).json()["object"] == "response"


def test_tools_with_null_for_parameters(client):
    """lmstudio-ai/lmstudio-bug-tracker#1652: OpenAI's .NET client writes `"parameters": null`."""
    tool = {"type": "function", "name": "look", "parameters": None, "strict": False}
    asked = {"input": "the", "tools": [tool], "max_output_tokens": 2}
    assert client.post("/v1/responses", json=asked).status_code == 200


def test_logprobs_without_top_logprobs(client):
    """vllm-project/vllm#4795: it was an error; and each token has its bytes."""
    reply = client.post(CHAT, json=HELLO | NO_END | {"logprobs": True, "max_tokens": 3}).json()
    tokens = reply["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 3
    assert all(token["top_logprobs"] == [] and token["bytes"] for token in tokens)


def test_finish_reasons_of_a_stream_are_null_until_the_last(client):
    """ollama/ollama#4357: they were ""; BerriAI/litellm#10686: with logprobs there was none."""
    for more in ({}, {"logprobs": True}):
        found = events(client, CHAT, HELLO | NO_END | {"max_tokens": 4} | more)
        reasons = [choice["finish_reason"] for event in found for choice in event["choices"]]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]


def test_a_choice_may_name_a_tool(client):
    """antropia-studio/linguito#21, can1357/oh-my-pi#6925: an object was refused."""
    tools = [{"type": "function", "function": LOOK}]
    choice = {"type": "function", "function": {"name": "look"}}
    asked = HELLO | {"tools": tools, "tool_choice": choice, "max_tokens": 60, "temperature": 0}
    (call,) = client.post(CHAT, json=asked).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"


def test_responses_have_the_form_of_text_format(path):
    """ggml-org/llama.cpp#21922: `text.format` was not passed on."""
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    task = READERS["responses"](reader(path), Body({"input": "x", "text": {"format": form}}))
    assert task.sampling.grammar is not None
    assert task.ignored == ()


def test_what_cannot_be_enforced_is_no_success(client):
    """ggml-org/llama.cpp#24096, #24097: a format was accepted with 200 and not held to."""
    for form in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    ):
        for name in ("thinking", "reasoning_effort"):
            asked = HELLO | {"response_format": form, "max_tokens": 200}
            asked |= {"reasoning_effort": "low"} if name == "reasoning_effort" else {}
            choice = client.post(CHAT, json=asked).json()["choices"][0]
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["message"]["content"]), dict)
    wrong = HELLO | {"response_format": {"type": "xml"}}
    assert client.post(CHAT, json=wrong).status_code == 400


def test_a_bias_by_text_keys_in_a_llama(path):
    """abetlen/llama-cpp-python#827: `{"29991": -100}` as JSON has it."""
    from tamis import Llama

    with Llama(str(path), n_ctx=64, verbose=False) as llm:
        (token,) = llm.tokenize(b"x", add_bos=False)
        found = llm("the", max_tokens=1, temperature=0, logit_bias={str(token): 100.0})
    assert found["choices"][0]["text"] == "x"


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_usage_comes_with_every_part_if_it_is_asked_for(client, route):
    """vllm-project/vllm#5708, #7262: with every part if asked, otherwise at the end only."""
    asked = (HELLO if route == CHAT else {"prompt": "the hand"}) | NO_END | {"max_tokens": 4}
    plain = events(client, route, asked | {"stream_options": {"include_usage": True}})
    assert [event["usage"] for event in plain[:-1]] == [None] * (len(plain) - 1)
    every = {"include_usage": True, "continuous_usage_stats": True}
    found = [event["usage"] for event in events(client, route, asked | {"stream_options": every})]
    assert found[-1]["completion_tokens"] == plain[-1]["usage"]["completion_tokens"] == 4
    counts = [usage["completion_tokens"] for usage in found]
    assert counts == sorted(counts)
    assert counts[0] < 4 == counts[-1]
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in found)
    without = {"continuous_usage_stats": True}  # vLLM needs both
    assert not any("usage" in e for e in events(client, route, asked | {"stream_options": without}))


def test_options_of_a_stream_without_effect_are_named(client):
    """They were dropped in silence."""
    options = {"include_usage": True, "include_obfuscation": False, "usage_every": 3}
    asked = HELLO | {"max_tokens": 2, "stream": True, "stream_options": options}
    assert client.post(CHAT, json=asked).headers["x-tamis-ignored"] == "stream_options.usage_every"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {}},
        {
            "properties": {
                "a": {"anyOf": [{"type": "string", "maxLength": 524288}, {"type": "null"}]}
            }
        },
        {"properties": {"a": {"enum": [1, 2], "type": "number"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": ["string", "null"]}}},
        {"properties": {"a": {"items": {"type": "string"}, "maxItems": 0}}},
    ],
)
def test_tools_with_unusual_schemas_can_be_called(client, schema):
    """ggml-org/llama.cpp#25923, #25746, ollama/ollama#10164, lmstudio-bug-tracker#909.

    No properties, a maxLength of half a million, numbers in an enum, a list of types, an empty
    list: one of them made every call fail.
    """
    tools = [{"type": "function", "function": {"name": "a", "parameters": schema}}]
    asked = HELLO | {"tools": tools, "max_tokens": 3, "temperature": 0}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "a"}}):
        response = client.post(CHAT, json=asked | {"tool_choice": choice})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, None])
def test_responses_take_tools_without_parameters(client, parameters):
    """lmstudio-ai/lmstudio-bug-tracker#2254: `"parameters": {}`, which VS Code sends, was a 400."""
    tool = {"type": "function", "name": "look", "parameters": parameters}
    asked = {"input": "the", "tools": [tool], "max_output_tokens": 2}
    assert client.post("/v1/responses", json=asked).status_code == 200


def test_each_call_of_a_stream_has_an_index_and_an_id(client):
    """ollama/ollama#15457, openai/codex#7517, can1357/oh-my-pi#2016: an index and id of each.

    ggml-org/llama.cpp#28478: log-probabilities beside tools in a stream were a 400.
    """
    tools = [{"type": "function", "function": {"name": "a", "parameters": {}}}]
    grammar = r'root ::= "<tool_call>" a a' "\n" r'a ::= "{\"name\":\"a\"}"'
    asked = {"tools": tools, "grammar": grammar, "temperature": 0}
    found = events(client, CHAT, HELLO | asked | {"logprobs": True, "top_logprobs": 2})
    choices = [choice for event in found for choice in event["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    named = [(c["index"], c["function"]["name"]) for c in calls if "id" in c]
    assert named == [(0, "a"), (1, "a")]
    assert len({call["id"] for call in calls if "id" in call}) == 2
    assert any(choice.get("logprobs") for choice in choices)
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_choices_of_one_request_differ_and_repeat_with_a_seed(client):
    """lightseekorg/tokenspeed#1613, InternLM/lmdeploy#4419: n choices were the same."""

    def texts(**more):
        asked = {"prompt": "the hand", "max_tokens": 12, "temperature": 1.2, "n": 4} | more
        return [choice["text"] for choice in client.post(TEXT, json=asked).json()["choices"]]

    assert len(set(texts())) > 1
    seeded = texts(seed=5)
    assert len(set(seeded)) > 1
    assert texts(seed=5) == seeded


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repeat_penalty"])
def test_penalties_change_a_text_that_repeats_itself(client, field):
    """ikawrakow/ik_llama.cpp#2398, raullenchai/Rapid-MLX#470: they were read and not applied."""
    asked = {"prompt": "the hand " * 12, "n_predict": 16} | NO_END
    plain = client.post("/completion", json=asked).json()
    changed = client.post("/completion", json=asked | {field: 2.0}).json()
    assert changed["content"] != plain["content"]
    assert changed["generation_settings"][field] == 2.0


def test_a_pattern_that_is_wrong_is_an_error_and_others_hold(client):
    """ggml-org/llama.cpp#19051: an escape of "!" was logged and the answer left free."""

    def ask(pattern):
        schema = {"type": "string", "pattern": pattern}
        asked = HELLO | {"json_schema": schema, "max_tokens": 60, "temperature": 0}
        return client.post(CHAT, json=asked)

    found = ask(r"^hello there indeed\!$").json()["choices"][0]["message"]["content"]
    assert json.loads(found) == "hello there indeed!"
    wrong = ask("^(a$")
    assert wrong.status_code == 400
    assert "without its end" in wrong.json()["error"]["message"]


def test_a_format_is_held_to_wherever_responses_have_it(client):
    """lmstudio-ai/lmstudio-bug-tracker#2403: /v1/responses dropped `response_format`."""
    kept = {"type": "json_schema", "json_schema": {"name": "side", "schema": SCHEMA}}
    asked = {"input": "the hand", "response_format": kept, "max_output_tokens": 60}
    (item,) = client.post("/v1/responses", json=asked | {"temperature": 0}).json()["output"]
    assert json.loads(item["content"][0]["text"])["side"] in ("left", "right")
