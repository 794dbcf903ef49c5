"""Batches: each request is answered once, however often and wherever a run is cut off."""

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from serving import local_server
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.serve import offline
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.direct import ask
from tamis.bindings.serve.offline import Answers, BatchError, Lost, items
from tamis.cli import main
from tamis.engine.engine import Engine

CHAT, TEXT, EMBED = offline.URLS
GOOD = 200, b'{"id": "cmpl-1", "text": "yes"}'


def line(custom_id, url=TEXT, method="POST", **body):
    record = {"custom_id": custom_id, "method": method, "url": url, "body": body}
    return json.dumps(record).encode() + b"\n"


def asked(data, into, answer=GOOD, n_at_once=2, **how):
    """What is asked for, in order, by a run over these requests; and the rows of all answers."""
    found, file = [], io.BytesIO(data)

    async def one(url, body):
        found.append((url, json.loads(body)))
        return answer(len(found)) if callable(answer) else answer

    with closing(Answers(into, **how)) as answers:
        todo = [item for item in items(file) if item.key not in answers.finished]
        asyncio.run(offline.run(file, todo, answers, one, n_at_once))
    return found, [json.loads(row) for row in into.read_text().splitlines()]


def test_an_answer_has_the_form_of_openais(tmp_path):
    found, (row,) = asked(line("a", prompt="x", n=2), tmp_path / "out")
    assert found == [(TEXT, {"prompt": "x", "n": 2})]
    response = {"status_code": 200, "request_id": "cmpl-1", "body": json.loads(GOOD[1])}
    assert row == {"id": "batch_req_1", "custom_id": "a", "response": response, "error": None}


def test_a_line_that_is_wrong_is_answered_with_why_and_stops_nothing(tmp_path):
    wrong = {
        b"{\n": "invalid_json",
        b"7\n": "invalid_json",
        line(7): "invalid_custom_id",
        line("good", prompt="again"): "duplicate_custom_id",
        line("m", method="GET"): "invalid_method",
        line("u", url="/v1/files"): "invalid_url",
        line("s", stream=True): "invalid_body",
        b'{"custom_id": "b", "url": "/v1/completions", "body": []}\n': "invalid_body",
    }
    data = line("good", prompt="x") + b"\n" + b"".join(wrong)
    found, rows = asked(data, tmp_path / "out")
    assert len(found) == 1
    codes = {row["id"]: row["error"]["code"] for row in rows if row["error"]}
    assert list(codes.values()) == list(wrong.values())
    assert {row["custom_id"] for row in rows} == {"good", "m", "u", "s", "b", None}
    assert asked(data, tmp_path / "out") == ([], rows)  # of them, too, none is there twice


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_cut_line_is_mended_and_what_it_answered_asked_again(cut, tmp_path):
    into, data = tmp_path / "out", line("a", prompt="x") + line("b", prompt="y")
    asked(data, into, n_at_once=1)
    os.truncate(into, into.stat().st_size - cut)
    found, rows = asked(data, into)
    # A cut of one takes away the line's end only: the answer is whole.
    assert len(found) == (cut > 1)
    assert sorted(row["custom_id"] for row in rows) == ["a", "b"]


def test_what_failed_is_asked_again_where_that_is_asked_for(tmp_path):
    into, data = tmp_path / "out", line("a", prompt="x") + line("b", prompt="y")
    refused = 400, b'{"error": {"message": "no"}}'
    _, rows = asked(data, into, lambda n: refused if n == 1 else GOOD, n_at_once=1)
    assert [row["response"]["status_code"] for row in rows] == [400, 200]
    assert asked(data, into)[0] == []
    found, rows = asked(data, into, retry_failed=True)
    assert len(found) == 1
    assert [row["response"]["status_code"] for row in rows] == [200, 200]


def test_what_failed_for_no_reason_of_its_own_is_tried_again(tmp_path, monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(offline, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))

    def lost(n):
        if n == 1:
            raise Lost("its node")
        return (503, b"no JSON") if n == 2 else GOOD

    found, (row,) = asked(line("a", prompt="x"), tmp_path / "out", lost)
    assert (len(found), row["response"]["status_code"]) == (3, 200)
    assert pauses == [offline.PAUSE] * 2
    assert offline.PAUSE >= 0.5  # seconds in which a node comes back

    def always(n):
        raise Lost("its node")

    found, (row,) = asked(line("a", prompt="x"), tmp_path / "other", always)
    assert (len(found), row["response"]["status_code"]) == (offline.TRIES, 503)
    assert len(pauses) == 2 + offline.TRIES - 1  # none after the last time


def test_prompts_that_begin_equally_follow_each_other(tmp_path):
    heads = ["a" * 300, "b" * 300, "a" * 299 + "c"]
    data = b"".join(line(str(i), prompt=heads[i % 3] + str(i)) for i in range(9))
    data += line("e", EMBED, input=heads[0])
    found, _ = asked(data, tmp_path / "out", n_at_once=1)
    first = [body["prompt"][:300] for url, body in found if url == TEXT]
    changes = [one for one, before in zip(first, [None, *first], strict=False) if one != before]
    assert sorted(changes) == sorted(heads)


def test_two_runs_do_not_write_one_file(tmp_path):
    with closing(Answers(tmp_path / "out")), pytest.raises(BatchError, match="another process"):
        Answers(tmp_path / "out")


OWN = b'{"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200}, "error": null}\n'
TEXT_FILE = b"chapter one\nthe end, without a line break"


@pytest.mark.parametrize("retry_failed", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b'{"mine": 1}\n',
        b'{"mine": 1}',
        b"{",
        b"a text without a line break",
        TEXT_FILE,
        bytes(range(256)),
        OWN + TEXT_FILE,
        OWN + b'{"mine": 1',
        OWN + b"\0\0",
        b'{"id": "batch_req_1"}\n',
        b'{"id": ["batch_req_1"], "custom_id": null, "response": null, "error": {}}\n',
        b'{"id": "batch_req_1", "custom_id": ["a"], "response": null, "error": {}}\n',
        b'{"id": "batch_req_1", "custom_id": "a", "response": [1], "error": null}\n',
        b'{"id": {}, "custom_id": null, "response": null, "error": {}}',
        b"[" * 99_999 + b"\n",
    ],
)
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, data, retry_failed):
    into = tmp_path / "out"
    into.write_bytes(data)
    with pytest.raises(BatchError, match=r"line [12] of .* is no answer"):
        Answers(into, retry_failed=retry_failed)
    assert into.read_bytes() == data


def test_a_prefix_is_read_once(tmp_path):
    """The server's own reading of requests, and its sessions: no second implementation."""
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec(n_ctx=512))
    engine = Engine.load(path, n_threads=1)
    server = local_server(engine, [engine.session(n_ctx=512) for _ in range(2)], Settings())
    head = "once upon a time " * 12
    data = b"".join(line(str(i), prompt=f"{head}{i}", max_tokens=2) for i in range(6))
    data += line("wrong", prompt=head, max_tokens="two")
    file = io.BytesIO(data)
    with closing(Answers(tmp_path / "out")) as answers:
        asking = offline.run(file, [*items(file)], answers, lambda *x: ask(server.app, *x), 4)
        asyncio.run(asking)
    rows = [json.loads(row) for row in (tmp_path / "out").read_text().splitlines()]
    status = {row["custom_id"]: row["response"]["status_code"] for row in rows}
    assert status == {**{str(i): 200 for i in range(6)}, "wrong": 400}
    usage = [r["response"]["body"]["usage"] for r in rows if r["custom_id"] != "wrong"]
    n_read = [u["prompt_tokens"] - u["prompt_tokens_details"]["cached_tokens"] for u in usage]
    assert sum(n > usage[0]["prompt_tokens"] // 2 for n in n_read) == 1
    server.stop()
    server.close()
    engine.close()


def test_no_line_whatever_it_has_ends_the_run_or_is_asked_twice(tmp_path):
    odd = [line("\ud800", prompt="\ud800"), line("x" * 99_999), line("\r\n\0\u2028", prompt=[])]
    for n in range(940, 1000):
        nested = b'"body": {"prompt": ' + b"[" * n + b"]" * n + b"}"
        odd.append(line(f"deep{n}").replace(b'"body": {}', nested))
    data, into = b"".join(odd) + line("last", prompt="x"), tmp_path / "out"
    _, rows = asked(data, into)
    assert len(rows) == len(odd) + 1
    found, rows = asked(data, into)
    assert found == []


def test_the_command_answers_a_file(tmp_path):
    given, into, model = tmp_path / "in", tmp_path / "out", tmp_path / "m.gguf"
    write_tiny_model(model, TinySpec("llama"))
    given.write_bytes(line("a", prompt="the hand", max_tokens=2))
    assert main(["batch", str(given), str(into), "-m", str(model), "--ctx", "64"]) == 0
    assert json.loads(into.read_text())["response"]["status_code"] == 200


def test_the_command_says_what_cannot_be(tmp_path, capsys):
    given = tmp_path / "in.jsonl"
    given.write_bytes(line("a", prompt="x"))
    assert main(["batch", str(given), str(given)]) == 2
    assert main(["batch", str(tmp_path / "none"), str(tmp_path / "out")]) == 1
    into = tmp_path / "out.jsonl"
    asked(line("a", prompt="x"), into)
    assert main(["batch", str(given), str(into), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["answered"], result["failed"]) == (1, 0, 0)


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_loses_and_doubles_nothing(tmp_path):
    """Two nodes of a cluster on this machine; one is killed in the middle."""
    pytest.importorskip("ray")
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec(n_ctx=512))
    given, into = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = [
        line(str(i), prompt=f"once {i}", max_tokens=200, ignore_eos=True) for i in range(80)
    ]
    given.write_bytes(b"".join(requests))
    port, log = 6399, open(tmp_path / "ray.log", "wb")  # noqa: SIM115
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    start += ["--object-store-memory=100000000"]
    where = {"stdout": log, "stderr": log, "start_new_session": True}
    head = [
        f"--head --port={port} --include-dashboard=false".split(),
        [f"--address=127.0.0.1:{port}"],
    ]
    nodes = []
    try:
        for more in head:
            nodes.append(subprocess.Popen([*start, *more], **where))
            time.sleep(12)
        batch = [sys.executable, "-m", "tamis", "batch", str(given), str(into), "-m", str(path)]
        batch += ["--ray", f"127.0.0.1:{port}", "--parallel", "2"]
        running = subprocess.Popen(batch, **where)
        while running.poll() is None and (not into.exists() or into.read_bytes().count(b"\n") < 20):
            time.sleep(0.05)
        os.killpg(nodes[1].pid, 9)
        assert running.wait(300) == 0
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, 9)
            node.wait()
        log.close()
    rows = [json.loads(row) for row in into.read_text().splitlines()]
    assert sorted(int(row["custom_id"]) for row in rows) == list(range(80))
    assert all(row["response"]["status_code"] == 200 for row in rows)
