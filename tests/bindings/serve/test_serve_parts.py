"""Parts of the server that need no model: mailboxes, plans of memory, lines of errors, lists."""

import asyncio
import json
import math
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from tamis.bindings.serve import process
from tamis.bindings.serve.http.json_reply import JsonReply, told
from tamis.bindings.serve.http.router import _record
from tamis.bindings.serve.json_text import PART, in_parts
from tamis.bindings.serve.models import Offer, Running
from tamis.bindings.serve.offline import Answers
from tamis.bindings.serve.replies import Mailbox
from tamis.bindings.serve.room import CACHE_SHARE, GIB, Room, Slots
from tamis.bindings.serve.wire import LARGEST, Broken, Frames, Kind, frame
from tamis.engine.memory_plan import MemoryPlan

# --- from threads to the loop ---------------------------------------------------------------------


def test_a_mailbox_wakes_the_loop_once_for_all_there_are():
    async def run():
        queue, mailbox, calls = asyncio.Queue(), Mailbox(), []
        loop = SimpleNamespace(call_soon_threadsafe=calls.append)
        for i in range(3):
            mailbox.post(loop, queue, (i, "event"))
        assert len(calls) == 1
        calls.pop()()
        assert [queue.get_nowait() for _ in range(3)] == [(i, "event") for i in range(3)]
        mailbox.post(loop, queue, (3, "event"))
        assert len(calls) == 1
        calls.pop()()
        assert queue.get_nowait() == (3, "event")

    asyncio.run(run())


def test_a_mailbox_of_a_loop_that_has_ended_loses_what_it_has():
    tried = []

    def gone(deliver):
        tried.append(deliver)
        raise RuntimeError("the loop is closed")

    Mailbox().post(SimpleNamespace(call_soon_threadsafe=gone), None, (0, "event"))
    assert len(tried) == 1


# --- memory ---------------------------------------------------------------------------------------


def plan(weights=8, kv=3, workspace=1, available=100, disk=0, host=0):
    return MemoryPlan(
        weights * GIB, kv * GIB, workspace * GIB, available * GIB, disk * GIB, host * GIB
    )


def test_slots_take_their_caches_and_drafts_their_weights_too():
    slots = Slots(3, 512, {"cpu": plan(disk=2), "gpu": plan(host=5, disk=1)})
    assert slots.bytes_on("cpu") == 12 * GIB
    assert slots.bytes_on("none") == 0
    assert slots._replace(loaded=False).bytes_on("cpu") == 20 * GIB
    assert slots.in_ram == 15 * GIB
    assert slots.on_disk == 9 * GIB
    assert (GIB, CACHE_SHARE) == (1 << 30, 4)


@pytest.mark.parametrize(
    ("n", "room", "n_cache", "left"),
    [
        (2, Room(("cpu", 8 * GIB)), 0, 0),
        (2, Room(("cpu", 9 * GIB)), GIB, 0),
        (2, Room(("cpu", 10 * GIB)), GIB, GIB),
        (2, Room(("cpu", 8 * GIB - 1)), 0, "2 contexts of 512 tokens take 8.0 GiB, free: 8.0 GiB"),
        (2, Room(("cpu", 8 * GIB)), 1, "with a prompt cache of 0.0 GiB take 8.0 GiB"),
        (1, Room(("cpu", 2 * GIB)), 0, "take 4.0 GiB, free: 2.0 GiB; lower --ctx or --parallel"),
        (1, Room(("cpu", 2 * GIB)), GIB, "free: 2.0 GiB; lower --ctx, --cache-ram or --parallel"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sizes(n, room, n_cache, left):
    slots = [Slots(n, 512, {"cpu": plan()})]
    if isinstance(left, int):
        assert room.left(slots, n_cache) == left
    else:
        with pytest.raises(MemoryError) as error:
            room.left(slots, n_cache)
        assert left in str(error.value)


def test_other_devices_and_the_disk_have_limits_of_their_own():
    slots = Slots(1, 512, {"cpu": plan(disk=3), "gpu": plan(available=4, host=2)})
    room = Room(("cpu", 50 * GIB), 3 * GIB)
    assert room.left([slots]) == 44 * GIB
    with pytest.raises(MemoryError, match=r"take 3.0 GiB in --kv-dir, free: 3.0 GiB"):
        room._replace(disk=3 * GIB - 1).left([slots])
    with pytest.raises(MemoryError, match=r"take 8.0 GiB of gpu, free: 4.0 GiB"):
        room.left([slots, Slots(1, 512, {"gpu": plan()})])
    assert room._replace(disk=None).left([slots]) == 44 * GIB


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file", "/x"), "/x: No such file"),
        (OSError("what"), "what"),
        (OSError(2, "No such file"), "[Errno 2] No such file"),
        (MemoryError("too much"), "too much"),
        (MemoryError(), "out of memory: lower --ctx or take a smaller model"),
        (ValueError("wrong"), "wrong"),
        (ValueError(), "ValueError"),
        (RuntimeError("r"), "r"),
        (ImportError("i"), "i"),
        (KeyError("k"), "KeyError: 'k' (a bug of tamis)"),
    ],
)
def test_an_error_of_loading_is_one_line(error, line):
    assert process._line(error) == line


def test_names_in_headers_are_printable_ascii():
    assert told(["a\nb\u2028c", "é", "x\x7f"])["x-tamis-ignored"] == (
        "a\\nb\\u2028c, \\xe9, x\\x7f"
    )
    assert told([]) == {}


def test_replies_have_null_for_no_number_and_a_mark_for_no_text():
    assert JsonReply({"a": math.nan, "b": ["\ud800", math.inf, 1]}).body == (
        '{"a":null,"b":["\ufffd",null,1]}'.encode()
    )
    assert JsonReply({"a": 1}).media_type == "application/json"


@pytest.mark.parametrize(
    "value",
    [
        {}, [], (), "é", 1.5, None, {"a": {"b": [1, {"c": []}]}}, {1: 2},
        [math.nan, [math.inf]], ["\ud800"], list(range(PART)), list(range(PART + 1)),
        [[i] for i in range(5)], {str(i): i for i in range(PART + 1)},
        {str(i): i for i in range(PART)}, (1, (2, 3)), [{"a": [1]}, 5],
    ],
)  # fmt: skip
def test_json_in_parts_is_json_in_one(value):
    def plain(value):
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return "\ufffd" if value == "\ud800" else value

    wanted = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"))
    assert in_parts(value).decode() == wanted


def test_a_model_in_use_is_kept_and_one_for_ever_for_a_hundred_years():
    loaded = SimpleNamespace(n_byte=7, device="cpu", n_ctx=512)
    one = Running(Offer("m", "/m", 1, 0.0), SimpleNamespace(loaded=loaded), math.inf)
    now = datetime.now(UTC)

    def left():
        return datetime.fromisoformat(_record(one)["expires_at"]) - now

    year = timedelta(days=365)
    assert 99.9 * year < left() < 100.1 * year
    assert left() // timedelta(days=1) == 36500
    assert _record(one)["for_ever"]
    one.keep, one.users = 60.0, 1
    assert timedelta(seconds=59) < left() < timedelta(seconds=90)
    assert (_record(one)["size"], _record(one)["size_vram"], _record(one)["requests"]) == (7, 0, 1)
    one.users, one.used = 0, -1e9  # long ago
    assert left() < timedelta(seconds=30)


# --- frames ---------------------------------------------------------------------------------------


def test_frames_are_whole_however_they_come():
    data = frame(Kind.MASK, b"") + frame(Kind.JOBS, b"abc") + frame(Kind.DROP, bytes(1000))
    for step in (1, 3, len(data)):
        frames, found = Frames(), []
        for i in range(0, len(data), step):
            frames.feed(data[i : i + step])
            while (each := frames.next()) is not None:
                found.append(each)
        assert found == [(Kind.MASK, b""), (Kind.JOBS, b"abc"), (Kind.DROP, bytes(1000))]


@pytest.mark.parametrize(
    "data", [b"\xff\0\0\0\0", b"\0\0\0\0\0", b"\x04" + (LARGEST + 1).to_bytes(4, "little")]
)
def test_bytes_that_are_no_frame_are_refused(data):
    frames = Frames()
    frames.feed(data)
    with pytest.raises(Broken):
        frames.next()
    frames = Frames()
    frames.feed(b"\x04" + LARGEST.to_bytes(4, "little"))
    assert frames.next() is None


# --- batches --------------------------------------------------------------------------------------


def test_answers_that_failed_are_dropped_and_no_longer_counted(tmp_path):
    path = tmp_path / "out"
    good = {
        "id": "1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "x", "body": {}},
    }
    bad = good | {"custom_id": "b", "response": {"status_code": 500, "request_id": "x", "body": {}}}
    lines = [json.dumps(each | {"error": None}) for each in (good, bad)]
    path.write_text("\n".join(lines) + "\n")
    with closing(Answers(path)) as answers:
        assert (len(answers.finished), answers.n_failed) == (2, 1)
    with closing(Answers(path, retry_failed=True)) as answers:
        assert (len(answers.finished), answers.n_failed) == (1, 0)
    assert path.read_text() == lines[0] + "\n"
