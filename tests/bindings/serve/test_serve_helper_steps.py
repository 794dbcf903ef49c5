"""The process that prepares requests, step by step. No model."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
from types import SimpleNamespace

import pytest

from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve import tasks
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.helpers import Helpers
from tamis.bindings.serve.http import helper
from tamis.bindings.serve.wire import (
    GRAMMAR_SECONDS,
    HEADER,
    Broken,
    Config,
    Frames,
    Kind,
    frame,
    identity,
)
from tamis.sampling.base import SamplerError


def child(grammars=None, vocab=("a", "b")):
    ours, theirs = socket.socketpair()
    text = SimpleNamespace(unbounded="unbounded", vocab=vocab)
    ours.settimeout(10)
    theirs.settimeout(10)
    return ours, theirs, helper._Child(theirs, text, "reader", grammars)


def task(**how):
    sampling = Sampling(**how)
    return tasks.Task([], sampling, 5, False, False, False, None, 3, ignored=("top_a",))


# --- its start and its end ------------------------------------------------------------------------


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """Run `main` with a configuration; what it makes is noted, in order."""
    log, file = [], tmp_path / "model.gguf"
    file.write_bytes(b"x")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    class Text:
        @staticmethod
        def load(*given):
            log.append(("load", *given))
            return "text"

    class Nursery:
        def __init__(self, *given):
            log.append(("nursery", *given[1:]))
            given[0].close()

        def run(self):
            log.append("run")

    monkeypatch.setattr(helper, "TextModel", Text)
    monkeypatch.setattr(helper, "Reader", lambda *given: log.append(("reader", *given)) or "reader")
    monkeypatch.setattr(helper, "_Nursery", Nursery)
    for name in ("collect", "freeze"):
        monkeypatch.setattr(gc, name, lambda name=name: log.append(name))
    monkeypatch.setattr(helper, "_quiet", lambda: log.append("quiet"))

    def run(change=0):
        numbers = identity(str(file))
        numbers[-1] += change
        config = Config(str(file), numbers, "tiny", 64, 8, 20, 500, {"seed": 1}, "{{ x }}")
        theirs = socket.socket()
        given = ["helper", str(theirs.detach()), json.dumps(config._asdict())]
        monkeypatch.setattr(sys, "argv", given)
        monkeypatch.setattr(helper, "_media", lambda rules: rules)
        return helper.main(), config, log

    yield run
    ignored = [signal.getsignal(number) for number in before]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert ignored == [signal.SIG_IGN] * 2, "the server ends it, no terminal does"


def test_it_loads_what_forks_share_and_is_silent_from_then_on(begun):
    code, config, log = begun()
    assert code == 0
    limits = helper.Limits(64, 8)
    assert log == [
        ("load", config.path, 64, "{{ x }}"),
        ("reader", "text", "tiny", limits, {"seed": 1}, helper.Rules()),
        "quiet", "collect", "freeze",
        ("nursery", config._replace(media=[]), "text", "reader"),
        "run",
    ]  # fmt: skip


def test_it_is_of_no_other_file_than_the_servers(begun, capfd):
    code, _, log = begun(change=1)
    assert (code, log) == (1, [])
    assert "the model file has changed" in capfd.readouterr().err


def in_a_fork(work):
    """The code that a fork ends with: what `work` returns; 99 if it raises."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_nothing_that_it_prints_gets_out():
    read, write = os.pipe()

    def work():
        for number in (0, 1, 2):
            os.dup2(write, number)
        before = os.listdir("/dev/fd")
        helper._quiet()
        for number in (1, 2):
            os.write(number, b"part of a request")
        empty = os.read(0, 9) == b""
        return 0 if empty and len(os.listdir("/dev/fd")) == len(before) else 1

    assert in_a_fork(work) == 0
    os.close(write)
    assert os.read(read, 99) == b""
    os.close(read)


# --- its forks ------------------------------------------------------------------------------------


@pytest.fixture
def nursery(monkeypatch):
    """The process as an object whose forks are only noted, and the socket that orders it."""
    before, wakes = signal.getsignal(signal.SIGCHLD), signal.set_wakeup_fd(-1)
    ours, theirs = socket.socketpair()
    text = SimpleNamespace(unbounded="unbounded", vocab=("a", "b"))
    made = helper._Nursery(theirs, None, text, None)
    made.forks = []

    def start(run):
        made.forks.append(run)
        return -len(made.forks)

    monkeypatch.setattr(helper, "start_fork", start)
    with ours, theirs:
        yield made, ours
    for _, channel in made._children.values():
        channel.close()
    assert signal.set_wakeup_fd(wakes) == made._wake
    signal.signal(signal.SIGCHLD, before)
    os.close(made._ended)
    os.close(made._wake)


def order(made, ours, what):
    mine, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(ours, [what], [theirs.fileno()])
    assert made._start()
    return mine


def test_the_end_of_a_fork_wakes_it_and_never_blocks_it(nursery):
    made, _ = nursery
    for number in (made._ended, made._wake):
        assert not os.get_blocking(number)
        assert not os.get_inheritable(number)
    os.kill(os.getpid(), signal.SIGCHLD)
    assert os.read(made._ended, 9) == bytes([signal.SIGCHLD])
    found = dict(made._poll.poll(0))
    assert found == {}, "nothing is there any more"


@pytest.mark.parametrize("error", [None, SamplerError("no end"), ImportError("no extra")])
def test_what_grammars_need_is_made_once_before_forks_and_for_them_alone(
    nursery, monkeypatch, error
):
    made, ours = nursery
    built, frozen = [], []

    def tokenizer(*given):
        built.append((given, len(made.forks)))
        if error is not None:
            raise error
        return "grammars"

    monkeypatch.setattr(helper, "GrammarTokenizer", tokenizer)
    monkeypatch.setattr(helper.gc, "freeze", lambda: frozen.append(True))
    with order(made, ours, b"p"):
        assert (built, frozen) == ([], [])
    with order(made, ours, b"g"), order(made, ours, b"g"):
        pass
    n = 1 if error is None else 2
    assert built == [(("unbounded", 2), 1), (("unbounded", 2), 2)][:n]
    assert len(frozen) == n
    assert made._grammars == ("grammars" if error is None else None)
    assert [pid for pid, _ in made._children.values()] == [-1, -2, -3]


def test_a_fork_becomes_the_process_of_its_own_socket(nursery, monkeypatch):
    made, ours = nursery
    became = []
    monkeypatch.setattr(made, "_become", became.append)
    with order(made, ours, b"p") as one, order(made, ours, b"p") as two:
        for fork, mine in zip(made.forks, (one, two), strict=True):
            fork()
            mine.send(b"x")
            assert became[-1].recv(9) == b"x"
    assert sorted(made._children) == sorted(each.fileno() for each in became)


def test_who_gets_no_fork_finds_its_socket_closed(nursery, monkeypatch):
    made, ours = nursery
    kept = []

    def none_left(run):
        kept.append(run)  # and its socket with it
        raise BlockingIOError

    monkeypatch.setattr(helper, "start_fork", none_left)
    with order(made, ours, b"p") as mine:
        mine.settimeout(5)
        assert mine.recv(1) == b""
    assert (len(kept), made._children) == (1, {})


def test_only_whom_nobody_waits_for_is_killed(nursery, monkeypatch):
    made, ours = nursery
    killed = []

    def kill(pid, number):
        killed.append((pid, number))
        ours.close()

    monkeypatch.setattr(helper.os, "kill", kill)
    one, two, three = (order(made, ours, b"p") for _ in range(3))
    with one, three:
        one.send(b"a request that its fork has not read")
        left = list(made._children)[1]
        two.close()
        made.run()
        with pytest.raises(KeyError):  # it is killed once
            made._poll.unregister(left)
        assert killed[0] == (-2, signal.SIGKILL)
        assert sorted(killed[1:]) == [(pid, signal.SIGKILL) for pid in (-3, -2, -1)]


def test_who_has_ended_is_reported_and_dropped_alone(nursery):
    made, _ = nursery

    def fork(end):
        pid = os.fork()
        if not pid:
            os.dup2(read, 0)
            os.closerange(3, 1024)  # the other ends of this test's
            end()
            os._exit(7)
        return pid

    read, write = os.pipe()
    ends = [lambda: None, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os.read(0, 1)]
    mine = []
    for end in ends:
        here, there = socket.socketpair()
        here.settimeout(10)
        mine.append(here)
        made._children[there.fileno()] = fork(end), there
        made._poll.register(there, 0)
    first, second, third = [pid for pid, _ in made._children.values()]
    ended = list(made._children)[:2]
    for pid in (first, second):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    last = made._children[list(made._children)[1]][1]
    made._poll.unregister(last)  # as once its client has gone
    made._reap()
    assert [pid for pid, _ in made._children.values()] == [third]
    for number in ended:
        with pytest.raises(KeyError):  # otherwise it would wake without end
            made._poll.unregister(number)
    assert mine[0].recv(99) == frame(Kind.ENDED, b"\0"), "its own exit, whatever its code"
    assert mine[1].recv(99) == frame(Kind.ENDED, bytes([signal.SIGKILL]))
    assert mine[0].recv(9) == mine[1].recv(9) == b""
    # The last one's client reads nothing: the report is not waited for.
    ((_, channel),) = made._children.values()
    channel.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while channel.send(bytes(1 << 16)):
            pass
    channel.setblocking(True)
    os.write(write, b"x")
    os.waitid(os.P_PID, third, os.WEXITED | os.WNOWAIT)
    made._reap()
    assert made._children == {}
    assert channel.fileno() == -1
    made._reap()  # no fork is left
    for each in mine:
        each.close()
    for number in (read, write):
        os.close(number)


# --- one request ----------------------------------------------------------------------------------


def test_a_frame_may_come_in_any_parts_and_must_end():
    ours, theirs, _ = child()
    one, two = frame(Kind.TOKENS, b"one"), frame(Kind.REQUEST, b"")
    with ours, theirs:
        frames = Frames()
        ours.send(one + two[:2])
        assert helper._receive(theirs, frames) == (Kind.TOKENS, b"one")
        ours.send(two[2:])
        assert helper._receive(theirs, frames) == (Kind.REQUEST, b"")
        ours.send(one[:-1])
        ours.close()
        with pytest.raises(ConnectionError):
            helper._receive(theirs, frames)


@pytest.mark.parametrize(
    ("data", "fits"),
    [
        (HEADER.pack(Kind.REQUEST, 1 << 30), True),
        (HEADER.pack(Kind.REQUEST, (1 << 30) + 1), False),
        (HEADER.pack(Kind.COMPILING, 0)[:-1], True),
        (HEADER.pack(0, 0), False),
        (HEADER.pack(max(Kind) + 1, 0), False),
    ],
)
def test_bytes_that_begin_no_frame_are_refused_at_once(data, fits):
    frames = Frames()
    frames.feed(data)
    if fits:
        assert frames.next() is None
    else:
        with pytest.raises(Broken, match="frame of kind"):
            frames.next()


def test_a_grammar_that_is_being_compiled_is_no_result_yet():
    """The server reads on, and then tells which limit was met."""

    async def asked(*frames):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        found = Helpers(Config("", [], "", 64, 1, 20, 500, {}), 60, 8)
        with ours, theirs:
            theirs.sendall(b"".join(frames))
            return await found._ask(ours, b"chat\n", b"{}")

    begun = frame(Kind.COMPILING, b"")
    assert asyncio.run(asked(begun, frame(Kind.RESULT, b"[1]"))).result == b"[1]"
    stopped = frame(Kind.ENDED, bytes([signal.SIGXCPU]))
    for frames, seconds in (((stopped,), 20), ((begun, stopped), GRAMMAR_SECONDS)):
        with pytest.raises(ApiError, match=rf"\b{seconds} s\b"):
            asyncio.run(asked(*frames))


def result(monkeypatch, found, made, name="chat", body=b"{}"):
    def read(got, reader, data):
        assert (got, reader, data) == (name, "reader", body)
        return found

    monkeypatch.setattr(helper, "read", read)
    return made._result(name, body)


def test_each_kind_of_request_is_sent_as_its_own(monkeypatch):
    ours, theirs, made = child()
    with ours, theirs:
        inputs = tasks.Inputs([[0, 1]], True, 4)
        assert tasks.inputs_from_json(result(monkeypatch, inputs, made), 2) == inputs
        assert json.loads(result(monkeypatch, {"n": 1}, made)) == {"n": 1}
        plain = tasks.from_json(result(monkeypatch, task(temp=0.5), made), 2)
        assert (plain.masked, plain.ignored, plain.sampling.temp) == (False, ("top_a",), 0.5)
        assert made._grammar is None


def test_what_a_grammar_leaves_out_is_reported_with_the_other_fields(monkeypatch):
    ours, theirs, made = child()
    compiled = []

    def compile_(grammar, n_choice):
        compiled.append((grammar, n_choice))
        return ("/a", "/b")

    monkeypatch.setattr(made, "_compile", compile_)
    with ours, theirs:
        asked = task(grammar=LlamaGrammar.from_string('root ::= "a"'))
        found = tasks.from_json(result(monkeypatch, asked, made), 2)
        assert (found.masked, found.sampling.grammar) == (True, None)
        assert found.ignored == ("top_a", "schema/a", "schema/b")
        assert compiled == [(asked.grammar, 0)]


@pytest.mark.parametrize("had", [None, "those"])
def test_a_fork_makes_for_itself_what_grammars_need(monkeypatch, had):
    """It can be compiled only where a first mask can be made of it, too."""
    ours, theirs, made = child(had)
    log = []

    class Grammar:
        def __init__(self, text, grammars):
            log.append((text, grammars))

        def mask(self):
            log.append("mask")

    class Given:
        text, left_out = "text", ("/x",)

        def compiled_here(self, grammars):
            log.append(("compile", grammars))
            return self

    monkeypatch.setattr(
        helper, "GrammarTokenizer", lambda *given: log.append(("made", *given)) or "own"
    )
    monkeypatch.setattr(helper, "lower_cpu", lambda seconds: log.append(seconds))
    monkeypatch.setattr(helper, "held_bytes", lambda: (0, 0))
    monkeypatch.setattr(helper, "Grammar", Grammar)
    with ours, theirs:
        assert made._compile(Given(), 3) == ("/x",)
        grammars = had or "own"
        first = [] if had else [("made", "unbounded", 2)]
        assert log == [
            *first, helper.GRAMMAR_SECONDS, ("compile", grammars), ("text", grammars), "mask",
        ]  # fmt: skip
        assert made._n_choice == 3


def test_a_request_that_fails_after_its_grammar_has_no_masks(monkeypatch):
    ours, theirs, made = child()

    def failing(name, body):
        made._grammar = "grammar"
        raise MemoryError

    monkeypatch.setattr(made, "_result", failing)
    with ours:
        ours.send(frame(Kind.REQUEST, b"chat\n{}"))
        with theirs:
            made.run()  # ends, with nobody to ask for masks
        frames = Frames()
        frames.feed(ours.recv(1 << 12))
        kind, data = frames.next()
        assert kind is Kind.ERROR
        assert ApiError.unpacked(data).code == "too_costly"
        assert ours.recv(1) == b""


def test_first_masks_that_cannot_be_made_are_refused_each():
    ours, theirs, _ = child()

    class Grammar:
        def mask(self):
            raise SamplerError("too deep")

    with theirs, pytest.MonkeyPatch.context() as patch:
        given = []
        patch.setattr(helper, "allow_cpu", given.append)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            helper._follow(theirs, [Grammar(), Grammar()])
        assert given == [helper.STEP_SECONDS] * 2
    with ours:
        frames = Frames()
        frames.feed(ours.recv(1 << 12))
        assert frames.next() == (Kind.REFUSED, b"\0\0too deep")
        assert frames.next() == (Kind.REFUSED, b"\1\0too deep")
