"""How the server of one model runs a request, what its counters show, and ollama's lists."""

import asyncio
import json
from dataclasses import astuple
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect

from tamis.bindings.drop_in.completion import Counts as Taken
from tamis.bindings.drop_in.completion import Piece, Request
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve import replies, tasks
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http import app, metrics, ollama_routes
from tamis.bindings.serve.http.app import ModelFile, Server, Settings
from tamis.bindings.serve.http.json_reply import JsonReply, told
from tamis.bindings.serve.jobs import Counts
from tamis.bindings.serve.replies import About, Mailbox
from tamis.bindings.serve.supervisor import Loaded
from tamis.bindings.serve.tasks import Inputs, Task


class Worker:
    """Answers each job with one piece as soon as it is submitted."""

    def __init__(self, *, silent=False):
        self.submitted, self.dropped, self.silent = [], [], silent

    def submit(self, jobs):
        self.submitted += jobs
        for job in () if self.silent else jobs:
            job.emit(Piece("a", [], "stop", (5,), None, Taken(n_answer=1)))

    def drop(self, jobs):
        self.dropped += jobs


class Form(replies.Reply):
    """Texts alone."""

    def piece(self, i, piece):
        return [{"i": i, "text": piece.text}]

    def whole(self, found):
        return {"texts": [[piece.text for piece in pieces] for pieces in found]}


def task(n=2, **more):
    prompt = [5, 6]
    given = {
        "requests": [Request(prompt, 4, "tiny") for _ in range(n)], "sampling": Sampling(),
        "seed": 7, "stream": False, "include_usage": False, "progress": False, "wanted": None,
        "prompt_tokens": 2, "ignored": ("odd",),
    }  # fmt: skip
    return Task(**given | more)


def serving(read, worker, settings=None, **more):
    """A server whose requests are read as `read` says: a task, or a helper's task and masks."""
    made = Server.__new__(Server)
    loaded = Loaded(64, 8, 9, 128, 2, 77, "cpu", more.pop("predicts", True))
    made._model = SimpleNamespace(name="tiny", loaded=loaded, text="text")
    made.settings, made.lora_scales, made.n_slots = settings or Settings(), (), 2
    made.worker, made.about = worker, About("tiny", "b0", 64, None)
    made.asked = []

    async def prepared(request, name, load, body):
        made.asked.append((name, body))
        return read if type(read) is tuple else (read, None)

    async def aside(work):
        return work()

    made._prepared, made.aside = prepared, aside
    return made


class Asking:
    """A request whose client stays until the test lets it go."""

    def __init__(self, path="/v1/x", *, parts=(), gone=False):
        self.scope, self.url = {"tamis.owner": ""}, SimpleNamespace(path=path)
        self._gone, self._parts, self.method = gone, parts, "POST"

    async def receive(self):
        if not self._gone:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def stream(self):
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part


class Masks:
    closed = 0

    def close(self):
        self.closed += 1


def answered(server, request=None, body=None):
    async def run():
        server._mailbox = Mailbox()
        reply = await server.complete("chat", Form, request or Asking(), body)
        if not hasattr(reply, "body_iterator"):
            return reply, reply.body
        text = "".join([text async for text in reply.body_iterator])
        reply._end()
        return reply, text

    return asyncio.run(run())


def test_a_request_is_a_job_for_each_choice_and_its_reply_names_what_was_ignored():
    worker = Worker()
    server = serving(task(), worker)
    reply, data = answered(server, body=b"body")
    assert json.loads(data) == {"texts": [["a"], ["a"]]}
    assert (reply.status_code, reply.headers["x-tamis-ignored"]) == (200, "odd")
    assert server.asked == [("chat", b"body")]
    found = [(j.prompt, j.owner, j.scope, j.lora, j.number, j.seed) for j in worker.submitted]
    assert found == [([5, 6], "", '["", ""]', None, i, 7 + i) for i in range(2)]
    assert worker.dropped == worker.submitted


def test_a_stream_is_submitted_at_once_and_dropped_at_its_end():
    worker, masks = Worker(), Masks()
    server = serving((task(1, stream=True, masked=True), masks), worker)
    reply, text = answered(server)
    assert text == 'data: {"i":0,"text":"a"}\n\ndata: [DONE]\n\n'
    assert (reply.media_type, reply.headers["x-tamis-ignored"]) == ("text/event-stream", "odd")
    assert worker.dropped == worker.submitted
    assert (masks.closed, worker.submitted[0].masks) == (1, masks)


@pytest.mark.parametrize("stream", [True, False])
def test_a_slot_is_one_of_the_servers(stream):
    masks = Masks()
    for slot, fits in ((0, True), (1, True), (2, False)):
        worker = Worker()
        server = serving((task(1, slot=slot, stream=stream), masks), worker)
        if fits:
            answered(server)
            assert worker.submitted[0].slot == slot
            continue
        with pytest.raises(ApiError, match="id_slot is 2, expected 0 to 1") as refused:
            answered(server)
        assert (refused.value.status, worker.submitted) == (400, [])
    assert masks.closed == 3, "masks are closed whatever became of the request"


def test_a_model_that_writes_nothing_says_where_to_ask():
    server = serving(task(), Worker(), predicts=False)
    with pytest.raises(ApiError) as refused:
        answered(server)
    error = refused.value
    assert (error.status, error.code, error.param) == (501, "unsupported", "model")
    assert server.asked == []


def test_the_jobs_of_a_client_that_leaves_are_dropped():
    worker = Worker(silent=True)
    with pytest.raises(ApiError) as gone:
        answered(serving(task(1), worker), Asking(gone=True))
    assert (gone.value.status, worker.dropped) == (499, worker.submitted)
    assert len(worker.dropped) == 1


def test_a_request_that_names_adapters_has_their_scales():
    worker = Worker()
    settings = Settings(loras=(("a.gguf", 1.0), ("b.gguf", 0.5)))
    server = serving(task(1, lora=[{"id": 1, "scale": 0.25}], salt="s"), worker, settings)
    server.lora_scales = (1.0, 0.5)
    answered(server)
    (job,) = worker.submitted
    assert (job.lora, json.loads(job.scope)) == ((0.0, 0.25), ["", "s", 0.0, 0.25])


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "parts", "most", "found"),
    [
        ("/v1/x", [b"ab", b"c"], 3, b"abc"),
        ("/v1/x", [b"ab", b"cd"], 3, 413),
        ("/extract", [b"ab", b"cd"], 3, b"abcd"),
        ("/v1/x", [], 3, b""),
        ("/v1/x", [b"a", ClientDisconnect()], 3, 499),
        ("/v1/x", [TimeoutError()], 3, 408),
    ],
)
def test_a_body_is_received_within_its_limits(path, parts, most, found):
    coroutine = app.received(Asking(path, parts=parts), Settings(max_body=most))
    if isinstance(found, bytes):
        assert asyncio.run(coroutine) == found
        return
    with pytest.raises(ApiError) as refused:
        asyncio.run(coroutine)
    assert refused.value.status == found


@pytest.mark.parametrize(
    ("n", "name", "grammar", "apart"),
    [(16 << 10, "chat", None, False), ((16 << 10) + 1, "chat", None, True),
     (5, "chat", "grammar", True), (5, "document", None, True)],
)  # fmt: skip
def test_small_requests_without_a_grammar_are_read_here(monkeypatch, n, name, grammar, apart):
    masks, sent = Masks(), []
    found = task(1, sampling=Sampling(grammar=grammar))
    server = serving(None, Worker(), reader="reader")
    del server._prepared
    server.reader = "reader"
    monkeypatch.setattr(app, "read", lambda *args: (sent.append(args[:2]), found)[1])

    async def prepare(given, body, owner):
        sent.append((given, len(body), owner))
        return SimpleNamespace(result=b"result", masks=masks)

    server._helpers = SimpleNamespace(prepare=prepare)
    got = asyncio.run(server._prepared(Asking(), name, bytes.decode, b"x" * n))
    assert got == (("result", masks) if apart else (found, None))
    own = [] if apart and grammar is None else [(name, "reader")]
    assert sent == [*own, *([(name, n, "")] if apart else [])]


def test_what_a_helper_sends_that_is_no_answer_is_the_servers_fault():
    masks = Masks()
    server = serving(None, Worker())
    del server._prepared

    async def prepare(*args):
        return SimpleNamespace(result=b"{", masks=masks)

    server._helpers = SimpleNamespace(prepare=prepare)
    with pytest.raises(ApiError) as refused:
        asyncio.run(server._prepared(Asking(), "document", json.loads, b""))
    assert (refused.value.status, refused.value.code, masks.closed) == (503, "unavailable", 1)


@pytest.mark.parametrize(
    ("name", "reply"),
    [("count messages", {"input_tokens": 7}),
     ("count responses", {"object": "response.input_tokens", "input_tokens": 7})],
)  # fmt: skip
def test_the_number_of_tokens_has_the_form_of_its_api(name, reply):
    masks = Masks()
    server = serving((7, masks), Worker())
    found = asyncio.run(server.count(name, Asking()))
    assert (json.loads(found.body), masks.closed) == (reply, 1)


# --- records --------------------------------------------------------------------------------------


def test_tokens_that_a_helper_sends_are_those_of_the_vocabulary():
    for ids, fits in (([0, 8], True), ([9], False), ([-1], False), ([], False), ([[1]], False)):
        data = tasks.inputs_to_json(Inputs([ids], True, 3, 2, ("a",)))
        if fits:
            assert tasks.inputs_from_json(data, 9) == Inputs([ids], True, 3, 2, ("a",))
        else:
            with pytest.raises(ValueError, match="outside the vocabulary"):
                tasks.inputs_from_json(data, 9)
    one = tasks.to_json(task(2))
    assert json.loads(one)["prompts"] == [[5, 6]], "choices of one prompt have it once"
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tasks.from_json(one, 6)
    assert tasks.from_json(one, 7).requests[0].prompt == [5, 6]


def test_names_without_effect_are_listed_up_to_a_number():
    assert told(()) == {}
    assert told(("a", "b")) == {"x-tamis-ignored": "a, b"}


def test_all_counters_are_shown_under_their_names():
    counts = Counts(*range(1, 1 + len(astuple(Counts()))))
    worker = SimpleNamespace(counts=counts, n_running=91, n_waiting=92)
    lines = metrics.exposition(worker).splitlines()
    shown = dict(line.split(" ") for line in lines if not line.startswith("#"))
    c = counts
    expected = {
        "jobs_total": c.jobs, "jobs_failed_total": c.failed, "jobs_cancelled_total": c.cancelled,
        "jobs_refused_total": c.refused, "prompt_tokens_total": c.prompt_tokens,
        "cached_tokens_total": c.cached_tokens, "moved_tokens_total": c.moved_tokens,
        "answer_tokens_total": c.answer_tokens, "steps_total": c.steps,
        "busy_seconds_total": c.busy_seconds, "cache_hits_total": c.cache_hits,
        "cache_restored_tokens_total": c.restored_tokens,
        "cache_restored_bytes_total": c.cache_restored, "cache_kept_bytes_total": c.cache_kept,
        "cache_evictions_total": c.cache_evicted, "cache_failures_total": c.cache_failed,
        "cache_ram_bytes": c.cache_ram, "cache_disk_bytes": c.cache_disk,
        "jobs_running": 91, "jobs_waiting": 92,
    }  # fmt: skip
    theirs = {
        "prompt_tokens_total": c.prompt_tokens, "prompt_tokens_cached_total": c.cached_tokens,
        "prompt_seconds_total": c.prompt_seconds, "tokens_predicted_total": c.answer_tokens,
        "tokens_predicted_seconds_total": c.answer_seconds, "n_decode_total": c.steps + c.chunks,
        "n_tokens_max": c.most_tokens, "spec_decode_num_draft_tokens_total": c.drafted_tokens,
        "spec_decode_num_accepted_tokens_total": c.accepted_tokens,
        "spec_decode_num_drafts_total": c.drafts,
        "prompt_tokens_seconds": c.prompt_tokens / c.prompt_seconds,
        "predicted_tokens_seconds": c.answer_steps / c.answer_seconds,
        "requests_processing": 91, "requests_deferred": 92,
        "n_busy_slots_per_decode": c.rows / c.steps,
    }  # fmt: skip
    names = {f"tamis_{k}": v for k, v in expected.items()}
    names |= {f"llamacpp:{k}": v for k, v in theirs.items()}
    assert {name: float(value) for name, value in shown.items()} == names
    kinds = dict(line.split(" ")[2:] for line in lines if line.startswith("# TYPE"))
    gauges = {name.split("_", 1)[1] for name, kind in kinds.items() if kind == "gauge"}
    assert gauges == {
        "cache_ram_bytes", "cache_disk_bytes", "jobs_running", "jobs_waiting", "tokens_seconds",
        "processing", "deferred", "busy_slots_per_decode",
    }  # fmt: skip
    empty = SimpleNamespace(counts=Counts(), n_running=0, n_waiting=0)
    values = [line.split(" ")[1] for line in metrics.exposition(empty).splitlines()[2::3]]
    assert {float(value) for value in values} == {0.0}


# --- ollama ---------------------------------------------------------------------------------------

FILE = ModelFile("a.gguf", 77, 1_700_000_000.0, "llama", 1_500_000, "Q8_0", {"x": 1})
DETAILS = {
    "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"],
    "parameter_size": "2M", "quantization_level": "Q8_0",
}  # fmt: skip
MODIFIED = "2023-11-14T22:13:20+00:00"


def test_a_model_in_ollamas_lists_and_all_that_is_shown_of_it():
    entry = ollama_routes.entry("tiny", FILE)
    assert len(entry.pop("digest")) == 64
    assert entry == {
        "name": "tiny", "model": "tiny", "modified_at": MODIFIED, "size": 77, "details": DETAILS,
    }  # fmt: skip
    text = SimpleNamespace(template_source="{{x}}")
    shown = {
        "license": "", "modelfile": "FROM a.gguf\n", "parameters": "", "template": "{{x}}",
        "details": DETAILS, "model_info": {"x": 1}, "capabilities": ["embedding"],
        "modified_at": MODIFIED,
    }  # fmt: skip
    assert ollama_routes.described(FILE, text, False) == shown
    licensed = FILE._replace(metadata={"general.license": "mit"})
    assert ollama_routes.described(licensed, text, False)["license"] == "mit"
    digests = {ollama_routes.entry(n, f)["digest"] for n, f in (
        ("tiny", FILE), ("b", FILE), ("tiny", FILE._replace(n_byte=78)),
        ("tiny", FILE._replace(modified=1.0)),
    )}  # fmt: skip
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("keep", "reason"),
    [(None, "load"), (0, "unload"), ("0s", "unload"), ("5m", "load"), (-1, "load"), (0.5, "load")],
)
def test_a_request_without_a_prompt_loads_or_unloads(keep, reason):
    server = SimpleNamespace(about=About("tiny", "b0", 64, None))
    body = {} if keep is None else {"keep_alive": keep}
    for handler, empty in (
        (ollama_routes._chat, {"message": {"role": "assistant", "content": ""}}),
        (ollama_routes._generate, {"response": ""}),
    ):
        server.body = lambda request: asyncio.sleep(0, json.dumps(body).encode())
        found = json.loads(asyncio.run(handler(server, None)).body)
        assert found.pop("created_at").endswith("+00:00")
        assert found == {"model": "tiny", "done": True, "done_reason": reason} | empty


def test_ollamas_embeddings_have_two_forms():
    async def embedded(request, name):
        assert name == "ollama embed"
        return Inputs([[1, 2], [3]], ignored=("odd",)), [[0.5], [0.25]]

    async def written(make, headers):
        return JsonReply(make(), headers=headers)

    server = SimpleNamespace(
        embedded=embedded, written=written, about=About("tiny", "b0", 64, None)
    )
    many = asyncio.run(ollama_routes._embed(server, None))
    found = json.loads(many.body)
    assert 0 <= found.pop("total_duration") < 10**10
    assert found == {
        "model": "tiny", "embeddings": [[0.5], [0.25]], "load_duration": 0, "prompt_eval_count": 3,
    }  # fmt: skip
    one = asyncio.run(ollama_routes._embeddings(server, None))
    assert json.loads(one.body) == {"embedding": [0.5]}
    assert one.headers["x-tamis-ignored"] == many.headers["x-tamis-ignored"] == "odd"
    version = asyncio.run(ollama_routes.version(None, None))
    assert json.loads(version.body) == {"version": "0.13.0"}
