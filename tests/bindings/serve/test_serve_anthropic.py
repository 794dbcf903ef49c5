"""Anthropic's messages: conversions, the order of events, errors; a tiny model answers."""

import pytest
from serving import reader, said

from tamis.bindings.serve.api import anthropic
from tamis.bindings.serve.body import Body

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


def test_a_tool_that_is_asked_for_is_called(client):
    pytest.importorskip("llguidance")
    body = ASKED | {"max_tokens": 64, "tools": [TOOL], "tool_choice": {"type": "any"}}
    found = client.post("/v1/messages", json=body).json()
    assert [block["type"] for block in found["content"]] == ["tool_use"]
    assert found["content"][0]["name"] == "look"
