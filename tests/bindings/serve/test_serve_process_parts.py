"""The process that runs a model, part by part: its memory, its drafters, its frames, its errors."""

import json
import signal
import socket
from collections import deque
from types import SimpleNamespace

import pytest

from tamis.bindings.drop_in.completion import Piece
from tamis.bindings.serve import jobs, process
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.jobs import Job, Keeping, SlotState, Started
from tamis.bindings.serve.room import Slots
from tamis.bindings.serve.supervisor import CacheSizes, Start
from tamis.bindings.serve.wire import Frames, Kind
from tamis.bindings.serve.worker import Completion
from tamis.engine.memory_plan import MemoryPlan

PLAN = MemoryPlan(weights=500, kv=20, workspace=3, available=5000)
DRAFT_PLAN = MemoryPlan(weights=70, kv=4, workspace=1, available=5000)


def start(**more):
    """The arguments of a process with two slots; kv_dir is None."""
    given = {
        "path": "a/model.gguf", "identity": [1], "n_threads": 3, "rope": None,
        "where": {"device": "cpu"}, "session": {"prefill": "dense", "kv_dir": None}, "n_slot": 2,
    }  # fmt: skip
    return Start(**given | more)


def model_of(*, is_encoder=False, **more):
    """An engine of which only facts are looked at."""
    arch = SimpleNamespace(is_encoder=is_encoder)
    return SimpleNamespace(model=SimpleNamespace(arch=arch), places="places", **more)


SESSION = SimpleNamespace(n_ctx=64, plans={"cpu": PLAN})


@pytest.fixture
def host(monkeypatch):
    """A machine with 5000 bytes of RAM as the plan has it, 4000 as the system has it."""
    found = {"cpu": SimpleNamespace(on_host=True)}
    monkeypatch.setattr(process, "devices", lambda places: found)
    monkeypatch.setattr(process, "available_bytes", lambda: 4000)
    monkeypatch.setattr(process, "disk_usage", lambda folder: SimpleNamespace(free=800))
    monkeypatch.setattr(process, "private_folder", lambda folder: folder)
    return found


# --- memory ---------------------------------------------------------------------------------------


def test_free_memory_is_that_of_the_plan_where_the_model_is_in_ram(host):
    assert process._room(start(), model_of(), SESSION) == (("cpu", 5000), None)
    session = {"prefill": "dense", "kv_dir": "folder"}
    assert process._room(start(session=session), model_of(), SESSION) == (("cpu", 5000), 800)
    host["cpu"].on_host = False
    assert process._room(start(), model_of(), SESSION) == (("", 4000), None)


def test_slots_and_their_drafters_take_memory_and_a_drafters_weights_too():
    own = Slots(2, 64, {"cpu": PLAN}, loaded=True)
    assert process._slots(start(), SESSION) == [own]
    drafts = [SimpleNamespace(plans={"cpu": DRAFT_PLAN})] * 2
    more = Slots(2, 64, {"cpu": DRAFT_PLAN}, loaded=False)
    assert process._slots(start(), SESSION, drafts) == [own, more]


@pytest.mark.parametrize(
    ("cache", "asked"),
    [(None, 0), (CacheSizes(), 0), (CacheSizes(ram=7), 7), (CacheSizes(memory=7), 0)],
)
def test_ram_is_asked_for_the_prompt_cache_where_the_user_said_how_much(cache, asked):
    assert process._asked(start(cache=cache)) == asked


TAKEN = 500 + 2 * (20 + 3)
LEFT = 5000 - 2 * (20 + 3)


@pytest.mark.parametrize(
    ("cache", "how", "opened", "taken"),
    [
        (None, {}, None, TAKEN),
        (CacheSizes(), {"is_encoder": True}, None, TAKEN),
        (CacheSizes(ram=0), {}, None, TAKEN),
        (CacheSizes(ram=100), {}, (100, None, 0, ""), TAKEN + 100),
        (CacheSizes(), {}, (LEFT // 4, None, 0, ""), TAKEN + LEFT // 4),
        (CacheSizes(memory=TAKEN + 80), {}, (20, None, 0, ""), TAKEN + 20),
        (CacheSizes(memory=TAKEN + 1), {}, None, TAKEN),
        (CacheSizes(memory=TAKEN - 99), {}, None, TAKEN),
        (CacheSizes(memory=1 << 40), {}, (LEFT // 4, None, 0, ""), TAKEN + LEFT // 4),
        (CacheSizes(ram=0, folder="f"), {}, (0, "f", 200, ""), TAKEN),
        (CacheSizes(ram=0, folder="f", disk=9), {}, (0, "f", 9, ""), TAKEN),
        (CacheSizes(ram=0, folder="f", disk=0), {}, (0, "f", 0, ""), TAKEN),
        (CacheSizes(ram=9, disk=9), {}, (9, None, 9, ""), TAKEN + 9),
        (CacheSizes(ram=9), {"precision": "int8"}, (9, None, 0, "int8"), TAKEN + 9),
    ],
)  # fmt: skip
def test_the_prompt_cache_has_what_was_asked_or_a_share(
    host, monkeypatch, cache, how, opened, taken
):
    monkeypatch.setattr(process.PromptCache, "open", lambda *args: args)
    where = {"precision": how["precision"]} if "precision" in how else {}
    engine = model_of(is_encoder=how.get("is_encoder", False))
    found = process._cache(start(cache=cache, where=where), engine, [SESSION] * 2, [])
    assert found == (opened, taken)


def test_the_memory_of_everything_has_drafters_and_what_backs_a_gpu(host):
    plan = PLAN._replace(host=11)
    session = SimpleNamespace(n_ctx=64, plans={"cpu": plan})
    drafts = [SimpleNamespace(plans={"cpu": DRAFT_PLAN})] * 2
    found = process._cache(start(), model_of(), [session] * 2, drafts)
    assert found == (None, TAKEN + 2 * 11 + 70 + 2 * 5)
    with pytest.raises(MemoryError, match="prompt cache"):
        process._cache(start(cache=CacheSizes(ram=LEFT + 1)), model_of(), [SESSION], [])
    assert process._cache(start(cache=CacheSizes(ram=LEFT)), model_of(), [SESSION], [])[1]


# --- drafters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "ngrams", "expected"),
    [
        (None, None, []),
        (["model", 5, "small.gguf"], None, [("model", "small", "engine", 64)]),
        (["mtp", 4], None, [("mtp", "engine", 64)]),
        (["attn", 4], None, [("attn", SESSION)]),
        (None, [2, 9], ["ngrams alone"]),
        (["mtp", 4], [2, 9], [("mtp", "engine", 64)]),
    ],
)
def test_each_session_has_the_drafter_that_was_asked_for(monkeypatch, draft, ngrams, expected):
    engine = model_of()
    called = []

    def named(value):
        return "engine" if value is engine else value

    def load(path, *, n_threads, device):
        called.append((path, n_threads, device))
        return "small"

    def joined(own, session, found, n_max):
        assert session is SESSION
        given = None if found is None else (found.min_len, found.max_len)
        called.append((given, n_max))
        return own or (None if found is None else "ngrams alone")

    monkeypatch.setattr(process.Engine, "load", load)
    for kind, name in (("ModelDraft", "model"), ("NextDraft", "mtp"), ("AttentionDraft", "attn")):
        made = lambda *args, name=name: (name, *map(named, args))  # noqa: E731
        monkeypatch.setattr(process, kind, made)
    monkeypatch.setattr(process, "NGrams", lambda a, b: SimpleNamespace(min_len=a, max_len=b))
    monkeypatch.setattr(process, "with_ngrams", joined)
    monkeypatch.setattr(process, "Drafting", lambda *args: args)
    found = process._drafting(start(draft=draft, ngrams=ngrams), engine, [SESSION] * 2)
    n_max = draft[1] if draft else process.DRAFT_MAX
    assert found == [(SESSION, one, n_max) for one in expected * 2]
    loads = [("small.gguf", 3, "cpu")] * (expected[:1] == [("model", "small", "engine", 64)])
    assert called == [*loads, *[(None if ngrams is None else (2, 9), n_max)] * 2]


def test_an_encoder_has_no_drafters():
    assert process._drafting(start(draft=["mtp", 4]), model_of(is_encoder=True), [SESSION]) == []


# --- loading --------------------------------------------------------------------------------------


class Channel:
    """Notes the frames that are sent; `broken` ones have no other end."""

    def __init__(self, *, broken=False):
        self.frames, self.broken, self.ends = Frames(), broken, []

    def sendall(self, data):
        if self.broken:
            raise BrokenPipeError
        self.frames.feed(data)

    def shutdown(self, how):
        self.ends.append(how)
        if self.broken:
            raise OSError

    def sent(self):
        found = []
        while (one := self.frames.next()) is not None:
            found.append((one[0], json.loads(one[1])))
        return found


class Loading:
    """Stands in for Engine: notes how it and its sessions are made."""

    def __init__(self, *, is_encoder=False):
        self.asked, self.opened = None, []
        self.model = SimpleNamespace(arch=SimpleNamespace(is_encoder=is_encoder))
        self.places, self.encoder = "places", None

    def load(self, path, **how):
        how.pop("progress")("weights", 3, 9)
        self.asked = path, how
        return self

    def auto_stays_dense(self):
        return True

    def session(self, **how):
        progress = how.pop("progress", None)
        if progress is not None:
            progress("kv", len(self.opened), None)
        self.opened.append(how)
        return SimpleNamespace(n_ctx=64, plans={"cpu": PLAN}, number=len(self.opened))


@pytest.fixture
def loading(monkeypatch):
    engine = Loading()
    monkeypatch.setattr(process.Engine, "load", engine.load)
    monkeypatch.setattr(process, "identity", lambda path: [1])
    files = SimpleNamespace(load=lambda: SimpleNamespace(scaled=lambda scales: ["scaled", *scales]))
    monkeypatch.setattr(process, "AdapterFiles", lambda *given: files)
    return engine


def test_a_model_is_loaded_with_a_session_for_each_slot(host, loading):
    channel = Channel()
    engine, sessions, reopen = process._load(channel, start(n_slot=3))
    assert engine is loading
    assert loading.asked == (
        "a/model.gguf",
        {"n_threads": 3, "rope": None, "mmproj": None, "device": "cpu"},
    )
    assert [session.number for session in sessions] == [1, 2, 3]
    assert [set(how) for how in loading.opened] == [{"prefill", "kv_dir", "adapters"}] * 3
    assert channel.sent() == [
        (Kind.PROGRESS, ["weights", 3, 9]), *((Kind.PROGRESS, ["kv", i, None]) for i in range(3))
    ]  # fmt: skip
    reopen(None)
    reopen([0.5])
    plain, other = loading.opened[3:]
    assert plain == loading.opened[0]
    assert other["adapters"] == ["scaled", 0.5]
    loading.opened.clear()
    loading.model.arch.is_encoder = True
    process._load(channel, start(n_slot=1))
    assert loading.opened[0]["n_ubatch"] is None, "an encoder reads a whole text at once"
    process._load(channel, start(rope={"kind": "linear", "factor": 2.0}))
    assert loading.asked[1]["rope"] == process.RopeScaling(kind="linear", factor=2.0)


def test_slots_that_do_not_fit_are_refused_after_the_first(host, loading):
    with pytest.raises(MemoryError, match="4999 contexts of 64 tokens"):
        process._load(Channel(), start(n_slot=4999))
    assert len(loading.opened) == 1
    with pytest.raises(MemoryError, match="with a prompt cache"):
        process._load(Channel(), start(cache=CacheSizes(ram=LEFT + 1)))
    with pytest.raises(RuntimeError, match=r"a/model.gguf has changed since"):
        process._load(Channel(), start(identity=[2]))


class Ended(BaseException):
    """The process has ended."""


@pytest.fixture
def begun(monkeypatch):
    """Notes what the process does to itself; its end is an exception."""
    notes = []
    channel = Channel()

    def end(code):
        notes.append(("exit", code))
        raise Ended

    monkeypatch.setattr(process.signal, "signal", lambda *args: notes.append(("signal", *args)))
    monkeypatch.setattr(process, "end_with", lambda parent: notes.append(("end with", parent)))
    monkeypatch.setattr(process, "limit", lambda *args: notes.append(("limit", *args)))
    monkeypatch.setattr(process.os, "_exit", end)
    monkeypatch.setattr(process.socket, "socket", lambda *, fileno: (channel, fileno)[0])
    given = json.dumps(start()._asdict())
    monkeypatch.setattr(process.sys, "argv", ["x", "5", given, "77"])
    return notes, channel


BEGUN = [
    ("signal", signal.SIGINT, signal.SIG_IGN), ("signal", signal.SIGTERM, signal.SIG_IGN),
    ("end with", 77), ("limit", "core", 0),
]  # fmt: skip


def test_a_process_runs_its_jobs_and_ends(begun, monkeypatch):
    notes, channel = begun
    cache = SimpleNamespace(close=lambda seconds: notes.append(("close", seconds)))
    runner = SimpleNamespace(run=lambda: notes.append("run"))
    monkeypatch.setattr(process, "_load", lambda c, s: (notes.append(s), ("e", ["s"], "r"))[1])
    monkeypatch.setattr(process, "_drafting", lambda *args: args[1:])
    monkeypatch.setattr(process, "_cache", lambda *args: (cache, 7))
    monkeypatch.setattr(process, "loaded", lambda *args: (notes.append(args), runner)[1])
    with pytest.raises(Ended):
        process.main()
    made = (channel, "e", ["s"], "r", ("e", ["s"]), cache, 7)
    given = start(adapters=[[], [], None])
    assert notes == [*BEGUN, given, made, "run", ("close", 0.1), ("exit", 0)]
    notes.clear()
    monkeypatch.setattr(process, "_cache", lambda *args: (None, 7))
    with pytest.raises(Ended):
        process.main()
    assert notes[-2:] == ["run", ("exit", 0)]


@pytest.mark.parametrize("error", [MemoryError("too much"), ValueError("a/model.gguf is odd")])
def test_a_model_that_cannot_be_loaded_is_reported_without_its_folder(begun, monkeypatch, error):
    notes, channel = begun

    def failed(*args):
        raise error

    monkeypatch.setattr(process, "_load", failed)
    with pytest.raises(Ended):
        process.main()
    ((kind, (line, where, memory)),) = channel.sent()
    assert (kind, notes[-1]) == (Kind.FAILED, ("exit", 1))
    assert (line, memory) == (
        ("too much", True) if isinstance(error, MemoryError) else ("model.gguf is odd", False)
    )
    assert where.startswith("Traceback")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file", "a.gguf"), "a.gguf: No such file"),
        (OSError("odd"), "odd"),
        (OSError(5, "Input/output error"), "[Errno 5] Input/output error"),
        (MemoryError(), "out of memory: lower --ctx or take a smaller model"),
        (MemoryError("why"), "why"),
        (ValueError("why"), "why"),
        (ValueError(), "ValueError"),
        (RuntimeError("why"), "why"),
        (ImportError("why"), "why"),
        (KeyError("why"), "KeyError: 'why' (a bug of tamis)"),
    ],
)
def test_a_line_of_the_log_says_what_was_wrong(error, line):
    assert process._line(error) == line


# --- the runner -----------------------------------------------------------------------------------


class Working:
    """Stands in for the worker: notes what it is given."""

    def __init__(self):
        self.counts, self.states = jobs.Counts(failed=4), [SlotState()]
        self.submitted, self.refused, self.ends = [], [], []

    def slots(self):
        return self.states

    def submit(self, given):
        self.submitted.append(given)

    def refuse(self, given, error):
        self.refused.append((given, error))

    def stop(self):
        self.ends.append("stop")

    def join(self, seconds):
        self.ends.append(seconds)


@pytest.fixture
def runner(monkeypatch):
    """A runner of one slot and a vocabulary of 9 tokens whose worker only notes."""
    worker = Working()
    made = []
    monkeypatch.setattr(process, "Worker", lambda *args: (made.append(args), worker)[1])
    engine = SimpleNamespace(hp=SimpleNamespace(n_vocab=9), tokenizer="tokenizer")
    found = process.Runner(Channel(), engine, [SESSION], "reopen", ["draft"], "cache")
    given = (engine, [SESSION], found._flush, found._hang_up, "reopen", ["draft"], "cache")
    assert made == [given]
    return found


def test_what_a_process_tells_of_its_model(monkeypatch):
    monkeypatch.setattr(process, "Worker", lambda *args: args)
    monkeypatch.setattr(process, "devices", lambda places: {"cuda": places, "cpu": 0})
    hp = SimpleNamespace(n_embd=8, n_vocab=9, n_ctx_train=128)
    heads = SimpleNamespace(pooling_or_mean="cls", ranks=True)
    model = SimpleNamespace(arch=SimpleNamespace(is_encoder=False), heads=heads)
    engine = SimpleNamespace(
        hp=hp, model=model, tokenizer=None, loaded=SimpleNamespace(places="places")
    )
    channel = Channel()
    found = process.loaded(channel, engine, [SESSION] * 3)
    told = [64, 8, 9, 128, 3, 0, "cuda, cpu", True, "cls", True]
    assert channel.sent() == [(Kind.LOADED, told)]
    assert found._busy == [False] * 3
    assert found._worker[4:] == (None, (), None)
    model.arch.is_encoder = True
    process.loaded(channel, engine, [SESSION], None, (), None, 55)
    assert channel.sent() == [
        (Kind.LOADED, [64, 8, 9, 128, 1, 55, "cuda, cpu", False, "cls", True])
    ]


def test_events_of_a_step_are_one_frame_and_silence_lasts_a_second(runner, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    told = jobs.Counts(failed=4).told()
    idle, busy = [False, 0, 0, 0, -1], [True, 5, 1, 4, 3]
    runner._flush()
    assert runner._channel.sent() == [(Kind.EVENTS, [[], told, [idle]])], "the first is sent"
    for later, sent in ((100.99, []), (101.0, [(Kind.EVENTS, [[], told, [idle]])])):
        now[0] = later
        runner._flush()
        assert runner._channel.sent() == sent
    runner._worker.states = [SlotState(*busy)]
    runner._flush()
    assert runner._channel.sent() == [(Kind.EVENTS, [[], told, [busy]])]
    runner._flush()
    assert runner._channel.sent() == []
    runner._emitter(3)(Started(2, 0))
    runner._flush()
    assert runner._channel.sent() == [(Kind.EVENTS, [[[3, 0, "started", 2, 0]], told, [busy]])]
    runner._flush()
    assert runner._channel.sent() == [], "events are sent once"
    runner._channel.broken = True
    now[0] = 999.0
    runner._flush()
    runner._hang_up()
    assert runner._channel.ends == [socket.SHUT_RDWR]


def test_a_piece_has_the_number_of_tokens_of_its_answer(runner):
    job = Job([1], None, n_answer=6)
    runner._jobs[3] = job, None
    for number, event, n in (
        (3, Piece("a", [], None), 6), (3, Started(1), 0), (4, Piece("a", [], None), 0)
    ):  # fmt: skip
        runner._emitter(number)(event)
        assert runner._events.pop()[:2] == [number, n]


def wanted(i=3, **more):
    one = {"id": i, "prompt": 0, "scope": "s", "owner": "o", "slot": None, "pooling": None}
    return one | {"lora": None, "tiles": 0} | more


def test_jobs_are_made_of_what_the_server_sends(runner):
    parts = [
        wanted(1, pooling="cls", lora=[0.5]), wanted(2, slot=1, keeping=["save", "a.bin"]),
    ]  # fmt: skip
    record = {"masked": False, "prompts": [[5, 6]], "jobs": parts, "tiles": [[]]}
    runner._take(Kind.JOBS, json.dumps(record).encode(), deque())
    ((vector, keeping),) = runner._worker.submitted
    assert (type(vector), vector.prompt, vector.pooling, vector.lora) == (
        Job,
        [5, 6],
        "cls",
        (0.5,),
    )
    assert (vector.scope, vector.owner, vector.slot) == ("s", "o", None)
    assert isinstance(keeping, Keeping)
    assert (keeping.prompt, keeping.action, keeping.path, keeping.slot, keeping.lora) == (
        [], "save", "a.bin", 1, None,
    )  # fmt: skip
    assert runner._jobs == {1: (vector, None), 2: (keeping, None)}
    runner._take(Kind.DROP, b"[2, 8]", deque())
    assert (vector.cancelled, keeping.cancelled) == (False, True)
    assert list(runner._jobs) == [1]


class Masking:
    """Stands in for the masks of a request."""

    closed = 0

    def step(self, number, n_vocab):
        return "step", number, n_vocab

    def close(self):
        self.closed += 1


def test_an_answers_sampler_has_its_mask_and_prompt(runner, monkeypatch):
    masks = Masking()
    monkeypatch.setattr(process, "_masks", lambda number: (masks, number)[0])
    monkeypatch.setattr(process, "sampler_of", lambda *args: args)
    one = jobs.Wanted(
        7, [5, 6], "s", "o", 1, None, [0.5], request="request", sampling="sampling", seed=11,
        number=2, cached=False, reuse=4,
    )  # fmt: skip
    monkeypatch.setattr(process, "jobs_of_record", lambda record: [one])
    record = json.dumps({"masked": True, "jobs": [{"id": 7}]}).encode()
    runner._take(Kind.JOBS, record, deque([9]))
    ((job,),) = runner._worker.submitted
    assert isinstance(job, Completion)
    step = ("step", 2, 9)
    assert job.sampler == ("sampling", 11, 9, step, "tokenizer", [5, 6])
    assert (job.mask, job.request, job.cached, job.reuse) == (step, "request", False, 4)
    assert (job.scope, job.owner, job.slot, job.lora) == ("s", "o", 1, (0.5,))
    assert runner._jobs == {7: (job, masks)}
    runner._drop([7])
    assert (masks.closed, job.cancelled) == (1, True)
    # where a job cannot be made, all of its request are refused, and their masks closed
    error = ValueError("odd")

    def refuse(*args):
        raise error

    monkeypatch.setattr(process, "sampler_of", refuse)
    runner._take(Kind.JOBS, record, deque([9]))
    ((refused, found),) = runner._worker.refused
    assert found is error
    assert [job.prompt for job in refused] == [[]]
    assert (masks.closed, runner._jobs) == (2, {})
    refused[0].emit(Started(0))
    assert runner._events[-1][0] == 7


def test_a_mask_without_a_descriptor_is_refused():
    with pytest.raises(ApiError, match="too many open files"):
        process._masks(None)


def test_a_runner_ends_with_its_socket(runner):
    ours, theirs = socket.socketpair()
    runner._channel = ours
    taken = []
    runner._take = lambda kind, data, sockets: taken.append((kind, data, list(sockets)))
    with ours:
        theirs.sendall(process.frame(Kind.DROP, b"[1]") + process.frame(Kind.DROP, b"[2]"))
        theirs.close()
        runner.run()
    assert taken == [(Kind.DROP, b"[1]", []), (Kind.DROP, b"[2]", [])]
    assert runner._worker.ends == ["stop", 0.1]
