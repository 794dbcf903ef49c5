"""Anthropic's messages: conversions, the order of events, errors; a tiny model answers."""

import re
from datetime import datetime

import pytest
from serving import reader, said

from tamis.bindings.serve.api import anthropic
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError

ASKED = {"messages": [{"role": "user", "content": "the hand"}], "max_tokens": 8}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"enum": ["a"]}}}}
CALL = '{"name": "look", "arguments": {"at": "a"}}'
ANSWER = f"<think>\nHm.\n</think>\n\nWell.\n<tool_call>\n{CALL}\n</tool_call>"


def test_blocks_become_messages_and_results_of_tools_come_first():
    content = [
        {"type": "text", "text": "So?"},
        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "12"}]},
        {"type": "tool_result", "tool_use_id": "y", "is_error": True, "content": "none"},
    ]
    said_before = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "tool_use", "id": "x", "name": "look", "input": {"at": "a"}},
    ]
    body = {
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "assistant", "content": said_before},
            {"role": "user", "content": content},
        ],
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "any"},
        "stop_sequences": ["END"],
        "thinking": {"type": "enabled", "budget_tokens": 100},
    }
    found = anthropic.as_chat(Body(body)).fields
    assert [m["role"] for m in found["messages"]] == [
        "system",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert found["messages"][0]["content"] == "Be brief."
    assert found["messages"][1]["reasoning_content"] == "Hm."
    assert found["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"at": "a"}'
    assert [m["content"] for m in found["messages"][2:]] == ["12", "Error: none", "So?"]
    assert found["tools"][0]["function"]["parameters"] == TOOL["input_schema"]
    assert (found["tool_choice"], found["stop"]) == ("required", ["END"])
    assert (found["enable_thinking"], found["thinking_budget"]) == (True, 100)
    assert "tools.web_search" in found, "what is left out is named in a header"


@pytest.mark.parametrize("n", [1, 5, 500])
def test_thoughts_text_and_calls_are_blocks_of_their_own(path, n):
    events, whole = said(
        reader(path), "messages", anthropic.Messages, ASKED | {"tools": [TOOL]}, ANSWER, n=n
    )
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    at = [e["index"] for e in events if "index" in e]
    assert at == sorted(at)
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "Hm."
    assert "".join(d.get("text", "") for d in deltas) == "Well."
    assert "".join(d.get("partial_json", "") for d in deltas) == '{"at": "a"}'
    assert deltas[[d["type"] for d in deltas].index("text_delta") - 1]["type"] == "signature_delta"
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == starts
    assert whole["content"][2]["input"] == {"at": "a"}
    n_prompt = whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 4
    chat = anthropic.as_chat(Body(ASKED | {"tools": [TOOL]}))
    assert n_prompt == len(reader(path).chat_prompt(chat)[1].ids)


def test_why_an_answer_ends(path):
    for finish, reason in (("length", "max_tokens"), ("stop", "end_turn")):
        events, whole = said(reader(path), "messages", anthropic.Messages, ASKED, "Hi", finish)
        assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == reason


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "verse"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        {"system": 5},
        {"tools": [{}]},
        {"tools": [TOOL], "tool_choice": {"type": "some"}},
        {"thinking": {"type": "deep"}},
        {"thinking": {"type": "enabled", "budget_tokens": "many"}},
    ],
)
def test_what_is_wrong_is_an_error_in_anthropics_form(client, change):
    response = client.post("/v1/messages", json=ASKED | change)
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


def test_a_model_answers_and_counts(client):
    whole = client.post("/v1/messages", json=ASKED | {"frobnicate": 1})
    assert whole.headers["x-tamis-ignored"] == "frobnicate"
    n = client.post("/v1/messages/count_tokens", json=ASKED).json()
    usage = whole.json()["usage"]
    assert n == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    with client.stream("POST", "/v1/messages", json=ASKED | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("event: ")]
    assert lines[0] == "event: message_start"
    assert lines[-1] == "event: message_stop"


HEAD = "x-anthropic-billing-header: cc_version=2.1.7.e5; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("end", ["", "\n", " "])
def test_prompts_of_claude_code_begin_alike(end):
    def system(stamp, *more):
        first = {"type": "text", "text": HEAD.format(stamp) + end}
        blocks = [first, *({"type": "text", "text": text} for text in more)]
        messages = anthropic.as_chat(Body(ASKED | {"system": blocks})).fields["messages"]
        return [m["content"] for m in messages if m["role"] == "system"]

    assert system("a5145", "Be brief.") == system("00fe1", "Be brief.") == ["Be brief."]
    assert system("a5145") == []
    quoted = "What is " + HEAD.format("a5145")
    kept = anthropic.as_chat(Body(ASKED | {"system": quoted})).fields["messages"]
    assert kept[0]["content"] == quoted


def test_documents_of_text_are_text_and_blocks_are_lines_of_their_own():
    source = {"type": "text", "media_type": "text/plain", "data": "One."}
    inner = {"type": "content", "content": [{"type": "text", "text": "Two."}]}
    content = [
        {"type": "document", "title": "A", "source": source},
        {"type": "document", "source": inner},
        {"type": "text", "text": "So?"},
    ]
    body = ASKED | {"messages": [{"role": "user", "content": content}]}
    (message,) = anthropic.as_chat(Body(body)).fields["messages"]
    assert message["content"] == "A\n\nOne.\n\nTwo.\n\nSo?"


@pytest.mark.parametrize("kind", ["base64", "url", "file", None])
def test_documents_that_are_no_text_are_refused_in_clear_words(kind):
    block = {"type": "document", "source": {"type": kind, "data": "JVBERg==", "url": "x"}}
    body = ASKED | {"messages": [{"role": "user", "content": [block]}]}
    with pytest.raises(ApiError, match="document input is not supported"):
        anthropic.as_chat(Body(body))


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_look_for(client):
    body = ASKED | {"messages": [{"role": "user", "content": "the hand " * 600}]}
    found = client.post("/v1/messages", json=body)
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error"
    n, most = re.match(
        r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"]
    ).groups()
    assert int(n) > int(most) == 512


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "invalid_request_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_are_of_anthropics_kinds(status, kind):
    found = ApiError(status, "why").body_for("/v1/messages/count_tokens")
    assert found == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_models_are_listed_for_anthropics_clients_too(client):
    found = client.get("/v1/models", params={"limit": 1000}).json()
    (model,) = found["data"]
    assert (model["type"], model["display_name"], model["id"]) == ("model", "tiny", "tiny")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "tiny", "tiny")


def test_a_tool_that_is_asked_for_is_called(client):
    pytest.importorskip("llguidance")
    body = ASKED | {"max_tokens": 64, "tools": [TOOL], "tool_choice": {"type": "any"}}
    found = client.post("/v1/messages", json=body).json()
    assert [block["type"] for block in found["content"]] == ["tool_use"]
    assert found["content"][0]["name"] == "look"
