"""OpenAI's responses: items, Codex's kinds of tools, the order of events; a tiny model answers."""

import json

import openai
import pytest
from serving import reader, said

from tamis.bindings.serve.api import responses
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.requests import MAX_MESSAGES

TOOLS = [
    {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "apply_patch", "description": "patches"},
    {"type": "local_shell"},
    {"type": "web_search"},
]


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "+x"},
        {"type": "local_shell_call", "call_id": "3", "action": {"command": ["ls"]}},
        {"type": "function_call_output", "call_id": "1", "output": "12"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
    ]
    fields, kinds = responses.as_chat(Body({"input": items, "tools": TOOLS}))
    messages = fields["messages"]
    assert [m["role"] for m in messages] == ["developer", "user", "assistant", "tool", "tool"]
    assert (messages[2]["reasoning_content"], messages[2]["content"]) == ("Hm.", "a")
    calls = [call["function"] for call in messages[2]["tool_calls"]]
    assert [json.loads(c["arguments"]) for c in calls] == [{}, {"input": "+x"}, {"command": ["ls"]}]
    assert kinds == {"look": "function", "apply_patch": "custom", "local_shell": "local_shell"}
    assert "tools.web_search" in fields, "what is left out is named in a header"


def test_a_choice_among_some_of_the_tools(path):
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "look"}]}
    task = responses.read(
        reader(path), Body({"input": "Hi", "tools": TOOLS, "tool_choice": choice})
    )
    assert [tool["function"]["name"] for tool in task.wanted.tools] == ["look"]
    assert task.wanted.required


@pytest.mark.parametrize("n", [1, 7, 500])
def test_events_come_in_the_order_of_the_items(path, n):
    text = "<think>\nHm.\n</think>\n\nWell.\n" + call("look", {}) + "\n"
    text += call("apply_patch", {"input": "+x"}) + "\n" + call("local_shell", {"command": ["ls"]})
    body = {"input": "Hi", "tools": TOOLS}
    events, whole = said(reader(path), "responses", responses.Responses, body, text, n=n)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    added = [e["item"]["type"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
        "local_shell_call",
    ]
    openai.types.responses.Response.model_validate(whole)
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for item in [*done, *whole["output"]]:
        item.pop("call_id", None)  # another each time
    assert done == whole["output"]
    assert done[0]["content"][0]["text"] == "Hm."
    assert done[1]["content"][0]["text"] == "Well."
    assert (done[2]["arguments"], done[3]["input"]) == ("{}", "+x")
    assert done[4]["action"]["command"] == ["ls"]
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "Well."


def test_an_answer_that_is_cut_off_is_incomplete(path):
    how = reader(path), "responses", responses.Responses, {"input": "Hi"}, "We", "length"
    events, whole = said(*how)
    assert events[-1]["type"] == "response.incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "verse"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "function_call"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"reasoning": {"effort": "some"}}, None),
    ],
)
def test_what_is_wrong_is_named(client, change, param):
    response = client.post("/v1/responses", json={"input": "the"} | change)
    assert response.status_code == 400
    assert param is None or response.json()["error"]["param"] == param


def test_a_model_answers_and_counts(client):
    body = {"input": "the hand", "max_output_tokens": 5, "instructions": "Be brief."}
    found = client.post("/v1/responses", json=body).json()
    assert found["output"][0]["type"] == "message"
    assert found["instructions"] == "Be brief."
    n = client.post("/v1/responses/input_tokens", json=body).json()["input_tokens"]
    assert n == found["usage"]["input_tokens"]
    with client.stream("POST", "/v1/responses", json=body | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("event: ")]
    assert lines[0] == "event: response.created"
    assert lines[-1] in ("event: response.incomplete", "event: response.completed")


def test_a_request_has_so_many_items_and_no_more():
    item = {"role": "user", "content": "the"}
    found, _ = responses.as_chat(Body({"input": [item] * MAX_MESSAGES}))
    assert len(found["messages"]) == MAX_MESSAGES
    with pytest.raises(ApiError, match=f"no list of 1 to {MAX_MESSAGES} items"):
        responses.as_chat(Body({"input": [item] * (MAX_MESSAGES + 1)}))
