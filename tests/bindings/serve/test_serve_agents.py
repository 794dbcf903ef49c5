"""Requests as coding agents send them, replayed: each turn reads what is new, and little more.

The requests are written after those of Claude Code (messages) and Codex (responses): heads that
change with every request, tools, calls and their results.
"""

import http.client
import json

import pytest
from serve_process import ServeProcess
from serving import THINKING, reader
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.drop_in.markers import steady, without_total_tokens
from tamis.bindings.serve.api import anthropic
from tamis.bindings.serve.body import Body

MESSAGES, RESPONSES, COMPLETION = "/v1/messages", "/v1/responses", "/completion"
N_CTX, N_TURN, N_ANSWER, MORE = 16384, 10, 24, 100
BILLING = "x-anthropic-billing-header: cc_version=2.1.7.{:02x}; cc_entrypoint=cli; cch={:05x};"
LEFT = "<total_tokens>{} tokens left</total_tokens>"
RULES = "You are a coding agent. Read a file before you change it. Keep answers short. "
TOOLS = {
    "Read": {"file_path": "string", "limit": "integer"},
    "Edit": {"file_path": "string", "old_string": "string", "new_string": "string"},
    "Bash": {"command": "string", "timeout": "integer"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A tiny model, whose words are short: a turn has some hundreds of tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("agents") / "m.gguf", TinySpec(n_ctx=N_CTX))


@pytest.fixture(scope="module")
def served(path, tmp_path_factory):
    """A server of it with a template that knows tools."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "template").write_text(THINKING)
    flags = "--chat-template-file", str(folder / "template"), "--cache-ram", "64MiB", "-t", "1"
    with ServeProcess(path, folder, "-c", str(N_CTX), *flags) as server:
        yield server


def schema_of(fields):
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in fields.items()},
        "required": list(fields)[:1],
    }


def file_of(turn):
    """What a tool gives back."""
    return "\n".join(f"{i}: the value of {turn} is {i * turn}" for i in range(1, 9))


class ClaudeCode:
    """Messages; the head has a stamp of the request at its start, and a count at its end."""

    path = MESSAGES

    def __init__(self):
        self.messages = [{"role": "user", "content": [{"type": "text", "text": "Mend the sum."}]}]

    def body(self, turn):
        stamp = BILLING.format(turn * 37 % 256, turn * 7919 % (1 << 20))
        texts = stamp, RULES * 4, "Today is Friday.", LEFT.format(199_000 - 1234 * turn)
        return {
            "model": "tiny", "max_tokens": N_ANSWER, "temperature": 0,
            "system": [{"type": "text", "text": text} for text in texts],
            "tools": [
                {"name": name, "description": f"{name} it", "input_schema": schema_of(fields)}
                for name, fields in TOOLS.items()
            ],
            "messages": self.messages,
        }  # fmt: skip

    def takes(self, reply, turn):
        said = "".join(b.get("text", "") for b in reply["content"] if b["type"] == "text")
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Read"}
        call["input"] = {"file_path": f"/src/{turn}.py"}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": file_of(turn)}
        self.messages = [
            *self.messages,
            {"role": "assistant", "content": [{"type": "text", "text": said or "So."}, call]},
            {"role": "user", "content": [result]},
        ]

    def counts(self, usage):
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached


class Codex:
    """Responses; instructions stay, and the items of all turns are sent again."""

    path = RESPONSES

    def __init__(self):
        self.items = [self.said("user", "input_text", "Mend the sum.")]

    def said(self, role, kind, text):
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    def body(self, turn):
        return {
            "model": "tiny", "max_output_tokens": N_ANSWER, "temperature": 0, "store": False,
            "instructions": RULES * 4, "input": self.items, "prompt_cache_key": "a-b-c",
            "tools": [
                {"type": "function", "name": name, "strict": False, "parameters": schema_of(fields)}
                for name, fields in TOOLS.items()
            ],
        }  # fmt: skip

    def takes(self, reply, turn):
        parts = [part for item in reply["output"] for part in item.get("content") or []]
        said = "".join(part.get("text", "") for part in parts)
        name = f"call_{turn}"
        call = {"type": "function_call", "call_id": name, "name": "Bash"}
        call["arguments"] = json.dumps({"command": f"cat {turn}.py"})
        self.items = [
            *self.items,
            self.said("assistant", "output_text", said or "So."),
            call,
            {"type": "function_call_output", "call_id": name, "output": file_of(turn)},
        ]

    def counts(self, usage):
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("agent", [ClaudeCode, Codex])
def test_a_turn_reads_what_is_new_and_at_most_a_hundred_tokens_more(served, agent):
    """With a sub-agent and a request for a title between the turns, which take slots."""
    conversation, before, read = agent(), 0, []
    for turn in range(1, N_TURN + 1):
        status, reply = served.post(conversation.body(turn), agent.path, timeout=120)
        assert status == 200, reply
        n_prompt, n_cached = conversation.counts(reply["usage"])
        new = n_prompt - before
        read.append((n_prompt - n_cached, new))
        before = n_prompt
        for other in range(5):  # more than there are slots
            words = {"prompt": f"{turn} {other} a title for what is asked", "n_predict": 4}
            assert served.post(words, COMPLETION, timeout=120)[0] == 200
        conversation.takes(reply, turn)
    assert before > 3000
    assert all(n_read <= new + MORE for n_read, new in read), read


def test_claude_codes_count_of_tokens_is_left_out_at_the_end_of_the_system_prompt_only():
    text = "Be brief.\n\n" + LEFT
    for number in ("1", "198543", "198,543", "1_000"):
        assert without_total_tokens(text.format(number)) == "Be brief."
        assert without_total_tokens(text.format(number) + "\n") == "Be brief."
        head = text.format(number)  # a block before others: a line of its own
        assert without_total_tokens(head + "\nToday is Friday.") == "Be brief.\n\nToday is Friday."
    for other in (
        "Be brief.", LEFT.format("many"), LEFT.format(""), LEFT.format("9" * 21),
        LEFT.format(7) + " So?", "tokens left</total_tokens>", LEFT.format("\u0663"),
    ):  # fmt: skip
        assert without_total_tokens(other) == other


def test_messages_of_others_and_later_ones_keep_their_words():
    mark, asked = LEFT.format(7), {"role": "user", "content": LEFT.format(7)}
    later = {"role": "system", "content": "Now. " + mark}
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two. " + mark}]
    given = [{"role": "system", "content": "Be brief. " + mark}, asked, later]
    assert steady(given) == [{"role": "system", "content": "Be brief."}, asked, later]
    for order in (parts, parts[::-1]):
        (found,) = steady([{"role": "system", "content": order}])
        assert {part["text"] for part in found["content"]} == {"One.", "Two."}
    # A message that was a mark and nothing else is gone; an empty one was there before.
    assert steady([{"role": "system", "content": mark}, asked]) == [asked]
    empty = [{"role": "system", "content": ""}, asked]
    assert steady(empty) == empty


def test_a_request_or_a_flag_keeps_marks(path):
    def count(read, **fields):
        body = {"messages": [{"role": "user", "content": "So?"}], "max_tokens": 4}
        body |= {"system": "Be brief. " + LEFT.format(199_000)} | fields
        return anthropic.count(read, Body(body))

    plain, kept = reader(path), reader(path, keep_markers=True)
    n = count(plain)
    assert count(plain, keep_markers=True) == count(kept) > n
    assert count(kept, keep_markers=False) == n


def test_a_part_of_the_head_that_is_gone_costs_nothing_where_reuse_is_asked_for(served):
    head, gone, tail = (list(range(n, n + 60)) for n in (5, 70, 140))

    def cached(ids, **fields):
        body = {"prompt": ids, "n_predict": 1, "cache_salt": "moved", **fields}
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        connection.request(
            "POST", COMPLETION, json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        found = json.loads(reply.read())
        connection.close()
        assert reply.status == 200, found
        assert "x-tamis-ignored" not in reply.headers
        return found["timings"]["cache_n"]

    other = tail[::-1]
    cached([*head, *gone, *other])
    assert cached([*head, *other, 9], n_cache_reuse=100) == 60  # too short a chunk
    cached([*head, *gone, *tail])
    assert cached([*head, *tail, 9], n_cache_reuse=32) == 120
    # Who does not ask for it gets what was read at its own place.
    assert cached([*head, *tail, 9, 10]) <= 60
