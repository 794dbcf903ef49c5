"""Requests of coding agents as packaged, recorded and replayed: each turn reads what is new.

`tests/data/agents` has ten turns of Claude Code and of Codex, without their texts: `$text` stands
for one of the same size, `$answer` for what the server has said. `tools/record_requests.py` made
them, and makes the bodies of the replay.
"""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from serve_process import ServeProcess
from serving import THINKING
from tiny_models import TinySpec, write_tiny_model

from tamis.tools.record_requests import Recorder, bodies, texts_of, written

RECORDS = sorted((Path(__file__).parents[2] / "data" / "agents").glob("*.json"))
N_CTX, SCALE, N_ANSWER, MORE = 32768, 8, 16, 100
PROSE = "Read the file notes/secret.py before you change it. " * 4


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of a tiny model with a template that knows tools."""
    folder = tmp_path_factory.mktemp("recorded")
    model = write_tiny_model(folder / "qwen.gguf", TinySpec(n_ctx=N_CTX))
    (folder / "template").write_text(THINKING)
    flags = "--chat-template-file", str(folder / "template"), "--alias", "qwen", "-t", "1"
    with ServeProcess(model, folder, "-c", str(N_CTX), *flags) as server:
        yield server


def events(server, path, body):
    """The events of a stream."""
    with server.open(path, body, timeout=300) as reply:
        lines = [line[6:] for line in reply if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line.strip() != b"[DONE]"]


def of_messages(found):
    """The text of a streamed message, and its tokens: all, and from the cache."""
    deltas = [e["delta"] for e in found if e["type"] == "content_block_delta"]
    usage = next(e["usage"] for e in found if e["type"] == "message_delta")
    cached = usage["cache_read_input_tokens"]
    return "".join(d.get("text", "") for d in deltas), usage["input_tokens"] + cached, cached


def of_responses(found):
    """The same of a streamed response."""
    deltas = [e["delta"] for e in found if e["type"] == "response.output_text.delta"]
    ends = ("response.completed", "response.incomplete")
    (usage,) = [e["response"]["usage"] for e in found if e["type"] in ends]
    return "".join(deltas), usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_turn_reads_what_is_new_and_at_most_a_hundred_tokens_more(served, path):
    record = json.loads(path.read_text())
    anthropic = record["path"].startswith("/v1/messages")
    limit = {"max_tokens" if anthropic else "max_output_tokens": N_ANSWER, "temperature": 0}
    said, read, before = [], [], 0
    for body in bodies(record, said, SCALE):
        found = events(served, record["path"], body | limit)
        text, n_prompt, n_cached = (of_messages if anthropic else of_responses)(found)
        said.append(text)
        read.append((n_prompt - n_cached, n_prompt - before))
        before = n_prompt
    assert len(read) >= 10
    assert before > 3000
    assert all(n_read <= new + MORE for n_read, new in read), read
    assert max(n_read for n_read, _ in read[1:]) < 500, "of a later turn, and nothing of its head"


def test_there_are_records_of_both_clients_and_no_prose_is_in_them():
    clients = set()
    for path in RECORDS:
        record = json.loads(path.read_text())
        clients.add(record["client"].partition("/")[0])
        spaced = [text for text in strings(record["requests"]) if " " in text]
        assert all(text.startswith("x-anthropic-billing-header: ") for text in spaced), spaced
        assert not any("/home" in text or "/tmp" in text for text in strings(record))
    assert clients == {"claude-cli", "codex_exec"}


def strings(value):
    """All texts of a JSON value, keys among them."""
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in strings(item))]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def requests():
    """Two requests, of which the second has the answer, a call and its result."""
    call, session = "toolu_0123456789abcdef01234567", "01a21ead-af92-7b70-b38c-9d285f4411b0"
    head = {"system": [{"type": "text", "text": PROSE, "cache_control": {"type": "ephemeral"}}]}
    asked = {"role": "user", "content": "Mend the sum of ann@example.org."}
    answer = [
        {"type": "text", "text": "I read it."},
        {"type": "tool_use", "id": call, "name": "Read", "input": {"file_path": "notes/ann/a.py"}},
    ]
    result = {"type": "tool_result", "tool_use_id": call, "content": "x = 1\ny = 2\n"}
    first = {"model": "m", "stream": True, "metadata": {"user_id": session}, "messages": [asked]}
    more = [asked, {"role": "assistant", "content": answer}, {"role": "user", "content": [result]}]
    other = [{**head["system"][0], "text": PROSE + "Today is Friday."}]
    return [first | head, first | {"system": other, "messages": more}]


def recorded():
    recorder = Recorder()
    headers = {
        "User-Agent": "agent/1.2 (ann's box)",
        "Authorization": "Bearer x",
        "x-beta": "a-20250219,b",
        "x-session": "01a21ead-af92-7b70-b38c-9d285f4411b0",
    }
    for body in requests():
        recorder.add("/v1/messages", headers, body)
    return json.loads(written(recorder.record()))


def test_a_record_keeps_structure_and_sizes_and_nothing_of_texts_addresses_and_keys():
    record = recorded()
    text = json.dumps(record)
    for secret in ("ann", "Bearer", "Mend", "01a21ead", "secret", "toolu_", "Friday", "x = 1"):
        assert secret not in text
    assert record["headers"] == {"User-Agent": "agent/1.2", "x-beta": "a-20250219,b"}
    first, second = bodies(record, ["So it is."])
    given, after = requests()
    assert len(first["system"][0]["text"]) == len(PROSE)
    assert first["system"][0]["cache_control"] == given["system"][0]["cache_control"]
    assert len(first["messages"][0]["content"]) == len(given["messages"][0]["content"])
    assert second["messages"][0] == first["messages"][0]
    said, call = second["messages"][1]["content"]
    (result,) = second["messages"][2]["content"]
    assert said == {"type": "text", "text": "So it is."}
    assert call["id"] == result["tool_use_id"] == "id_1"
    assert (call["name"], list(call["input"])) == ("Read", ["p0"])
    assert len(result["content"]) == len(after["messages"][2]["content"][0]["content"])
    items = {"input": [{"type": "message", "role": "user", "content": "So?"}]}
    recorder = Recorder()  # the items of a response are no arguments of a call
    recorder.add("/v1/responses", {}, items)
    assert recorder.record()["requests"][0]["input"][0] == items["input"][0] | {
        "content": {"$text": 0}
    }
    assert (second["metadata"], second["stream"]) == (first["metadata"], True)


def test_a_text_that_begins_as_an_earlier_one_does_so_in_the_replay():
    record = recorded()
    for scale in (1, 3):
        first, second = bodies(record, [], scale)
        a, b = first["system"][0]["text"], second["system"][0]["text"]
        n = len(PROSE) // scale
        assert (len(a), len(b)) == (n, (len(PROSE) + len("Today is Friday.")) // scale)
        assert a[:n] == b[:n]
    assert len(set(texts_of(record))) == len(record["texts"])


def test_what_passes_through_the_proxy_is_answered_and_recorded(served, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out, url = tmp_path / "record.json", f"http://127.0.0.1:{served.port}"
    command = [sys.executable, "-P", "-m", "tamis.tools.record_requests", str(out), "--to", url]
    with subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE) as proxy:
        assert b"recording at" in proxy.stderr.readline()
        body = {"max_tokens": 4, "messages": [{"role": "user", "content": "Is it so?"}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/messages",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.loads(reply.read())["type"] == "message"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as reply:
            assert reply.status == 200
        proxy.send_signal(signal.SIGINT)
        assert proxy.wait(30) == 0
    record = json.loads(out.read_text())
    assert (record["path"], record["texts"]) == ("/v1/messages", [len("Is it so?")])
    assert record["requests"][0]["messages"] == [{"role": "user", "content": {"$text": 0}}]
