"""Rules of the server one by one: limits of fields, defaults of records, errors, masks, replies."""

import asyncio
import json
import socket
import threading
import time
from contextlib import nullcontext
from dataclasses import MISSING, fields, is_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from request_bodies import BODIES
from serving import reader

from tamis.bindings.drop_in.completion import Counts, Piece
from tamis.bindings.serve import (
    errors,
    jobs,
    masks,
    models,
    offline,
    process,
    replies,
    room,
    supervisor,
    tasks,
    wire,
    worker,
)
from tamis.bindings.serve.api import ollama
from tamis.bindings.serve.api.readers import READERS
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.fair_semaphore import FairSemaphore
from tamis.bindings.serve.http import app, front, guard, listen, router
from tamis.bindings.serve.jobs import Again, Progress, PromptTokens, Started
from tamis.bindings.serve.masks import Masks, MaskStep
from tamis.bindings.serve.wire import CHOICE, Kind, frame
from tamis.sampling.base import Candidates, SamplerError

# --- limits of fields -----------------------------------------------------------------------------

MOST = (1 << 63) - 1
THINKING = dict.fromkeys(
    ("thinking_budget", "thinking_budget_tokens", "reasoning_budget"), (-1, MOST)
)
CONVERSATION = THINKING | {"messages": 4096, "tools": 128, "functions": 128}
TASK = {
    "n": (1, 8), "n_cmpl": (1, 8), "best_of": (1, 1024), "speculative.n_max": (0, 64),
    "n_keep": (-1, 1 << 30), "seed": (-(1 << 63), MOST), "top_k": (-1, 1 << 30),
    "repeat_last_n": (-1, 1 << 20), "mirostat": (0, 1 << 30), "dry_allowed_length": (1, 1 << 30),
    "dry_penalty_last_n": (-1, 1 << 30), "min_keep": (0, 1 << 30), "id_slot": (-1, 1 << 16),
    "n_cache_reuse": (0, MOST),
}  # fmt: skip
CHAT = CONVERSATION | TASK | {
    "max_completion_tokens": (-1, MOST), "max_tokens": (-1, MOST), "top_logprobs": (0, 20)
}  # fmt: skip
VECTORS = {"embd_normalize": (-1, 1024), "dimensions": (1, 1 << 20)}
LIMITS = {
    "chat": CHAT | {"lora": 64},
    "messages": CHAT, "responses": CHAT, "ollama chat": CHAT,
    "count chat": CONVERSATION, "count messages": CONVERSATION, "count responses": CONVERSATION,
    "template": CONVERSATION,
    "completion": TASK | {"lora": 64, "max_tokens": (-1, MOST), "logprobs": (0, 20)},
    "ollama generate": TASK | {"max_tokens": (-1, MOST), "logprobs": (0, 20)},
    "llama completion": TASK | {"lora": 64, "n_predict": (-1, MOST), "n_probs": (0, 100)},
    "embeddings": VECTORS, "ollama embed": VECTORS, "infill": {"input_extra": 256},
    "document": {}, "rerank": {}, "tokenize": {}, "detokenize": {},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BODIES))
def test_each_reader_asks_for_fields_within_these_limits(path, name, monkeypatch):
    asked = {}
    integer, records = Body.integer, Body.records

    def of_integers(self, field, low, high):
        asked.setdefault(field, (low, high))
        return integer(self, field, low, high)

    def of_records(self, field, most):
        asked.setdefault(field, most)
        return records(self, field, most)

    monkeypatch.setattr(Body, "integer", of_integers)
    monkeypatch.setattr(Body, "records", of_records)
    refused = pytest.raises(ApiError, match="infill is not") if name == "infill" else nullcontext()
    with refused:
        READERS[name](reader(path), Body(BODIES[name]))
    assert {field: asked[field] for field in LIMITS[name]} == LIMITS[name]


@pytest.mark.parametrize("name", ["n_predict", "max_tokens"])
def test_minus_one_token_is_as_many_as_fit(path, name):
    texts, found = reader(path), []
    for n in (-1, 5):
        task = READERS["llama completion"](texts, Body({"prompt": "the", name: n}))
        found.append(task.requests[0].max_tokens)
    whole = READERS["llama completion"](texts, Body({"prompt": "the"})).requests[0].max_tokens
    assert found == [whole, 5]
    with pytest.raises(ApiError, match=f"{name} is -2, expected -1 to"):
        READERS["llama completion"](texts, Body({"prompt": "the", name: -2}))


def test_a_suffix_goes_with_one_prompt_and_is_not_echoed(path):
    texts = reader(path)
    asked = {"prompt": "the", "suffix": "end", "max_tokens": 2}
    for more in ({"prompt": ["the", "a"]}, {"echo": True}):
        with pytest.raises(ApiError, match="suffix goes with one prompt, and without echo"):
            READERS["completion"](texts, Body(asked | more))
    with pytest.raises(ApiError, match="infill is not supported"):
        READERS["completion"](texts, Body(asked))


def test_ollamas_likely_tokens_are_those_that_were_asked_for(path):
    texts, found = reader(path), []
    raw = {"prompt": "the", "raw": True}
    for more in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3},
                 {"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 3}):  # fmt: skip
        task = READERS["ollama generate"](texts, Body(raw | more))
        found.append(task.requests[0].logprobs)
    assert found[1:3] == [0, 3]
    assert found[0] == found[3] == found[4]
    assert found[0] not in (0, 3)
    options = {"options": {"num_predict": -2, "num_ctx": 1 << 20, "temperature": 0.5}}
    fields_of = ollama._options(Body({"shift": True, "truncate": True} | options), texts)
    assert fields_of == {
        "stream": True, "context_shift": True, "max_tokens": -1, "options.num_ctx": 1 << 20,
        "temperature": 0.5,
    }  # fmt: skip
    assert ollama._options(Body({"stream": False, "options": {"num_ctx": 1}}), texts) == {
        "stream": False
    }


# --- defaults of records --------------------------------------------------------------------------


def defaults(kind):
    if is_dataclass(kind):
        own = kind.__annotations__
        return {
            f.name: f.default for f in fields(kind) if f.name in own and f.default is not MISSING
        }
    return dict(kind._field_defaults)


HOSTS = ("localhost", "127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (app.Settings, {
            "n_queue": 64, "n_choices": 8, "max_body": 4 << 20, "metrics": False,
            "isolate": False, "timeout_request": 60, "timeout_prepare": 20,
            "helper_bytes": 1 << 30, "page": True, "slots": True, "slot_folder": None,
            "pooling": None, "loras": (), "aliases": (), "tags": (), "prefix": "",
        }),
        (front.Config, {"prefix": ""}),
        (guard.Access, {"hosts": HOSTS, "key": "", "origins": ()}),
        (listen.Connections, {
            "total": 512, "per_address": 256, "header_seconds": 10, "stall_seconds": 60,
        }),
        (listen.Address, {"names": HOSTS, "tls": None, "prefix": ""}),
        (jobs.Started, {"slot": -1}),
        (jobs.SlotState, {"busy": False, "n_past": 0, "n_answer": 0, "n_prompt": 0, "n_left": -1}),
        (jobs.Job, {
            "cancelled": False, "n_cached": 0, "n_answer": 0, "scope": "", "owner": "",
            "slot": None, "pooling": None, "lora": None,
        }),
        (jobs.Choice, {"number": 0, "masks": None, "cached": True, "reuse": 0}),
        (models.Running, {"served": None, "n_byte": 0, "users": 0, "used": 0.0, "leaving": False}),
        (offline.Item, {"at": 0, "prefix": b"", "wrong": None}),
        (room.Slots, {"loaded": True}),
        (room.Room, {"disk": None}),
        (supervisor.CacheSizes, {"ram": None, "folder": None, "disk": None, "memory": None}),
        (supervisor.Start, {
            "adapters": ((), (), None), "draft": None, "ngrams": None, "cache": None,
        }),
        (supervisor.Loaded, {"predicts": True, "pooling": "mean", "ranks": False}),
        (supervisor._Entry, {"started": False, "runs": 0}),
        (tasks.Task, {
            "salt": "", "masked": False, "timings": False, "slot": None, "cached": True,
            "reuse": 0, "lora": None, "ignored": (), "about": {},
        }),
        (tasks.Inputs, {"packed": False, "dimensions": None, "norm": None, "ignored": ()}),
        (wire.Config, {"usual": {}, "template": None}),
        (worker.Completion, {
            "mask": None, "cached": True, "reuse": 0, "begun": 0.0, "read": 0.0, "n_drafted": 0,
            "n_accepted": 0,
        }),
    ],
)  # fmt: skip
def test_what_a_record_has_where_nothing_is_said(kind, expected):
    found = defaults(kind)
    plain = {
        name: dict(value) if hasattr(value, "keys") else value for name, value in found.items()
    }
    assert {name: plain[name] for name in expected} == expected
    assert all(isinstance(plain[name], type(value)) for name, value in expected.items())


def test_counters_begin_at_nothing():
    assert set(defaults(jobs.Counts).values()) == {0}
    wanted = defaults(jobs.Wanted)
    kept = ("request", "seed", "number", "cached", "reuse", "keeping")
    assert [wanted[name] for name in kept] == [None, 0, 0, True, 0, ()]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.invalid("x", "p"), 400, "invalid_request_error", "invalid_value"),
        (errors.too_long(9, 5), 400, "exceed_context_size_error", "context_length_exceeded"),
        (errors.busy(3), 429, "rate_limit_error", "queue_full"),
        (errors.gone(), 499, "invalid_request_error", None),
        (errors.unread(3), 408, "invalid_request_error", "timeout"),
        (errors.slow_client(3), 408, "invalid_request_error", "timeout"),
        (errors.costly(3), 400, "invalid_request_error", "too_costly"),
        (errors.costly_grammar(3), 400, "invalid_request_error", "too_costly"),
        (errors.crashed(11), 400, "invalid_request_error", "too_costly"),
        (errors.no_helper("x"), 503, "unavailable_error", "unavailable"),
        (errors.stopping(), 503, "unavailable_error", "stopping"),
        (errors.ended("x"), 503, "unavailable_error", "process_ended"),
        (errors.not_loaded("x"), 503, "unavailable_error", "not_loaded"),
        (errors.loading(), 503, "unavailable_error", "loading"),
        (ApiError(401, "x"), 401, "authentication_error", None),
        (ApiError(403, "x"), 403, "permission_error", None),
        (ApiError(404, "x"), 404, "not_found_error", None),
        (ApiError(501, "x"), 501, "not_supported_error", None),
        (ApiError(499, "x"), 499, "invalid_request_error", None),
        (ApiError(500, "x"), 500, "server_error", None),
        (ApiError(502, "x"), 502, "server_error", None),
    ],
)
def test_an_error_has_the_status_and_the_kind_that_clients_look_for(error, status, kind, code):
    assert (error.status, error.kind, error.code) == (status, kind, code)
    assert ("Retry-After" in error.headers) is (code in ("queue_full", "process_ended"))
    again = ApiError.unpacked(error.packed())
    assert (again.status, again.message, again.kind, again.code, again.param, again.more) == (
        status, error.message, kind, code, error.param, error.more
    )  # fmt: skip
    inner = error.body["error"]
    assert {k: inner[k] for k in ("message", "type", "param", "code")} == {
        "message": error.message, "type": kind, "param": error.param, "code": code,
    }  # fmt: skip
    assert error.body_for("/api/chat") == {"error": error.message}
    assert error.body_for("/v1/chat/completions") == error.body
    theirs = error.body_for("/v1/messages")
    assert theirs["type"] == "error"
    named = {"server_error": "api_error", "unavailable_error": "overloaded_error",
             "not_supported_error": "invalid_request_error",
             "exceed_context_size_error": "invalid_request_error"}  # fmt: skip
    assert theirs["error"]["type"] == named.get(kind, kind)


def test_a_prompt_that_is_too_long_says_by_how_much():
    error = errors.too_long(9, 5)
    assert error.body["error"]["n_prompt_tokens"] == 9
    assert error.body["error"]["n_ctx"] == 5
    told = error.body_for("/v1/messages")["error"]["message"]
    assert told.startswith("prompt is too long: 9 tokens > 5 maximum")
    assert "at least 9 tokens" in errors.too_long(9, 5, at_least=True).message
    large = ApiError(413, "x").body_for("/v1/messages")
    assert large["error"] == {"type": "request_too_large", "message": "x"}


# --- masks ----------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    with ours, theirs:
        yield Masks(ours), theirs


def mask(choice, bits):
    return frame(Kind.MASK, CHOICE.pack(choice) + bits)


def test_masks_are_each_choices_own_in_the_order_they_come(pair):
    found, theirs = pair
    assert found.take(0, 0) is None
    theirs.sendall(mask(1, b"\x01") + mask(0, b"\x02") + mask(1, b"\x03"))
    assert found.take(1, 5) == b"\x01"
    assert found.take(0, 0) == b"\x02"
    assert found.take(1, 0) == b"\x03"
    assert found.take(1, 0) is None
    theirs.sendall(frame(Kind.REFUSED, CHOICE.pack(0) + b"too deep \xff"))
    with pytest.raises(SamplerError, match="too deep"):
        found.take(0, 5)
    theirs.sendall(mask(0, b"\x07"))
    theirs.close()
    assert found.take(0, 5) == b"\x07", "what has come before the end is given"
    for _ in range(2):
        with pytest.raises(SamplerError, match="has ended"):
            found.take(0, 5)


def test_a_mask_is_waited_for_and_no_longer_than_said(pair):
    found, theirs = pair
    begun = time.monotonic()
    assert found.take(0, 0.1) is None
    assert 0.1 <= time.monotonic() - begun < 5
    later = threading.Timer(0.1, theirs.sendall, [mask(0, b"\x05")])
    later.start()
    assert found.take(0, 30) == b"\x05"
    assert time.monotonic() - begun < 20
    later.join()


@pytest.mark.parametrize("data", [b"\0\0\0\0\0", b"\x63\0\0\0\0", b"\x04\xff\xff\xff\xff"])
def test_bytes_that_are_no_masks_end_it(pair, data):
    found, theirs = pair
    theirs.sendall(data)
    with pytest.raises(SamplerError, match="has ended"):
        found.take(0, 5)


def test_a_token_is_sent_and_a_process_that_is_gone_is_noticed(pair):
    found, theirs = pair
    found.send(3, 70_000)
    assert theirs.recv(99) == frame(Kind.TOKENS, wire.TOKEN.pack(3, 70_000))
    theirs.close()
    for _ in range(2):
        found.send(3, 1)
    with pytest.raises(SamplerError, match="has ended"):
        found.take(3, 5)
    found.close()
    assert found._channel.fileno() == -1


def test_a_step_keeps_what_its_mask_allows(pair, monkeypatch):
    found, theirs = pair
    step = found.step(1, 9)
    assert isinstance(step, MaskStep)
    assert not step.ready()
    theirs.sendall(mask(1, b"\x05\x01"))
    given = Candidates(np.arange(9), np.arange(9, dtype=np.float32))
    kept = step.apply(given)
    assert kept.ids[np.isfinite(kept.logits)].tolist() == [0, 2, 8]
    assert step.ready()
    step.read([1, 2])
    assert step.ready(), "a grammar covers the answer alone"
    step.accept(2)
    assert theirs.recv(99) == frame(Kind.TOKENS, wire.TOKEN.pack(1, 2))
    assert not step.ready()
    theirs.sendall(mask(1, b"\x05"))
    with pytest.raises(SamplerError, match="has ended"):
        step.apply(given)
    step.accept(2)
    assert not step.ready()
    monkeypatch.setattr(masks, "MASK_SECONDS", -1)
    with pytest.raises(SamplerError, match="a token takes over -1 s"):
        step.ready()


# --- turns ----------------------------------------------------------------------------------------


def test_who_holds_fewest_permits_is_next_and_who_is_cancelled_holds_none():
    async def run():
        turns, order = FairSemaphore(2), []

        async def take(owner):
            await turns.acquire(owner)
            order.append(owner)

        waiting = [asyncio.create_task(take(owner)) for owner in "aaabc"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (order, turns.n_waiting) == (["a", "a"], 3)
        waiting[3].cancel()
        await asyncio.sleep(0)
        assert turns.n_waiting == 2
        turns.release("a")
        await asyncio.sleep(0.01)
        assert order == ["a", "a", "c"]
        turns.release("c")
        await asyncio.sleep(0.01)
        assert (order, turns.n_waiting) == (["a", "a", "c", "a"], 0)
        late = asyncio.create_task(take("d"))
        await asyncio.sleep(0.01)
        turns.release("a")  # gives d its permit, which is then cancelled before it is taken
        late.cancel()
        await asyncio.gather(late, waiting[3], return_exceptions=True)
        assert dict(turns._held) == {"a": 1}
        assert (turns._free, turns._waiting) == (1, {})

    asyncio.run(run())


# --- replies --------------------------------------------------------------------------------------


class Plain(replies.Reply):
    def progress(self, i, event):
        return [("progress", i, event)]

    def piece(self, i, piece):
        return [("piece", i, piece.text)]

    def begin(self):
        return ["begin"]

    def end(self):
        return ["end"]


def made(n=1, timings=False):
    request = SimpleNamespace(prompt=[1, 2, 3])
    task = SimpleNamespace(requests=[request] * n, timings=timings)
    return Plain(task, replies.About("m", "f", 9, lambda: None))


def piece(text, finish=None, counts=None):
    return Piece(text, [], finish, counts=counts or Counts())


def events_of(items):
    events = replies.Events(replies.Mailbox())
    for item in items:
        events._queue.put_nowait(item)
    return events


def test_a_job_that_starts_again_begins_its_answer_anew():
    async def run():
        reply = made(2)
        items = [
            (0, Started(0, slot=3)), (0, PromptTokens(["p"])), (0, piece("void")), (0, Again()),
            (1, piece("x", "stop", Counts(1, 2, 3))), (0, piece("a")), (0, piece("b", "length")),
        ]  # fmt: skip
        found = await replies.whole(reply, events_of(items))
        assert [[each.text for each in one] for one in found] == [["a", "b"], ["x"]]
        assert reply.slots == [3, -1]
        assert reply.prompt == [[], []]
        assert reply.counts[1].n_answer == 3
        assert reply.total.n_answer == 3

    asyncio.run(run())


def frames(reply, items, path="/v1/x"):
    async def run():
        return [text async for text in replies.stream(reply, events_of(items), path)]

    return asyncio.run(run())


def test_a_stream_has_its_events_in_order_and_an_end():
    items = [(0, Started(2, slot=1)), (0, Progress(2, 3, 2)), (0, piece("a")),
             (0, piece("b", "stop"))]  # fmt: skip
    reply = made()
    found = [json.loads(text[6:]) for text in frames(reply, items)[:-1]]
    assert found == [
        "begin", ["progress", 0, [2, 3, 2]], ["progress", 0, [2, 3, 2]], ["piece", 0, "a"],
        ["piece", 0, "b"], "end",
    ]  # fmt: skip
    assert frames(made(), items)[-1] == "data: [DONE]\n\n"
    assert reply.slots == [1]


def test_a_stream_begins_anew_only_where_nothing_was_sent():
    again = [(0, Started(0)), (0, Again()), (0, piece("a", "stop"))]
    assert "piece" in "".join(frames(made(), again))
    sent = [(0, piece("a")), (0, Again()), (0, piece("b", "stop"))]
    text = "".join(frames(made(), sent))
    assert "process_ended" in text
    assert '"b"' not in text
    failed = "".join(frames(made(), [(0, errors.stopping())], "/api/chat"))
    assert failed.endswith('data: {"error":"the server is stopping"}\n\n')


def test_a_reader_that_is_too_slow_is_left(monkeypatch):
    monkeypatch.setattr(replies, "MOST_UNREAD", 2)
    items = [(0, piece(str(i))) for i in range(3)] + [(0, piece("end", "stop"))]
    assert "3 parts of the stream wait to be read" in "".join(frames(made(), items))
    assert '"end"' in "".join(frames(made(), items[1:]))


def test_a_silent_stream_says_that_it_lives(monkeypatch):
    monkeypatch.setattr(replies, "QUIET", 0.05)

    async def run():
        reply, events = made(), events_of([])
        texts = replies.stream(reply, events, "/x")
        assert await anext(texts) == 'data: "begin"\n\n'
        assert await anext(texts) == ": still here\n\n"
        events._queue.put_nowait((0, piece("a", "stop")))
        return [text async for text in texts]

    assert len(asyncio.run(run())) == 3


def test_progress_has_times_where_they_are_asked_for():
    assert made().progress_of(Progress(5, 9, 2)) == {
        "prompt_progress": {"total": 9, "cache": 2, "processed": 5}
    }
    timed = made(timings=True)
    timed._since = time.monotonic() - 2
    found = timed.progress_of(Progress(5, 9, 2))["timings"]
    assert (found["prompt_n"], found["cache_n"]) == (3, 2)
    assert found["prompt_ms"] == pytest.approx(2000, abs=500)
    assert timed.progress_of(Progress(2, 9, 2))["timings"]["prompt_ms"] == 0
    assert replies.as_json({"a": ["é"]}) == '{"a":["é"]}'


def test_rates_are_of_steps():
    c = Counts(n_cached=1, n_read=4, n_answer=5, read_seconds=2.0, answer_seconds=8.0)
    found = replies.timings(c)
    assert {k: found[k] for k in found if not k.startswith("draft")} == {
        "cache_n": 1, "prompt_n": 4, "prompt_ms": 2000.0, "prompt_per_token_ms": 500.0,
        "prompt_per_second": 2.0, "predicted_n": 5, "predicted_ms": 8000.0,
        "predicted_per_token_ms": 2000.0, "predicted_per_second": 0.5,
    }  # fmt: skip
    none = replies.timings(Counts())
    assert {none[k] for k in none} == {0}
    one = replies.timings(c._replace(n_answer=1))
    assert (one["predicted_n"], one["predicted_per_second"]) == (1, 0.0)
    drafted = replies.timings(c._replace(n_drafted=6, n_accepted=2))
    assert (drafted["draft_n"], drafted["draft_n_accepted"]) == (6, 2)
    assert "draft_n" not in found


# --- processes ------------------------------------------------------------------------------------


def test_an_automatic_prefill_is_what_suits_the_model():
    for dense, found in ((True, process.DENSE), (False, process.ANY_PREFILL)):
        engine = SimpleNamespace(auto_stays_dense=lambda dense=dense: dense)
        session = {"prefill": "auto", "n_ctx": 5}
        assert process._suited(session, engine) == {"prefill": found, "n_ctx": 5}
        assert process._suited({"prefill": "x"}, engine) == {"prefill": "x"}
    assert process.DENSE != process.ANY_PREFILL


@pytest.mark.parametrize("name", ["health", "ready"])
def test_a_router_that_is_stopping_is_not_well(name):
    ways = router.Router.__new__(router.Router)
    one = SimpleNamespace(worker=SimpleNamespace(ready=True))
    ways.models = SimpleNamespace(stopped=True, full=False, running=[one], n_waiting=3)
    ways._only = "only"
    with pytest.raises(ApiError, match="the server is stopping"):
        asyncio.run(getattr(ways, name)(None))
    ways.models.stopped = False
    assert asyncio.run(getattr(ways, name)(None)).status_code == 200


def test_a_router_is_ready_where_it_would_take_a_request():
    ways = router.Router.__new__(router.Router)
    one = SimpleNamespace(worker=SimpleNamespace(ready=False))
    ways.models = SimpleNamespace(stopped=False, full=False, running=[one], n_waiting=3)
    ways._only = None
    assert asyncio.run(ways.ready(None)).status_code == 200, "models are loaded when asked for"
    ways._only = "only"
    for full, words in ((False, "being loaded"), (True, "3 requests are waiting")):
        ways.models.full = full
        with pytest.raises(ApiError, match=words) as refused:
            asyncio.run(ways.ready(None))
        assert refused.value.status == 503


# --- jobs of a process that ends ------------------------------------------------------------------


class Noted:
    """A job that notes its events."""

    def __init__(self, owner="a"):
        self.events, self.owner, self.cancelled, self.n_answer, self.n_cached = [], owner, 0, 0, 0

    def emit(self, event):
        self.events.append(event)


def supervising(*entries, **more):
    made = supervisor.Supervisor.__new__(supervisor.Supervisor)
    made._changed, made._own, made._stopping = threading.Condition(), jobs.Counts(), False
    made._entries = {entry.number: entry for entry in entries}
    made._numbers = {entry.job: entry.number for entry in entries}
    made._writer, made.lines, made.loaded = None, [], SimpleNamespace(n_slot=1)
    made._log, made.slots = made.lines.append, []
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_only_what_had_begun_counts_the_end_of_a_process():
    begun, waiting = (supervisor._Entry(Noted(), i, i) for i in range(2))
    begun.started = True
    made = supervising(begun, waiting)
    made._recover("x")
    assert [type(event) for event in begun.job.events] == [Again]
    assert (begun.started, begun.runs, waiting.runs, waiting.job.events) == (False, 1, 0, [])
    made._recover("x")
    assert len(begun.job.events) == begun.runs == 1, "it had not begun anew"
    begun.started = waiting.started = True
    made._recover("was killed")
    assert begun.job.events[1].code == "process_ended"
    assert [type(event) for event in waiting.job.events] == [Again]
    assert list(made._entries) == [1]
    assert made._own.failed == 1
    assert made.lines[-1] == "the model's process was killed; it is started again"
    stopping = supervising(begun, _stopping=True)
    stopping._recover("x")
    assert stopping.lines == []


def test_jobs_have_room_in_slots_and_the_queue_and_owners_their_share():
    waiting = [supervisor._Entry(Noted("a"), i, i) for i in range(2)]
    running = supervisor._Entry(Noted("a"), 9, 9, started=True)
    made = supervising(running, *waiting, n_queue=4, _n_owner=2)
    for owner, n, fits in (("b", 2, True), ("b", 3, False), ("a", 1, False)):
        asked = [Noted(owner)] * n
        if fits:
            made._check_room(asked)
            continue
        with pytest.raises(ApiError) as refused:
            made._check_room(asked)
        assert refused.value.status == 429
    assert made._own.refused == 4
    made.loaded = SimpleNamespace(n_slot=3)  # two are free: the queue is longer by them
    made._check_room([Noted("b")] * 4)
    made._check_room([Noted("a")] * 2)
    made.loaded = None
    with pytest.raises(ApiError):
        made._check_room([Noted("b")] * 2)


def test_events_are_those_of_their_jobs_and_the_last_ends_one():
    one, two = (supervisor._Entry(Noted(), i, i) for i in range(2))
    made = supervising(one, two)
    sent = [(0, 0, Started(5, slot=0)), (1, 2, piece("a")), (0, 3, piece("b", "stop")),
            (7, 0, piece("nobody's"))]  # fmt: skip
    records = [[i, n, *jobs.event_to_record(event)] for i, n, event in sent]
    told = jobs.Counts(failed=2).told()
    data = [records, told, [[True, 3, 1, 2, 4]]]
    made._deal(Kind.EVENTS, json.dumps(data).encode())
    assert [type(event) for event in one.job.events] == [Started, Piece]
    assert [type(event) for event in two.job.events] == [Piece]
    assert (one.started, one.job.n_cached, one.job.n_answer) == (True, 5, 3)
    assert (two.started, two.job.n_answer) == (False, 2)
    assert list(made._entries) == [1]
    assert made.slots == [jobs.SlotState(True, 3, 1, 2, 4)]
    assert made._now.failed == 2
    assert supervisor._is_last(errors.stopping())
    assert not supervisor._is_last(Started(0))
    assert not supervisor._is_last(piece("a"))
    assert supervisor._is_last(piece("a", "stop"))
    with pytest.raises(ValueError):  # noqa: PT011 - it has no text
        made._deal(Kind.LOADED, b"null")
    failed = supervising(one, two)
    failed._fail(RuntimeError("gone"))
    assert [each.job.events[-1].code for each in (one, two)] == ["not_loaded"] * 2
    assert failed._entries == {}
    assert failed.lines == ["the model cannot be loaded again: gone"]
