"""What strangers send costs their own request only: crashes, time, memory, long texts."""

import asyncio
import json
import os
import random
import signal
import string
import threading
import time
from pathlib import Path

import pytest
from serving import local_server
from starlette.testclient import TestClient
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.fair_semaphore import FairSemaphore
from tamis.bindings.serve.helpers import Helpers
from tamis.bindings.serve.http.app import SMALL
from tamis.bindings.serve.text import BoundedTokenizer, TooManyTokens
from tamis.bindings.serve.wire import GRAMMAR_SECONDS, Config, identity
from tamis.sampling.grammar import Grammar, gbnf_grammar
from tamis.sampling.vocabulary import GrammarTokenizer

N_CTX, GIB = 512, 1 << 30
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {"messages": [{"role": "user", "content": "the hand"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def client(engine):
    server = local_server(engine, [engine.session(n_ctx=N_CTX)])
    with TestClient(server.app, base_url="http://localhost") as client:
        client.tamis = server
        yield client
    server.stop()
    server.close()


def with_schema(schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return ASKED | {"response_format": form}


def chained_refs(n):
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{n}": {"type": "string"}}}


def overlapping_patterns(n):
    """A schema whose product of automata takes minutes to compile."""
    return {"oneOf": [{"type": "string", "pattern": f"^{'.' * i}x.*$"} for i in range(n)]}


def chained_rules(n):
    rules = "".join(f'a{i} ::= a{i + 1} | "(" root ")"\n' for i in range(n))
    return f'root ::= a0\n{rules}a{n} ::= "x"\n'


def words(n):
    draw = random.Random(5)
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=9)) for _ in range(n))


def children(pid):
    """Processes whose parent is pid."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


# --- crashes --------------------------------------------------------------------------------------


def test_a_long_chain_of_references_is_followed(client):
    pytest.importorskip("llguidance")
    found = client.post(CHAT, json=with_schema(chained_refs(6000)) | {"max_tokens": 4})
    assert found.status_code == 200


def test_a_grammar_that_overflows_the_native_stack_is_one_clients_error(client):
    pytest.importorskip("llguidance")
    found = client.post(CHAT, json=ASKED | {"grammar": chained_rules(1450)})
    assert found.status_code == 400
    assert "signal" in found.json()["error"]["message"]
    assert client.post(CHAT, json=ASKED).status_code == 200


def test_the_server_itself_hands_no_grammar_to_native_code(client, monkeypatch):
    pytest.importorskip("llguidance")

    def used(*_given):
        raise AssertionError("in the serving process")

    monkeypatch.setattr("tamis.sampling.grammar.llguidance", used)
    found = client.post(CHAT, json=with_schema({"const": "hand"}) | {"max_tokens": 40})
    assert found.json()["choices"][0]["message"]["content"].strip() == '"hand"'


def test_nested_bodies_and_schemas_are_refused(client):
    deep: dict = {}
    for _ in range(600):
        deep = {"type": "array", "items": deep}
    for body in (json.dumps(with_schema(deep)), '{"messages": ' + "[" * 60_000):
        found = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert found.status_code == 400


def test_a_helper_that_is_killed_is_started_again(client):
    assert client.post(CHAT, json=with_schema({"const": "hand"})).status_code == 200
    helper = client.tamis._helpers._process.pid
    os.kill(helper, signal.SIGKILL)
    found = [client.post(CHAT, json=with_schema({"const": "hand"})).status_code for _ in range(2)]
    assert found[1] == 200
    assert found[0] in (200, 503)  # the one that the helper was killed under
    assert client.tamis._helpers._process.pid != helper


def test_a_process_that_ends_within_an_answer_ends_that_answer_only(client):
    body = ASKED | {"grammar": "root ::= [a-z ]*", "max_tokens": 400, "stream": True}
    with client.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        for pid in children(client.tamis._helpers._process.pid):
            os.kill(pid, signal.SIGSEGV)
        rest = [line for line in lines if line]
    assert "error" in rest[-1] or rest[-1] == "data: [DONE]"  # it may have ended before
    assert client.post(CHAT, json=ASKED).status_code == 200


# --- answers are those of the grammar in this process ---------------------------------------------


def test_large_requests_get_the_answers_of_small_ones(client):
    small = ASKED | {"logprobs": True, "top_logprobs": 2, "stop": ["zzz"], "n": 2, "seed": 3}
    large = small | {"user": "x" * SMALL}
    found = [client.post(CHAT, json=body).json() for body in (small, large)]
    assert found[0]["choices"] == found[1]["choices"]
    small = {"prompt": ["the hand", "over there"], "max_tokens": 5, "temperature": 0, "echo": True}
    small |= {"logit_bias": {"7": 5, "9": -100.5}}
    found = [client.post(TEXT, json=b).json() for b in (small, small | {"user": "x" * SMALL})]
    assert found[0]["choices"] == found[1]["choices"]
    small = {"input": ["the hand", "over"], "encoding_format": "base64"}
    found = [
        client.post("/v1/embeddings", json=b).json() for b in (small, small | {"user": "x" * SMALL})
    ]
    assert found[0] == found[1]
    small = {"content": "the hand", "add_special": True}
    found = [client.post("/tokenize", json=b).json() for b in (small, small | {"u": "x" * SMALL})]
    assert found[0] == found[1]


def test_choices_of_one_grammar_each_have_their_own_place_in_it(client, engine):
    pytest.importorskip("llguidance")
    grammar = 'root ::= ("a" | "b" | "c" | "the" | "hand"){6} "."'
    body = {"prompt": "the", "max_tokens": 60, "n": 3, "grammar": grammar, "temperature": 1.5}
    choices = client.post(TEXT, json=body | {"seed": 11}).json()["choices"]
    tokenizer = GrammarTokenizer(engine.tokenizer, engine.hp.n_vocab)
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        step = Grammar(gbnf_grammar(grammar), tokenizer)
        step.accept_all(engine.tokenizer.encode(choice["text"], add_special=False))
    again = client.post(TEXT, json=body | {"seed": 11}).json()["choices"]
    assert [choice["text"] for choice in choices] == [choice["text"] for choice in again]


# --- time -----------------------------------------------------------------------------------------


def test_a_request_that_takes_long_holds_up_no_other(client):
    done = []

    def slow():
        found = client.post("/tokenize", json={"content": "".join(words(150_000).split())})
        done.append(found.status_code)

    client.post(CHAT, json=ASKED | {"user": "x" * SMALL})  # the helper runs
    thread = threading.Thread(target=slow)
    thread.start()
    time.sleep(0.3)
    assert client.post(CHAT, json=ASKED).status_code == 200
    assert not done, "the slow one was not slow"
    thread.join()
    assert done == [200]


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized(engine):
    class Unused:
        composes = False

        bos, add_bos = engine.tokenizer.bos, engine.tokenizer.add_bos

        def encode(self, *_given, **_options):
            raise AssertionError("it was tokenized")

        encode_parts = has_special = encode

    longest = max(map(len, engine.vocab.tokens.raws()))
    bounded = BoundedTokenizer(Unused(), engine.vocab, 100)
    with pytest.raises(TooManyTokens) as found:
        bounded.encode("é" * (100 * longest))
    assert found.value.n == 200
    with pytest.raises(TooManyTokens):
        bounded.encode_parts([("x" * 50 * longest, True), ("y" * 51 * longest, False)])
    exact = BoundedTokenizer(engine.tokenizer, engine.vocab, 10**9)
    for text in ("the hand over there", words(300), "éß" * 40, ""):
        assert exact.encode(text) == engine.tokenizer.encode(text)
        n = len(text.encode())
        assert -(-n // longest) <= len(engine.tokenizer.encode(text, add_special=False))


def test_a_text_too_long_for_the_context_says_so_with_both_numbers(client):
    found = client.post(TEXT, json={"prompt": "x " * 1_000_000})
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "at least" in error["message"]
    assert str(N_CTX) in error["message"]


def helpers(path, **change):
    given = {"seconds": 20, "n_byte": GIB} | change
    config = Config(str(path), identity(path), "tiny", N_CTX, 8, **given)
    return Helpers(config, change.get("wall", 60), 64)


def asked(path, body, name="tokenize", **limits):
    """What the helper makes of a body, or the error."""

    async def run():
        helper = helpers(path, **limits)
        try:
            prepared = await helper.prepare(name, body, "")
            prepared.masks.close()
            return prepared.result
        except ApiError as error:
            return error
        finally:
            helper.close()

    return asyncio.run(run())


def test_processor_time_and_memory_of_a_request_are_limited(path):
    slow = json.dumps({"content": "".join(words(400_000).split())}).encode()
    error = asked(path, slow, seconds=1)
    assert (error.status, error.code) == (400, "too_costly")
    assert "1 s" in error.message
    error = asked(path, b'{"content": "' + b"x " * 3_000_000 + b'"}', n_byte=8 << 20)
    assert error.status in (400, 503)
    assert json.loads(asked(path, b'{"content": "the hand"}'))


def test_a_grammar_that_takes_long_to_compile_is_refused_by_a_limit_of_its_own(path):
    pytest.importorskip("llguidance")
    body = json.dumps(with_schema(overlapping_patterns(150))).encode()
    error = asked(path, body, "chat", seconds=60)
    assert (error.status, error.code) == (400, "too_costly")
    assert f"more than {GRAMMAR_SECONDS} s" in error.message
    assert "schema" in error.message
    error = asked(path, body, "chat", seconds=1)  # the request's own limit comes first
    assert (error.status, error.code) == (400, "too_costly")
    assert "more than 1 s" in error.message


def test_grammars_that_take_long_hold_up_nobody_without_one(client):
    pytest.importorskip("llguidance")
    client.post(CHAT, json=with_schema({"const": "hand"}))  # the helper is there
    body, done = with_schema(overlapping_patterns(150)), []
    slow = [
        threading.Thread(target=lambda: done.append(client.post(CHAT, json=body).status_code))
        for _ in range(2)
    ]
    for each in slow:
        each.start()
    try:
        until(lambda: client.tamis._helpers._slots._free == 0)
        answers = [client.post(CHAT, json=ASKED).status_code for _ in range(3)]
        assert (answers, done) == ([200] * 3, [])
    finally:
        for each in slow:
            each.join()
    assert done == [400, 400]


def test_a_request_whose_client_goes_leaves_no_process(path):
    async def run():
        helper = helpers(path)
        slow = json.dumps({"content": "".join(words(400_000).split())}).encode()
        await helper.prepare("tokenize", b'{"content": "x"}', "")
        waiting = asyncio.create_task(helper.prepare("tokenize", slow, ""))
        while not children(helper._process.pid):
            await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.sleep(0)
        until(lambda: not children(helper._process.pid))
        again = await helper.prepare("tokenize", b'{"content": "x"}', "")  # its turn is free
        pid = helper._process.pid
        helper.close()
        until(lambda: not children(pid))
        return again.result

    assert json.loads(asyncio.run(run()))


def test_a_model_file_that_was_replaced_is_not_read_for_requests(path, tmp_path, capfd):
    other = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())

    async def run():
        helper = helpers(other)
        os.utime(other, ns=(1, 1))
        try:
            await helper.prepare("tokenize", b'{"content": "x"}', "")
        except ApiError as error:
            return error
        finally:
            helper.close()

    assert asyncio.run(run()).status == 503
    assert "has changed" in capfd.readouterr().err


def test_scheduling_is_fair_and_a_cancelled_client_is_skipped(path):
    async def run():
        semaphore, order = FairSemaphore(1), []

        async def work(owner):
            await semaphore.acquire(owner)
            order.append(owner)
            await asyncio.sleep(0)
            semaphore.release(owner)

        await semaphore.acquire("first")
        tasks = [asyncio.create_task(work(owner)) for owner in "aaaabc"]
        await asyncio.sleep(0)
        assert semaphore.n_waiting == 6
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert semaphore.n_waiting == 5
        semaphore.release("first")
        await asyncio.gather(*tasks, return_exceptions=True)
        return order, semaphore.n_waiting

    order, n = asyncio.run(run())
    assert order.index("b") < 3
    assert order.index("c") < 4
    assert sorted(order) == ["a", "a", "a", "b", "c"]
    assert n == 0


def test_a_request_that_waits_too_long_is_answered_busy(path):
    async def run():
        helper = helpers(path, seconds=20)
        helper._seconds = 0.2
        for _ in range(2):
            await helper._slots.acquire("others")
        try:
            await helper.prepare("tokenize", b'{"content": "x"}', "")
        except ApiError as error:
            return error.status, helper._slots.n_waiting
        finally:
            helper.close()

    assert asyncio.run(run()) == (429, 0)
