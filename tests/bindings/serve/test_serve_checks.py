"""What a request's fields, a helper's process and connections may be: both sides of each limit."""

import asyncio
import errno
import fcntl
import json
import math
import os
import signal
import socket
import threading
import time
import urllib.request
from types import SimpleNamespace

import h11
import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.server import ServerState

from tamis.bindings.serve import helpers
from tamis.bindings.serve.api import document
from tamis.bindings.serve.body import (
    SMALL,
    Body,
    loads,
    parse,
    seconds_of,
    shown,
    small_fields,
    writable,
)
from tamis.bindings.serve.errors import ApiError, costly
from tamis.bindings.serve.http import app, helper, listen
from tamis.bindings.serve.http.app import Settings, received
from tamis.bindings.serve.wire import CHOICE, TOKEN, Config, Frames, Kind, frame
from tamis.sampling.base import SamplerError


def refused(work, *given, **named):
    """The error that a call raises."""
    with pytest.raises(ApiError) as found:
        work(*given, **named)
    return found.value


# --- bodies and their fields ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[1]", "no JSON object"),
        (b"5", "no JSON object"),
        (b"{", "no JSON: "),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": "\xff"}', "no JSON: "),
        (b"", "no JSON: "),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_a_body_that_is_no_object_is_refused(data, words):
    error = refused(parse, data)
    assert (error.status, error.code) == (400, "invalid_json")
    assert words in error.message


def test_a_body_is_utf8_with_or_without_its_mark():
    for mark in (b"", b"\xef\xbb\xbf"):
        assert parse(mark + '{"a": "é"}'.encode()).fields == {"a": "é"}


def test_a_body_of_few_fields_has_a_limit():
    text = b'{"a": "%s"}'
    fits = text % (b"a" * (SMALL - len(text) + 2))
    assert len(fits) == SMALL == 16384
    assert small_fields(fits).text("a")
    error = refused(small_fields, fits + b" ")
    assert (error.status, error.code) == (413, "body_too_large")


def test_half_a_surrogate_pair_is_written_as_what_stands_for_nothing():
    assert loads(rb'{"\ud800": ["\udfff", {"a": "\ud83d\ude00"}, 5]}') == {
        "\ufffd": ["\ufffd", {"a": "😀"}, 5]
    }
    assert loads(rb'"\uD8AB"') == loads(rb'"\udCab"') == "\ufffd"
    same = {"a": ["é\ue000\ud7ff", 1.5, None, True]}
    assert writable(same) == same
    assert writable("\ud800\udfff") == "\ufffd\ufffd"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (5, 5), (0, 0), (0.5, 0.5), ("5", 5), (" 5 ", 5), ("5m", 300), ("1h30m", 5400), ("2s", 2),
        ("1.5h", 5400), ("+5m", 300), ("3ms", 0.003), ("4us", 4e-6), ("4µs", 4e-6), ("7ns", 7e-9),
        (".5s", 0.5), ("5.s", 5), ("1s2s", 3), (-1, math.inf), ("-1", math.inf),
        ("-5m", math.inf), (1e9, 1e9), (1.1e9, math.inf), ("inf", math.inf), ("0s", 0),
        ("1" * 100, math.inf), ("-0.1s", math.inf), ("1e3", 1000),
    ],
)  # fmt: skip
def test_how_long_a_model_is_kept(value, seconds):
    assert seconds_of(value) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, [5], {}, "", "m", "5x", "--5m", "+-5m", "5m ago", "m5", "5m5", "nan",
        float("nan"), "1" * 101, "٣m", "5 m", ".", ".s", "5m\n5m",
    ],
)  # fmt: skip
def test_what_is_no_time_to_keep_a_model(value):
    with pytest.raises(ValueError, match=r"keep_alive (is|has) .*, expected seconds"):
        seconds_of(value)


@pytest.mark.parametrize(
    ("value", "words"), [(True, "true"), (None, "null"), ({"a": 1}, "an object")]
)
def test_what_is_no_time_is_named_as_it_was_sent(value, words):
    with pytest.raises(ValueError, match=f"keep_alive is {words}, "):
        seconds_of(value)


READS = {
    "flag": (Body.flag, [(True, True), (False, False), (None, False)], [0, 1, "true", [], {}]),
    "switch": (Body.switch, [(True, True), (False, False), (None, None)], [0, 1, "true", []]),
    "text": (Body.text, [("", ""), ("a", "a"), (None, None)], [0, True, [], {}]),
    "record": (Body.record, [({}, {}), ({"a": 1}, {"a": 1}), (None, None)], [0, "a", [], True]),
    "number": (
        lambda body, name: body.number(name, 7.5, 0, 2),
        [(0, 0.0), (2, 2.0), (1.5, 1.5), (None, 7.5)],
        [-0.001, 2.001, True, False, "1", [1], float("nan")],
    ),
    "integer": (
        lambda body, name: body.integer(name, -1, 9),
        [(-1, -1), (9, 9), (0, 0), (3.0, 3), (None, None)],
        [-2, 10, 1.5, True, False, "1", [1], 1e300],
    ),
    "records": (
        lambda body, name: body.records(name, 2),
        [([], []), ([{}, {"a": 1}], [{}, {"a": 1}]), (None, [])],
        [[{}, {}, {}], [{}, 5], {}, "a", 0, False],
    ),
    "texts": (
        lambda body, name: body.texts(name, 2, 3),
        [([], ()), ("abc", ("abc",)), (["a", "abc"], ("a", "abc")), (None, ())],
        ["", "abcd", ["a", "b", "c"], ["abcd"], [""], ["a", 5], {"a": 1}, 5, True],
    ),
}


@pytest.mark.parametrize("name", READS)
def test_a_field_is_what_it_is_read_as(name):
    read, right, wrong = READS[name]
    for value, found in right:
        got = read(Body({"x": value}), "x")
        assert got == found
        assert type(got) is type(found)
        if value is None:
            assert read(Body({}), "x") == found
    for value in wrong:
        error = refused(read, Body({"x": value}), "x")
        assert (error.status, error.code, error.param) == (400, "invalid_value", "x")
        assert error.message.startswith("x ")


def test_what_nothing_has_asked_for_is_known():
    body = Body({"a": 1, "b": None, "c": False, "d": []})
    body.get("a")
    assert body.unread() == ["c", "d"]
    assert [shown(v) for v in ("x", [1], {"a": 1}, 5, True, 1.5)] == [
        "a string", "a list", "an object", "5", "true", "1.5",
    ]  # fmt: skip


@pytest.mark.parametrize("data", [None, "a", "====", "YQ==\n", "é", 5])
def test_a_files_bytes_are_base64(data):
    error = refused(document.read, None, Body({"name": "a.txt", "data": data}))
    assert (error.status, error.param) == (400, "data")


def test_a_file_without_a_name_and_a_file_that_is_none():
    assert document.read(None, Body({"data": "YQ=="})) == {"text": "a", "kind": "text"}
    error = refused(document.read, None, Body({"name": "a.txt", "data": "AAEC"}))
    assert (error.status, error.param) == (400, "data")
    # Of a long name the last 200 characters are looked at.
    error = refused(document.read, None, Body({"name": "b" * 200 + "a" * 200, "data": "AAEC"}))
    assert "a" * 200 in error.message
    assert "ba" not in error.message


def body_of(path, parts, settings):
    """What is received of a request whose body comes in these parts."""
    left = list(parts)

    async def receive():
        part = left.pop(0)
        if part is None:
            return {"type": "http.disconnect"}
        if isinstance(part, float):
            await asyncio.sleep(part)
            part = b""
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    return asyncio.run(received(Request(scope, receive), settings))


def test_a_body_has_a_limit_of_bytes():
    settings = Settings(max_body=10)
    assert body_of("/v1/x", [b"a" * 4, b"b" * 6], settings) == b"aaaabbbbbb"
    for parts in ([b"a" * 11], [b"a" * 10, b"b"], [b"a" * 6, b"b" * 6, None]):
        error = refused(body_of, "/v1/x", parts, settings)
        assert (error.status, error.code) == (413, "body_too_large")
        assert "above 10 bytes" in error.message


def test_a_document_has_a_limit_of_its_own(monkeypatch):
    assert document.MOST_BYTES == 33_554_432
    monkeypatch.setattr(document, "MOST_BYTES", 20)
    assert len(body_of(app.EXTRACT, [bytes(20)], Settings(max_body=10))) == 20
    assert refused(body_of, app.EXTRACT, [bytes(20), b"x"], Settings(max_body=10)).status == 413
    assert len(body_of(app.EXTRACT, [bytes(25)], Settings(max_body=25))) == 25
    assert refused(body_of, "/v1/x", [bytes(11)], Settings(max_body=10)).status == 413


def test_a_body_has_a_limit_of_time_and_a_client_that_goes_is_gone():
    error = refused(body_of, "/v1/x", [b"a", 5.0, b"b"], Settings(timeout_request=0.05))
    assert (error.status, error.code) == (408, "timeout")
    assert refused(body_of, "/v1/x", [b"a", None], Settings()).status == 499
    assert issubclass(ClientDisconnect, Exception)


# --- the process of a request ---------------------------------------------------------------------


def test_a_requests_process_has_its_limits(monkeypatch):
    """All of them, as the process has them once it has set them."""
    set_, given = {}, []
    monkeypatch.setattr(helper, "limit", set_.__setitem__)
    monkeypatch.setattr(helper, "allow_cpu", given.append)
    monkeypatch.setattr(helper, "held_bytes", lambda: (1000, 7))
    helper._limit(Config("x", [], "m", 1, 1, seconds=20, n_byte=500))
    assert set_ == {
        "core": 0, "file": 0, "files": 16, "stack": 4 << 20, "memory": 1500, "cpu": 3600,
    }  # fmt: skip
    assert given == [20]
    assert (helper.KEPT_BYTES, helper.STEP_SECONDS) == (256 << 20, 5)


@pytest.mark.parametrize(
    ("error", "status", "code", "words"),
    [
        (SamplerError("a" * 3000), 400, "invalid_value", "a" * 2000),
        (ImportError("no extra"), 501, "unsupported", "no extra"),
        (MemoryError(), 400, "too_costly", "takes too much memory"),
        (RecursionError(), 400, "too_costly", "takes too much levels of nesting"),
        (KeyError("secret"), 500, "internal", "a bug of tamis: KeyError"),
        (ApiError(418, "tea", code="c"), 418, "c", "tea"),
    ],
)
def test_what_goes_wrong_there_is_reported_without_what_it_was_of(error, status, code, words):
    found = ApiError.unpacked(helper._told(error))
    assert (found.status, found.code) == (status, code)
    assert words in found.message
    assert "secret" not in found.message
    assert len(found.message) <= 2000


class Grammar:
    """Allows each token once."""

    def __init__(self, log):
        self.log, self.taken = log, []

    def mask(self):
        if len(self.taken) > 1:
            raise SamplerError("x" * 2000)
        return bytes([len(self.taken)])

    def accept(self, token):
        if token == 9:
            raise SamplerError("no such token")
        self.taken.append(token)


def frames_of(channel, n):
    found, frames = [], Frames()
    while len(found) < n:
        frames.feed(channel.recv(1 << 16))
        while (each := frames.next()) is not None:
            found.append((each[0], CHOICE.unpack_from(each[1])[0], each[1][CHOICE.size :]))
    return found


def test_masks_follow_each_choice_within_a_limit_of_time(monkeypatch):
    given = []
    monkeypatch.setattr(helper, "allow_cpu", given.append)
    ours, theirs = socket.socketpair()
    steps = [Grammar(given), Grammar(given)]
    ended = []

    def follow():
        with pytest.raises(ConnectionError):
            helper._follow(theirs, steps)
        ended.append(True)

    thread = threading.Thread(target=follow)
    thread.start()
    assert frames_of(ours, 2) == [(Kind.MASK, 0, b"\0"), (Kind.MASK, 1, b"\0")]
    for choice, token, kind, text in (
        (1, 5, Kind.MASK, b"\1"),
        (1, 9, Kind.REFUSED, b"no such token"),
        (0, 4, Kind.MASK, b"\1"),
        (1, 6, Kind.REFUSED, b"x" * 1000),
    ):
        ours.sendall(frame(Kind.TOKENS, TOKEN.pack(choice, token)))
        assert frames_of(ours, 1) == [(kind, choice, text)]
    ours.close()
    thread.join(10)
    theirs.close()
    assert ended
    assert [step.taken for step in steps] == [[4], [5, 6]]
    assert given == [helper.STEP_SECONDS] * 6


def child(result=None, compiled=None):
    ours, theirs = socket.socketpair()
    made = helper._Child(theirs, SimpleNamespace(unbounded=None, vocab=[]), None, compiled)
    return ours, theirs, made


def test_a_request_is_read_and_answered(monkeypatch):
    for name, result, kind in (
        ("count", {"n": 5}, Kind.RESULT),
        ("bad", KeyError("secret"), Kind.ERROR),
    ):
        ours, theirs, made = child()

        def read(got, reader, body, name=name, result=result):
            assert (got, body) == (name, b"a\nb")
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(helper, "read", read)
        ours.sendall(frame(Kind.REQUEST, name.encode() + b"\na\nb"))
        made.run()
        frames = Frames()
        frames.feed(ours.recv(1 << 16))
        found, data = frames.next()
        assert found is kind
        if kind is Kind.RESULT:
            assert json.loads(data) == result
        else:
            assert ApiError.unpacked(data).code == "internal"
        theirs.close()
        assert ours.recv(1) == b""
        ours.close()


class Compiled:
    text, left_out = "root ::= [a]", ("/x",)

    def compiled_here(self, grammars):
        return self


def test_a_grammar_that_takes_much_memory_is_refused(monkeypatch):
    spent, told = [], []
    most = helper.KEPT_BYTES
    for held, ok in ((most, True), (most + 1, False)):
        amounts = [(0, 100), (0, 100 + held)]
        monkeypatch.setattr(helper, "held_bytes", lambda amounts=amounts: amounts.pop(0))
        monkeypatch.setattr(helper, "lower_cpu", spent.append)
        monkeypatch.setattr(helper, "Grammar", lambda text, grammars: Grammar(None))
        ours, theirs, made = child(compiled=object())
        with ours, theirs:
            if ok:
                assert made._compile(Compiled(), 3) == ("/x",)
                assert len(made._copies(made._grammar)) == 3
                assert made._copies(made._grammar)[0] is not made._grammar
            else:
                error = refused(made._compile, Compiled(), 3)
                assert "more than 256 MiB" in error.message
            told.append(ours.recv(100))
    assert spent == [helper.GRAMMAR_SECONDS] * 2
    assert told == [frame(Kind.COMPILING, b"")] * 2


def test_a_grammar_is_followed_for_each_reader_until_nobody_does(monkeypatch):
    """A process of the model that takes another's place begins with the first masks."""
    ours, theirs, made = child()
    followed = []

    def follow(reader, steps):
        followed.append(len(steps))
        reader.sendall(b"masks")
        raise BrokenPipeError

    monkeypatch.setattr(helper, "_follow", follow)
    monkeypatch.setattr(made, "_result", lambda name, body: b"{}")
    made._grammar, made._n_choice = Grammar(None), 2
    ours.sendall(frame(Kind.REQUEST, b"x\n"))
    thread = threading.Thread(target=made.run)
    thread.start()
    assert ours.recv(100) == frame(Kind.RESULT, b"{}")
    for _ in range(2):
        mine, other = socket.socketpair()
        with mine, other:
            socket.send_fds(ours, [b"m"], [other.fileno()])
            other.close()
            assert mine.recv(10) == b"masks"
            assert mine.recv(10) == b""
    ours.close()
    thread.join(10)
    assert not thread.is_alive()
    theirs.close()
    assert followed == [2, 2]


@pytest.fixture
def nursery(monkeypatch):
    """The helper's process with forks that only wait, and the socket that orders it."""
    before, wakes = signal.getsignal(signal.SIGCHLD), signal.set_wakeup_fd(-1)
    ours, theirs = socket.socketpair()
    made = helper._Nursery(theirs, None, SimpleNamespace(unbounded=1, vocab=[]), None)
    end = {"code": 0}

    def become(channel):
        channel = socket.socket(fileno=os.dup2(channel.detach(), 3))
        os.closerange(4, 1024)  # the other ends of this test's
        if channel.recv(1) == b"c":  # a crash
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(made, "_become", become)
    monkeypatch.setattr(helper, "GrammarTokenizer", lambda *given: end.setdefault("made", given))
    thread = threading.Thread(target=made.run)
    yield SimpleNamespace(made=made, orders=ours, thread=thread, end=end)
    ours.close()
    if thread.ident:
        thread.join(10)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, before)
    theirs.close()
    for number in (made._ended, made._wake):
        os.close(number)


def ordered(nursery, what=b"p"):
    mine, theirs = socket.socketpair()
    mine.settimeout(20)
    with theirs:
        socket.send_fds(nursery.orders, [what], [theirs.fileno()])
    return mine


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def test_each_request_has_a_process_whose_end_is_reported(nursery):
    nursery.thread.start()
    with ordered(nursery) as one, ordered(nursery) as two, ordered(nursery, b"g") as three:
        until(lambda: len(nursery.made._children) == 3)
        pids = [pid for pid, _ in nursery.made._children.values()]
        one.send(b"x")
        assert one.recv(100) == frame(Kind.ENDED, b"\0")
        assert one.recv(100) == b""
        two.send(b"c")
        assert two.recv(100) == frame(Kind.ENDED, bytes([signal.SIGKILL]))
        three.close()  # nobody waits: it is killed
        until(lambda: not nursery.made._children)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    assert nursery.end["made"] == (1, 0)


def test_the_helper_ends_with_the_server_and_so_do_its_processes(nursery):
    nursery.thread.start()
    one = ordered(nursery)
    until(lambda: nursery.made._children)
    ((pid, channel),) = nursery.made._children.values()
    nursery.orders.close()
    nursery.thread.join(10)
    assert not nursery.thread.is_alive()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    channel.close()
    one.close()


def test_a_fork_leaves_what_is_others(monkeypatch):
    """Descriptors, the wakeup of signals and rights: all but its own socket, which is number 3."""
    ours, theirs = socket.socketpair()
    read, write = os.pipe()

    def run(self):
        seen["child"] = signal.getsignal(signal.SIGCHLD)
        os.write(3, json.dumps(seen | {"signal": signal.set_wakeup_fd(-1)}).encode())
        closed = 0
        for number in (write, read, 4):
            try:
                os.fstat(number)
            except OSError:
                closed += 1
        os.write(3, b"\n%d" % closed)

    seen = {}
    monkeypatch.setattr(helper._Child, "run", run)
    monkeypatch.setattr(helper, "drop_privileges", lambda: seen.__setitem__("dropped", True))
    monkeypatch.setattr(helper, "_limit", lambda config: seen.__setitem__("limits", config))
    made = SimpleNamespace(_config="mine", _text=None, _reader=None, _grammars=None)
    pid = os.fork()
    if not pid:
        try:
            os.set_blocking(write, False)
            signal.set_wakeup_fd(write)  # as the process that forks has it
            signal.signal(signal.SIGCHLD, lambda *_: None)
            channel = socket.socket(fileno=fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD, 20))
            os.dup2(write, 4)  # the first one after its own
            helper._Nursery._become(made, channel)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    theirs.close()
    text = b""
    while data := ours.recv(1000):
        text += data
    head, closed = text.split(b"\n")
    assert json.loads(head) == {
        "dropped": True, "limits": "mine", "signal": -1, "child": signal.SIG_DFL,
    }  # fmt: skip
    assert closed == b"3"
    for number in (read, write):
        os.close(number)
    ours.close()


# --- connections ----------------------------------------------------------------------------------


class Held:
    """A connection."""

    def __init__(self, idle=False, since=0.0):
        self.idle, self.since, self.transport, self.ended = idle, since, self, False

    def abort(self):
        self.ended = True


def gate(total=6, per_address=4, soft=10_000, log=None, monkeypatch=None):
    monkeypatch.setattr(listen, "most_open_files", lambda: soft)
    lines = [] if log is None else log
    return listen._Gate(listen.Connections(total=total, per_address=per_address), lines.append)


@pytest.mark.parametrize(
    ("soft", "most"),
    [(1024, 448), (128 + 2 * 512, 512), (128 + 2 * 512 - 1, 511), (10_000, 512), (100, 8), (0, 8)],
)
def test_descriptors_bound_connections(monkeypatch, soft, most):
    lines = []
    made = gate(512, 512, soft, lines, monkeypatch)
    assert made._total == most
    assert bool(lines) == (most < 512)
    for i in range(most):
        assert made.admits("a")
        made.add(Held(), "a")
        assert made._by_address["a"] == i + 1
    assert not made.admits("a")
    assert not made.admits("b")


def test_an_address_has_no_more_than_its_share(monkeypatch):
    made = gate(total=100, per_address=3, monkeypatch=monkeypatch)
    held = [Held() for _ in range(3)]
    for each in held:
        assert made.admits("a")
        made.add(each, "a")
    assert not made.admits("a")
    assert made.admits("b")
    made.add(Held(idle=True), "b")  # another's: it is not closed for a
    assert not made.admits("a")
    held[0].idle, held[0].since = True, 2.0
    held[1].idle, held[1].since = True, 1.0
    assert made.admits("a")
    assert [each.ended for each in held] == [False, True, False]  # the oldest
    made.add(Held(), "a")
    made.remove(held[2])
    made.remove(held[2])  # once only
    assert made.admits("a")
    for each in list(made._open):
        made.remove(each)
    assert not made._by_address


def test_a_full_house_loses_first_who_has_most(monkeypatch):
    made = gate(total=4, per_address=4, monkeypatch=monkeypatch)
    held = {"a": [Held(True, 5.0), Held(True, 6.0), Held()], "b": [Held(True, 1.0)]}
    for address, several in held.items():
        for each in several:
            made.add(each, address)
    assert made.admits("c")
    assert held["a"][0].ended
    assert not held["b"][0].ended
    made.add(Held(), "c")
    assert made.admits("c")
    assert held["a"][1].ended
    made.add(Held(), "c")
    assert made.admits("c")  # who has most has no idle one: another's
    assert held["b"][0].ended
    made.add(Held(), "c")
    assert not made.admits("d")


def test_descriptors_that_are_gone_are_logged_now_and_then(monkeypatch):
    lines, now = [], [0.0]
    made = gate(log=lines, monkeypatch=monkeypatch)
    monkeypatch.setattr(listen.time, "monotonic", lambda: now[0])
    idle = Held(idle=True)
    made.add(idle, "a")
    error = OSError(errno.EMFILE, "Too many")
    for when, n in ((0.0, 1), (59.9, 1), (60.0, 2), (119.9, 2), (120.0, 3)):
        now[0] = when
        made.exhausted(error)
        assert len(lines) == n
    assert "Too many" in lines[0]
    assert idle.ended
    made.say("x")
    assert lines[-1] == "x"


def chunks(n, size):
    parser = listen._Parser(h11.SERVER, listen.MOST_HEAD)
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    parser.receive_data(head + (b"%x\r\n" % size + b" " * size + b"\r\n") * n)
    found = 0
    while (event := parser.next_event()) is not h11.NEED_DATA:
        found += isinstance(event, h11.Data)
    return found


def test_chunks_are_free_up_to_their_number_and_then_by_their_bytes():
    assert chunks(1003, 1) == 1003  # 1003 bytes are 3 more
    with pytest.raises(h11.RemoteProtocolError, match="too small"):
        chunks(1004, 1)
    assert chunks(4000, 256) == 4000


@pytest.mark.parametrize(
    ("sent", "is_right"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 1003, True),
        (b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 1004, False),
        (b"X: " + b"a" * listen.MOST_HEAD, False),
    ],
)
def test_a_connection_holds_to_the_limits_of_chunks_and_heads(sent, is_right):
    """What the parser alone does is of no use unless a connection has it."""
    written = []

    async def app(scope, receive, send):
        await asyncio.Event().wait()

    async def run():
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        config.load()
        config.h11_max_incomplete_event_size = 1 << 30
        gate = listen._Gate(listen.Connections(), lambda line: None)
        made = listen._Connection(
            gate, "1.2.3.4", config=config, server_state=ServerState(), app_state={}
        )
        names = {"peername": ("1.2.3.4", 5), "sockname": ("1.2.3.4", 6)}
        transport = SimpleNamespace(get_extra_info=names.get, write=written.append)
        for name in ("abort", "close", "is_closing", "pause_reading", "resume_reading"):
            setattr(transport, name, lambda: False)
        made.connection_made(transport)
        made.data_received(b"POST / HTTP/1.1\r\nHost: localhost\r\n" + sent)
        made.connection_lost(None)

    asyncio.run(run())
    assert b"".join(written).startswith(b"" if is_right else b"HTTP/1.1 400 ")
    assert bool(written) is not is_right


def test_each_request_of_a_connection_has_chunks_of_its_own():
    parser = listen._Parser(h11.SERVER, listen.MOST_HEAD)
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(3):
        parser.receive_data(head + b"1\r\n \r\n" * 900 + b"0\r\n\r\n")
        n = 0
        while not isinstance(event := parser.next_event(), h11.EndOfMessage):
            n += isinstance(event, h11.Data)
        assert n == 900
        parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        parser.send(h11.EndOfMessage())
        parser.start_next_cycle()


@pytest.mark.parametrize(("n", "fits"), [(listen.MOST_HEAD, True), (listen.MOST_HEAD + 2, False)])
def test_a_head_has_a_limit(n, fits):
    assert listen.MOST_HEAD == 65536
    parser = listen._Parser(h11.SERVER, listen.MOST_HEAD)
    start = b"GET / HTTP/1.1\r\nHost: localhost\r\nx: "
    parser.receive_data(start + b"a" * (n - len(start)))
    if fits:
        assert parser.next_event() is h11.NEED_DATA
    else:
        with pytest.raises(h11.RemoteProtocolError):
            parser.next_event()


def test_addresses_to_listen_on_are_apart_by_commas():
    assert listen.hosts_of("127.0.0.1, ::1") == ["127.0.0.1", "::1"]
    with listen._listener("127.0.0.1", 0) as one:
        port = one.getsockname()[1]
        assert one.family is socket.AF_INET
        assert not one.getblocking()
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        one.listen(1)
        with pytest.raises(OSError, match=r"in use: stop that server.*--port.*0\.1:"):
            listen._listener("127.0.0.1", port)


def handed(parts, limits=None):
    """What `next` of the process in front gives of these messages; (bytes, descriptors, flags)."""
    made = listen.FrontProcess(["LocalHost"])
    assert made._names == ["localhost"]
    made._control, far = socket.socketpair()
    made._control.setblocking(False)
    far.close()
    given = iter(parts)

    def recv_fds(channel, n_byte, n_file):
        assert (channel, n_byte, n_file) == (made._control, 1, 1)
        found = next(given)
        if isinstance(found, Exception):
            raise found
        return (*found, None)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listen.socket, "recv_fds", recv_fds)
            return asyncio.run(made.next())
    finally:
        made.close()


def test_a_connection_that_is_handed_on_is_one_of_its_client():
    with listen._listener("127.0.0.1", 0) as server:
        server.listen(2)
        with socket.create_connection(server.getsockname()) as client:
            server.setblocking(True)
            theirs, _ = server.accept()
            # Nothing yet; then one whose client has gone; then this one.
            left, gone = socket.socketpair()
            gone.close()
            monkey = [
                BlockingIOError(),
                (b"c", [socket.socket().detach()], 0),
                (b"c", [theirs.detach()], 0),
            ]
            connection, address = handed(monkey)
            left.close()
            with connection:
                assert address == "127.0.0.1"
                assert not connection.getblocking()
                client.send(b"x")
                until(lambda: connection.recv(1) == b"x")


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (ConnectionResetError(), EOFError),
        ((b"", [], 0), EOFError),
        ((b"c", [], 0), OSError),
        ((b"c", [], socket.MSG_CTRUNC), OSError),
    ],
)
def test_a_connection_that_was_lost_is_none(part, error):
    with pytest.raises(error):
        handed([part])


def test_a_descriptor_of_a_message_that_was_cut_is_not_used():
    number = socket.socket().detach()
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        handed([(b"c", [number], socket.MSG_CTRUNC)])
    os.close(number)


class Transport:
    """A connection's other end, which notes how it ends."""

    def __init__(self):
        self.said, self.aborted, self.closing = b"", False, False

    def get_extra_info(self, name, default=None):
        return ("127.0.0.1", 5) if name in ("peername", "sockname") else default

    def is_closing(self):
        return self.closing

    def write(self, data):
        self.said += data

    def close(self):
        self.closing = True

    def abort(self):
        self.aborted = True

    def __getattr__(self, name):  # flow control
        return lambda *_: None


def connected(limits, work, answer=None):
    """Run `work(connection, transport, gate)` in a loop, beside an application that answers."""
    import uvicorn

    async def application(scope, receive, send):
        if answer is not None:
            await answer(send)

    async def run():
        made = listen._Gate(limits, lambda line: None)
        config = uvicorn.Config(application, http="h11", log_config=None, lifespan="off")
        config.load()
        inner = listen._Uvicorn(config, made)
        try:
            connection = inner._protocol("1.2.3.4")
            transport = Transport()
            connection.connection_made(transport)
            await work(connection, transport, made)
        finally:
            inner.front.close()

    asyncio.run(run())


QUICK = listen.Connections(header_seconds=0.05, stall_seconds=0.05)


def test_a_connection_without_a_head_ends():
    async def work(connection, transport, made):
        assert list(made._open.values()) == ["1.2.3.4"]
        assert connection.idle
        connection.data_received(b"GET / HT")
        assert not transport.aborted
        await asyncio.sleep(0.15)
        assert transport.aborted
        connection.connection_lost(None)
        assert not made._open

    connected(QUICK, work)


def test_a_connection_that_says_nothing_ends():
    async def work(connection, transport, made):
        await asyncio.sleep(0.15)
        assert transport.aborted

    connected(QUICK, work)


def test_a_connection_with_a_request_is_not_ended_by_the_time_of_a_head():
    gone = asyncio.Event()

    async def answer(send):
        await gone.wait()

    async def work(connection, transport, made):
        connection.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not connection.idle
        await asyncio.sleep(0.15)
        assert not transport.aborted
        connection.pause_writing()
        connection.pause_writing()
        connection.resume_writing()
        await asyncio.sleep(0.15)
        assert not transport.aborted, "it has read on"
        connection.pause_writing()
        await asyncio.sleep(0.15)
        assert transport.aborted, "it reads nothing"
        connection.connection_lost(None)
        assert connection._head is connection._stall is None

    connected(QUICK, work, answer)


def test_a_connection_that_was_used_has_the_time_of_a_head_again():
    async def answer(send):
        head = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b""})

    async def work(connection, transport, made):
        before = connection.since
        connection.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(500):
            if b"200 OK" in transport.said and connection.idle:
                break
            await asyncio.sleep(0.01)
        assert b"200 OK" in transport.said
        assert connection.idle
        assert connection.since > before
        assert connection.timeout_keep_alive_task is not None
        await asyncio.sleep(0.1)
        assert not transport.aborted, "between requests it has uvicorn's time"
        connection.data_received(b"GET")
        assert not transport.aborted
        await asyncio.sleep(0.15)
        assert transport.aborted

    connected(QUICK, work, answer)


def test_requests_of_a_connection_are_answered_in_turn():
    async def answer(send):
        head = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b""})

    async def work(connection, transport, made):
        connection.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        for _ in range(500):
            if transport.said.count(b"200 OK") == 3:
                break
            await asyncio.sleep(0.01)
        assert transport.said.count(b"200 OK") == 3
        assert not transport.aborted

    connected(QUICK, work, answer)


def test_timers_end_with_their_connection():
    async def work(connection, transport, made):
        connection.pause_writing()
        connection.connection_lost(None)
        await asyncio.sleep(0.15)
        assert not transport.aborted

    connected(QUICK, work)


def test_what_is_no_http_is_refused_also_where_a_reply_has_begun():
    async def work(connection, transport, made):
        connection.data_received(b"\x16\x03\x01 \r\n\r\n")
        assert b"400" in transport.said
        assert transport.closing
        connection.send_400_response("again")
        assert transport.aborted

    connected(QUICK, work)


def test_the_numbers_of_connections():
    made = listen.Connections()
    assert (made.total, made.per_address, made.header_seconds, made.stall_seconds) == (
        512, 256, 10, 60,
    )  # fmt: skip


# --- a whole server in this process ---------------------------------------------------------------


class Program:
    """Answers with the address of who asks; notes how it ends."""

    def __init__(self):
        self.ends, self.app = [], self

    async def __call__(self, scope, receive, send):
        data = json.dumps([scope["client"][0], scope["path"]]).encode()
        head = [(b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": data})

    def stop(self):
        self.ends.append("stop")

    def close(self):
        self.ends.append("close")


def served(monkeypatch, work):
    """Serve in this process; `work(url, fronts)` runs in a thread, a signal comes at its end."""
    program, lines, fronts, failed = Program(), [], [], []
    start = listen.FrontProcess.start

    def started(self, listeners):
        fronts.append(self)
        return start(self, listeners)

    monkeypatch.setattr(listen.FrontProcess, "start", started)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def ready(url):
        def run():
            try:
                work(url, fronts)
            except BaseException as error:
                failed.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

        threads.append(threading.Thread(target=run))
        threads[0].start()

    threads = []
    how = {"connections": listen.Connections(), "ready": ready, "log": lines.append}
    names = listen.Address(("127.0.0.1", "Localhost"))
    listen.serve(program, "127.0.0.1", 0, address=names, **how)
    threads[0].join(10)
    if failed:
        raise failed[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert program.ends[-2:] == ["stop", "close"]
    assert fronts[0]._process is None
    return lines


def fetched(url, path):
    with urllib.request.urlopen(url + path, timeout=20) as reply:
        return json.loads(reply.read())


def test_a_server_serves_until_a_signal_comes_and_leaves_nothing(monkeypatch):
    urls = []

    def work(url, fronts):
        urls.append(url)
        assert fetched(url, "/who") == ["127.0.0.1", "/who"]
        assert fetched(url, "/health") == {"status": "ok"}
        fronts[0]._process.kill()  # another takes its place
        until(lambda: len(fronts) == 2)
        assert fetched(url, "/again") == ["127.0.0.1", "/again"]

    assert ["another is started" in line for line in served(monkeypatch, work)] == [True]
    assert urls[0].startswith("http://127.0.0.1:")
    with pytest.raises(OSError, match="refused"):
        fetched(urls[0], "/who")


def test_without_a_process_in_front_the_server_takes_connections_itself(monkeypatch):
    def none(*given, **how):
        raise OSError("no more processes")

    monkeypatch.setattr(listen.subprocess, "Popen", none)

    def work(url, fronts):
        for _ in range(2):
            assert fetched(url, "/who") == ["127.0.0.1", "/who"]

    (line,) = served(monkeypatch, work)
    assert "no more processes" in line


@pytest.mark.parametrize("gone", [True, False])
def test_jobs_end_with_their_client(monkeypatch, gone):
    """Whether its reply was sent or not, no job goes on without it."""
    seen = []

    async def reply():
        return "reply"

    async def unless_gone(request, awaited):
        seen.append(("asked", request))
        if gone:
            raise ClientDisconnect
        return await awaited

    worker = SimpleNamespace(
        submit=lambda jobs: seen.append(("submit", jobs)),
        drop=lambda jobs: seen.append(("drop", jobs)),
    )
    monkeypatch.setattr(app, "unless_gone", unless_gone)
    begun = app.Server._while_connected(SimpleNamespace(worker=worker), "r", ["job"], reply())
    if gone:
        with pytest.raises(ClientDisconnect):
            asyncio.run(begun)
    else:
        assert asyncio.run(begun) == "reply"
    assert seen == [("submit", ["job"]), ("asked", "r"), ("drop", ["job"])]


def test_a_client_that_is_gone_ends_no_accepting(monkeypatch):
    """Neither one that went before it was accepted nor one of which no address is known."""
    found = [OSError(errno.ECONNABORTED, "gone"), "gone", "first", "second"]
    taken = []

    async def accept(_listener):
        if not found:
            raise asyncio.CancelledError
        if isinstance(found[0], OSError):
            raise found.pop(0)
        return found.pop(0), None

    def address(connection):
        if connection == "gone":
            raise OSError(errno.ENOTCONN, "not connected")
        return f"of {connection}"

    async def take(*what):
        taken.append(what)

    async def run():
        gate = listen._Gate(listen.Connections(), print)
        inner = listen._Uvicorn(SimpleNamespace(loaded=True), gate)
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", accept)
        monkeypatch.setattr(inner, "_take", take)
        await inner._accept(None)

    monkeypatch.setattr(listen, "_address", address)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert taken == [("first", "of first"), ("second", "of second")]


@pytest.mark.parametrize("early", [True, False])
def test_a_signal_ends_a_server_also_before_it_has_a_loop(early):
    """The second one ends it at once; afterwards the handlers are those of before."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    inner = SimpleNamespace(
        force_exit=False, should_exit=False, front=SimpleNamespace(signals=ours)
    )
    stops, before = [], signal.getsignal(signal.SIGTERM)

    async def run(begun):
        if not early:
            begun()
            assert not inner.should_exit
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.01)
        else:
            begun()
        assert (inner.should_exit, inner.force_exit, len(stops)) == (True, False, 1)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.01)
        assert (inner.force_exit, len(stops)) == (True, 2)

    with ours, theirs:
        server = SimpleNamespace(stop=lambda: stops.append(1))
        with listen._signalled(inner, server) as begun:
            if early:
                signal.raise_signal(signal.SIGTERM)
            asyncio.run(run(begun))
        assert theirs.recv(9) == bytes([signal.SIGTERM] * 2), "the process in front hears of it"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_address_that_is_taken_is_an_error():
    how = {"connections": QUICK, "ready": print, "log": print}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen.serve(Program(), "127.0.0.1", port, **how)


@pytest.mark.parametrize(
    ("kind", "data", "how", "found"),
    [
        (Kind.ENDED, bytes([signal.SIGSEGV]), {}, (400, "ended its process by signal 11")),
        (Kind.ENDED, bytes([signal.SIGXCPU]), {}, (400, "took more than 7 s")),
        (Kind.ENDED, b"\0", {}, (503, "its process has ended")),
        (Kind.ENDED, b"", {}, (503, "its process has ended")),
        (Kind.MASK, bytes([signal.SIGSEGV]), {}, (503, "its process has ended")),
        (Kind.MASK, bytes([signal.SIGXCPU]), {}, (503, "its process has ended")),
        (Kind.ENDED, bytes([signal.SIGXCPU]), {"closed": True}, (503, "is stopping")),
        (Kind.ERROR, ApiError(418, "why").packed(), {"closed": True}, (418, "why")),
    ],
)
def test_what_the_end_of_a_helper_says_to_the_client(kind, data, how, found):
    mine = SimpleNamespace(_closed=how.get("closed", False))
    error = helpers.Helpers._error(mine, kind, data, costly(7))
    assert (error.status, found[1] in str(error)) == (found[0], True)
