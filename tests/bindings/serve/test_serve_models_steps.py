"""Which model is loaded, granted and unloaded next, what the router says of them, who is ended."""

import asyncio
import json
import math
import subprocess
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from tamis.bindings.serve import jobs, models, supervisor
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http import router
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.models import Models, Offer, Running, _Request
from tamis.bindings.serve.supervisor import Loaded, LoadError
from tamis.bindings.serve.wire import Frames, Kind, frame

NOW = 1000.0


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """The time of the monotonic clock."""
    clock = SimpleNamespace(monotonic=lambda: NOW)
    for module in (models, router):
        monkeypatch.setattr(module, "time", clock)


def offer(name, n_byte=10):
    return Offer(name, f"/models/{name}", n_byte, 0.0)


def running(name, *, served=True, **more):
    state = {"failed": False, "n_running": 1, "n_waiting": 2, "counts": jobs.Counts(jobs=3)}
    loaded = Loaded(64, 8, 9, 128, 2, 77, "cpu")
    worker = SimpleNamespace(**state, loaded=loaded, stopped=0)
    worker.stop = lambda: setattr(worker, "stopped", worker.stopped + 1)
    app = SimpleNamespace(stop=worker.stop) if served else None
    return Running(offer(name), worker, more.pop("keep", 60.0), app, **more)


def those(*ones, n_byte=None, n_queue=8, **how):
    """Models of which some run; what would be unloaded, loaded or timed is noted."""
    made = Models(None, keep=60, n_byte=n_byte, n_queue=n_queue, log=lambda line: None, **how)
    made._running = {one.offer.name: one for one in ones}
    made.left, made.loads = [], []

    def leave(one, why):
        one.leaving = True
        made.left.append((one.offer.name, why))

    async def load(wanted):
        made.loads.append(wanted.name)

    made._leave, made._load, made._set_timer = leave, load, lambda: None
    return made


class Found:
    """Stands in for a future."""

    def __init__(self, *, done=False):
        self.results, self._done = [], done

    def done(self):
        return self._done

    def set_result(self, one):
        self.results.append(one)

    set_exception = set_result


def request(name, since=NOW, **how):
    return _Request(offer(name), Found(**how), since)


# --- what there is --------------------------------------------------------------------------------


def test_the_models_that_run_those_in_use_first_and_then_the_last_used():
    used, late, early = (
        running(name, users=n, used=at) for name, n, at in (("u", 1, 1), ("l", 0, 9), ("e", 0, 5))
    )
    made = those(early, used, late, running("n", served=False), running("g", leaving=True))
    assert made.running == [used, late, early]
    assert made.paths == [f"/models/{name}" for name in "eulng"]
    assert (made.n_running, made.n_waiting, made.counts.jobs) == (5, 10, 15)
    made._requests = [request("x")]
    made._past = jobs.Counts(jobs=7)
    assert (made.n_waiting, made.counts.jobs) == (11, 22)
    states = {name: made.state(name) for name in "ungxy"}
    assert states == {
        "u": "loaded",
        "n": "loading",
        "g": "unloaded",
        "x": "loading",
        "y": "unloaded",
    }


@pytest.mark.parametrize(
    ("n_queue", "n_request", "full"), [(2, 0, True), (3, 0, False), (3, 2, False), (3, 3, True)]
)
def test_a_queue_is_full_where_a_models_or_that_for_models_is(n_queue, n_request, full):
    made = those(running("a"), n_queue=n_queue)
    made._requests = [request("x") for _ in range(n_request)]
    assert made.full is full
    assert those().full is False


def test_how_long_a_model_stays():
    assert running("a", used=5.0, keep=7.0).until == 12.0
    assert running("a", used=5.0, keep=math.inf).until == math.inf
    assert running("a", used=5.0, keep=7.0, users=1).until == math.inf


def test_a_model_that_was_loaded_before_is_taken_over():
    made = those()
    worker = SimpleNamespace(loaded=Loaded(64, 8, 9, 128, 2, 77, "cpu"))
    made.adopt(offer("a"), worker, "served")
    one = made._running["a"]
    assert (one.n_byte, one.used, one.keep, one.served, one.users) == (77, NOW, 60, "served", 0)


# --- the next step --------------------------------------------------------------------------------


def test_who_waits_for_a_loaded_model_has_it_unless_another_waited_long():
    for since, granted in ((NOW - 5, True), (NOW - 5.01, False)):
        one = running("a")
        made = those(one)
        first, second = request("b", since), request("a")
        made._requests = [first, second]
        made._grant()
        assert (second.found.results == [one], one.users) == (granted, int(granted))
        assert made._requests == ([first] if granted else [first, second])
    made._loading = "another"
    made._grant()
    assert second.found.results == [one], "the one that waits longest is being loaded"


def test_the_first_has_its_turn_and_then_the_next_counts_as_first():
    a, b = running("a"), running("b")
    made = those(a, b)
    made._requests = [request("a", NOW - 9), request("b", NOW - 9), request("a", done=True)]
    made._grant()
    assert (made._requests, a.users, b.users) == ([], 1, 1), "who is gone uses none"


def test_a_model_that_failed_leaves_once_nobody_uses_it():
    for users, left in ((0, [("a", "failed")]), (1, [])):
        one = running("a", users=users)
        one.worker.failed = True
        made = those(one)
        made._requests = [request("a")]
        made._grant()
        assert made.left == left
        assert len(made._requests) == (0 if users else 1)
    for state in ({"served": False}, {"leaving": True}):
        made = those(running("a", **state))
        made._requests = [request("a")]
        made._grant()
        assert len(made._requests) == 1


@pytest.mark.parametrize(
    ("ones", "how", "loads", "left"),
    [
        ([], {"n_byte": 5}, ["x"], []),
        ([("a", 0, 20, 9.0)], {}, ["x"], []),
        ([("a", 0, 20, 9.0)], {"n_byte": 30}, ["x"], []),
        ([("a", 0, 20, 9.0)], {"n_byte": 29}, [], [("a", "for x")]),
        ([("a", 1, 20, 9.0)], {"n_byte": 29}, [], []),
        ([("a", 0, 20, 9.0), ("b", 0, 20, 8.0)], {"n_byte": 49}, [], [("b", "for x")]),
        ([("a", 0, 20, 9.0), ("b", 1, 20, 8.0)], {"n_byte": 49}, [], [("a", "for x")]),
        ([("a", 0, 20, 9.0)], {"n_model": 1}, [], [("a", "for x")]),
        ([("a", 0, 20, 9.0)], {"n_model": 2}, ["x"], []),
        ([("x", 0, 20, 9.0)], {"n_model": 1}, [], []),
    ],
)  # fmt: skip
def test_a_model_is_loaded_where_it_fits_and_the_longest_unused_makes_room(ones, how, loads, left):
    async def work():
        found = [running(name, users=u, n_byte=n, used=at) for name, u, n, at in ones]
        made = those(*found, **how)
        made._make_room(offer("x"))
        await asyncio.sleep(0)
        assert (made.loads, made.left) == (loads, left)

    asyncio.run(work())


def test_what_is_known_of_a_models_memory_goes_before_the_size_of_its_file():
    async def work():
        made = those(running("a", n_byte=20), n_byte=30)
        made._sizes["x"] = 11
        made._make_room(offer("x"))
        assert (made._loading, made.left) == (None, [("a", "for x")])
        tight = those(running("a"))
        tight._tight.add("x")
        tight._make_room(offer("x"))
        assert (tight._loading, tight.left) == (None, [("a", "for x")])

    asyncio.run(work())


def test_models_leave_at_the_end_of_their_time_and_one_at_a_time_makes_room():
    ends = [("a", 0, NOW - 60), ("b", 0, NOW - 59.9), ("c", 1, 0.0)]
    made = those(*(running(name, users=n, used=at) for name, n, at in ends))
    room = []
    made._make_room = room.append
    made._turn()
    assert (made.left, room) == ([("a", "unused")], [])
    made._requests = [request("x"), request("y")]
    made._turn()
    assert room == [offer("x")]
    for name, value in (("_loading", "one"), ("_leaving", {"one"}), ("_stopping", True)):
        busy = those()
        busy._make_room, busy._requests = room.append, [request("x")]
        setattr(busy, name, value)
        busy._turn()
    assert len(room) == 1
    one = made._running["c"]
    made.give_back(one)
    assert (one.users, one.used) == (0, NOW)


def test_models_that_turn_out_too_large_together_leave_the_longest_unused_first():
    ones = [
        running("a", n_byte=20, used=3.0), running("b", n_byte=20, used=1.0),
        running("c", n_byte=20, users=1), running("d", n_byte=99, leaving=True),
    ]  # fmt: skip
    for n_byte, left in ((60, []), (59, ["b"]), (40, ["b"]), (39, ["b", "a"]), (None, [])):
        made = those(*ones, n_byte=n_byte)
        for one in ones[:3]:
            one.leaving = False
        made._shrink()
        assert [name for name, _ in made.left] == left
        assert {why for _, why in made.left} <= {"for others"}


@pytest.mark.parametrize(("n_byte", "left"), [(45, []), (44, [("a", "for others")])])
def test_what_a_model_takes_is_known_once_it_is_loaded_and_then_others_leave(n_byte, left):
    made = those(running("a", n_byte=20, used=NOW - 1), n_byte=n_byte)
    mine, gone, other = request("x"), request("x", done=True), request("y")
    made._requests, made._tight = [mine, gone, other], {"x"}
    made._turn = lambda: None

    async def loaded(wanted):
        made._running[wanted.name] = one
        return one

    one = running("x", n_byte=25)
    made._loaded = loaded
    asyncio.run(Models._load(made, offer("x")))
    assert made.left == left
    assert (made._sizes["x"], made._tight, made._loading) == (25, set(), None)
    assert (made._requests, mine.found.results, gone.found.results) == ([other], [one], [])
    assert (one.users, one.used) == (1, NOW)


def test_a_load_that_fails_for_memory_waits_and_any_other_is_an_error():
    error = LoadError("why")
    for memory, others, told in ((True, True, False), (True, False, True), (False, True, True)):
        error.memory = memory
        made = those(*([running("a")] if others else []))
        mine, gone, other = request("x"), request("x", done=True), request("y")
        made._requests = [mine, gone, other]
        made._failed(offer("x"), error)
        assert made._tight == (set() if told else {"x"})
        assert made._requests == ([other] if told else [mine, gone, other])
        assert [e.code for e in mine.found.results] == ["not_loaded"] * told
        assert gone.found.results == []


def test_the_timer_is_of_the_next_model_to_leave():
    async def work():
        delays = []
        loop = asyncio.get_running_loop()
        handle = SimpleNamespace(cancel=lambda: delays.append("cancelled"))
        loop.call_later = lambda delay, work: (delays.append(delay), handle)[1]
        ends = [("a", 60.0, NOW - 10), ("b", 60.0, NOW - 20), ("c", math.inf, 0.0)]
        made = those(*(running(name, keep=keep, used=at) for name, keep, at in ends))
        Models._set_timer(made)
        made._running["b"].leaving = True
        Models._set_timer(made)
        made._running = {"x": running("x", used=NOW - 99)}
        Models._set_timer(made)
        made._running = {"c": running("c", keep=math.inf)}
        Models._set_timer(made)
        assert delays == [40.0, "cancelled", 50.0, "cancelled", 0.0, "cancelled"]
        assert made._timer is None

    asyncio.run(work())


def test_requests_for_models_have_a_queue_and_all_fail_at_the_end():
    made = those(running("a"), running("n", served=False), n_queue=1)
    waiting, gone = request("x"), request("x", done=True)
    made._requests = [waiting]
    with pytest.raises(ApiError) as refused:
        made._wait(offer("x"))
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    made._requests.append(gone)
    made.stop()
    assert (made.stopped, made._requests) == (True, [])
    assert [error.code for error in waiting.found.results] == ["stopping"]
    assert gone.found.results == []
    assert [one.worker.stopped for one in made._running.values()] == [2, 1]
    with pytest.raises(ApiError) as refused:
        made._wait(offer("x"))
    assert refused.value.code == "stopping"


def test_only_a_loaded_model_can_be_unloaded():
    gone = running("g", leaving=True, used=NOW)
    made = those(running("a"), running("n", served=False), gone)
    assert [made.unload(name) for name in "angx"] == [True, False, False, False]
    assert made._running["a"].keep == 0
    assert made.left == [("a", "unused")]


def test_the_error_of_an_unknown_model_has_the_names_that_are_known():
    error = models.unknown_model("x" * 200, [offer("a"), offer("b")])
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert error.message == f"there is no model {'x' * 100!r} here: a, b"
    assert models.unknown_model("y", []).message.endswith("here: none")


# --- the router -----------------------------------------------------------------------------------


def routing(made, offers=(), only=None):
    found = router.Router.__new__(router.Router)
    found.models, found._only, found._settings = made, only, Settings()

    async def all_of_them():
        return list(offers)

    made.offers, made.sees = all_of_them, lambda offer: offer.name == "b"
    return found


def test_what_a_list_says_of_a_model():
    made = those(running("a"), n_model=None)
    found = routing(made, [offer("a"), offer("b")])
    asked = SimpleNamespace(query_params={})
    data = json.loads(asyncio.run(found.listed(asked)).body)["data"]
    for name, entry in zip("ab", data, strict=True):
        state = "loaded" if name == "a" else "unloaded"
        assert entry == {
            "id": name, "object": "model", "created": 0, "owned_by": "tamis", "type": "model",
            "display_name": name, "created_at": "1970-01-01T00:00:00+00:00",
            "aliases": [], "tags": [],
            "architecture": {
                "input_modalities": ["text", "image"] if name == "b" else ["text"],
                "output_modalities": ["text"],
            },
            "meta": {"n_bytes": 10, "loaded": name == "a"}, "status": {"value": state},
        }  # fmt: skip
    one = asyncio.run(found.one(SimpleNamespace(path_params={"name": "a"})))
    assert json.loads(one.body) == data[0]
    asked = SimpleNamespace(scope={"query_string": b""})
    assert json.loads(asyncio.run(found.props(asked)).body) == {
        "role": "router", "max_instances": 0, "models_autoload": True,
        "build_info": f"b{router.__version__}",
    }  # fmt: skip
    assert router._asks_for_model({"query_string": b"model=a"})
    assert not router._asks_for_model({"query_string": b"autoload=a"})


@pytest.mark.parametrize(
    ("ones", "names", "asked", "found"),
    [
        ([], "a", None, "a"), ([], "ab", None, None), ([], "", None, None), ([], "ab", "b", "b"),
        ([], "ab", "c", None), (["b"], "ab", None, "b"), (["b"], "ab", "a", "a"),
    ],
)  # fmt: skip
def test_a_request_without_a_model_has_the_one_in_use_or_the_only_one(ones, names, asked, found):
    made = routing(those(*map(running, ones)), [offer(name) for name in names])
    if found is not None:
        assert asyncio.run(made._offer(asked)).name == found
        return
    with pytest.raises(ApiError) as refused:
        asyncio.run(made._offer(asked))
    assert (refused.value.status, refused.value.param) == (400 if asked is None else 404, "model")
    assert (", ".join(names) or "none") in refused.value.message


@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        ({"used": NOW - 10}, 50),
        ({"used": NOW - 90}, 0),
        ({"users": 1}, 60),
        ({"keep": math.inf}, None),
    ],
)
def test_what_is_shown_of_a_model_that_runs(how, seconds):
    one = running("a", **how)
    found = router._record(one)
    left = datetime.fromisoformat(found.pop("expires_at")) - datetime.now(UTC)
    expected = timedelta(days=36500) if seconds is None else timedelta(seconds=seconds)
    assert abs(left - expected) < timedelta(seconds=5)
    assert found == {
        "size": 77, "size_vram": 0, "context_length": 64, "device": "cpu",
        "requests": how.get("users", 0), "for_ever": seconds is None,
    }  # fmt: skip
    one.worker.loaded = one.worker.loaded._replace(device="cuda")
    assert router._record(one)["size_vram"] == 77


# --- the supervisor -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "why", "killed"),
    [
        ([0], "has ended with status 0", False),
        ([3], "has ended with status 3", False),
        ([-11], "was ended by signal 11 (SIGSEGV)", False),
        ([-9], "was ended by signal 9 (SIGKILL, perhaps for want of memory)", False),
        ([None, -15], "was ended by signal 15 (SIGTERM)", True),
    ],
)
def test_how_a_process_has_ended(codes, why, killed):
    left, notes = list(codes), []

    def wait(seconds=None):
        notes.append(seconds)
        code = left.pop(0)
        if code is None:
            raise subprocess.TimeoutExpired("x", seconds)
        return code

    made = supervisor.ModelProcess.__new__(supervisor.ModelProcess)
    made.channel = SimpleNamespace(close=lambda: notes.append("closed"))
    made._process = SimpleNamespace(wait=wait, kill=lambda: notes.append("killed"))
    assert made.end() == why
    rest = ["killed", None] if killed else []
    assert notes == ["closed", supervisor.END_SECONDS, *rest]


def supervising(**more):
    made = supervisor.Supervisor.__new__(supervisor.Supervisor)
    made._entries, made._idle_seconds = {}, 60.0
    made._stopping, made._busy = False, 0.0
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_process_sleeps_after_its_time_without_jobs(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: NOW)
    monkeypatch.setattr(supervisor, "time", clock)
    for busy, idle in ((NOW - 60, False), (NOW - 60.1, True)):
        assert supervising(_busy=busy)._is_idle() is idle
        assert supervising(_busy=busy, _stopping=True)._is_idle() is False
    made = supervising(_entries={1: "job"})
    assert (made._is_idle(), made._busy) == (False, NOW)


def test_running_and_waiting_jobs_and_whether_there_is_a_model():
    entries = [SimpleNamespace(started=started) for started in (True, False, False)]
    made = supervising(_entries=dict(enumerate(entries)))
    assert (made.n_running, made.n_waiting) == (1, 2)
    for writer, asleep, ready in ((None, False, False), (None, True, True), ("w", False, True)):
        made._writer, made._asleep = writer, asleep
        assert (made.ready, made.asleep) == (ready, asleep)
    made._own, made._before, made._now = (jobs.Counts(jobs=n) for n in (1, 2, 4))
    assert made.counts.jobs == 7


def test_a_load_is_followed_to_its_end():
    loaded = Loaded(64, 8, 9, 128, 2, 77, "cpu")
    parts = [(Kind.PROGRESS, ["weights", 1, 2]), (Kind.LOADED, loaded)]
    sent = [frame(kind, json.dumps(record).encode()) for kind, record in parts]
    seen = []

    class Lock:
        def __enter__(self):
            return self

        def __exit__(self, *why):
            return None

    def following(*data):
        left = [*data, b""]
        channel = SimpleNamespace(recv=lambda n: left.pop(0))
        made = supervising(_changed=Lock(), _progress=lambda *args: seen.append(args))
        made.loaded = None
        return made, made._load(SimpleNamespace(channel=channel), Frames())

    made, found = following(*sent)
    assert (found, made.loaded, seen) == (True, loaded, [("weights", 1, 2)])
    assert following(sent[0])[1] is False
    for memory in (True, False):
        told = frame(Kind.FAILED, json.dumps(["why", "where", memory]).encode())
        with pytest.raises(LoadError, match="why") as failed:
            following(told)
        assert (failed.value.memory, failed.value.__notes__) == (memory, ["where"])
