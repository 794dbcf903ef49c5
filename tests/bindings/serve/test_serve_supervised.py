"""The model's process, a thread here: what is refused, crashes, hangs, and requests then."""

import queue
import threading
import time

import pytest
from serving import ThreadProcess, local_model, local_server
from starlette.testclient import TestClient

from tamis.bindings.drop_in.completion import Piece, Request
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.jobs import Again, Choice
from tamis.bindings.serve.supervisor import LoadError, Supervisor

N_CTX = 512
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def sessions(engine, n):
    return [engine.session(n_ctx=N_CTX, n_ubatch=32) for _ in range(n)]


class Gate:
    """Steps of a model that wait until they may go on."""

    def __init__(self):
        self.open = threading.Event()

    def __call__(self, worker):
        read = worker._read

        def gated():
            self.open.wait(60)
            read()

        worker._read = gated


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
def supervisor(engine, gate, request):
    n_slot, n_queue, n_owner = getattr(request, "param", (1, 3, 1))
    model = local_model(engine, sessions(engine, n_slot), n_queue, n_owner, prepare=gate)
    yield model.worker
    gate.open.set()
    model.worker.stop()
    model.worker.join()


def choice(prompt, n=8, **how):
    events, prompt = queue.SimpleQueue(), list(prompt)
    request, greedy = Request(prompt, n, "tiny"), Sampling(temp=0)
    job = Choice(prompt, events.put, request=request, sampling=greedy, seed=1, **how)
    return job, events


def answer(events):
    """The text of an answer, or the error that ended it."""
    text = ""
    while True:
        event = events.get(timeout=60)
        if isinstance(event, ApiError):
            return event
        if isinstance(event, Again):
            text = ""
        if isinstance(event, Piece):
            text += event.text
            if event.finish:
                return text


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("supervisor", [(2, 3, 1)], indirect=True)
def test_a_full_queue_refuses_all_of_a_request(supervisor, gate):
    jobs = [choice([5 + i % 280 for i in range(395)], 64) for _ in range(8)]
    supervisor.submit([each for each, _ in jobs[:5]])
    with pytest.raises(ApiError) as refusal:
        supervisor.submit([each for each, _ in jobs[5:]])
    assert refusal.value.status == 429
    assert refusal.value.headers["Retry-After"]
    assert jobs[5][1].empty()
    assert supervisor.counts.refused == 3
    supervisor.drop([each for each, _ in jobs[:5]])
    assert supervisor.counts.jobs == 5
    gate.open.set()
    again, events = choice(range(5, 20))
    supervisor.submit([again])  # those nobody waits for take no room
    assert isinstance(answer(events), str)


@pytest.mark.parametrize("supervisor", [(1, 4, 2)], indirect=True)
def test_one_owner_does_not_fill_the_queue_of_several(supervisor):
    jobs = [choice(range(5, 90), owner="b" if i == 4 else "a")[0] for i in range(6)]
    supervisor.submit(jobs[:1])
    until(lambda: supervisor.n_running)
    supervisor.submit(jobs[1:3])
    with pytest.raises(ApiError) as refusal:
        supervisor.submit(jobs[3:4])
    assert refusal.value.status == 429
    supervisor.submit(jobs[4:5])


def test_stopping_ends_what_runs_and_what_waits(supervisor, gate):
    jobs = [choice([5 + i % 280 for i in range(395)], 100) for _ in range(3)]
    supervisor.submit([each for each, _ in jobs])
    supervisor.stop()
    assert [answer(events).status for _, events in jobs] == [503] * 3
    assert supervisor.stopped
    with pytest.raises(ApiError):
        supervisor.submit([jobs[0][0]])


def test_ready_says_whether_a_request_would_be_taken(engine, gate):
    server = local_server(engine, sessions(engine, 1), Settings(n_queue=1), prepare=gate)
    with TestClient(server.app, base_url="http://localhost") as client:
        assert client.get("/ready").status_code == 200
        server.worker.submit([choice(range(5, 90))[0]])
        until(lambda: server.worker.n_running)
        server.worker.submit([choice(range(5, 90))[0]])
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        gate.open.set()
        server.stop()
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 503
    server.close()


# --- crashes, with a thread for a process ---------------------------------------------------------


def test_a_bug_in_the_models_thread_ends_its_process_and_after_two_the_request(engine, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    bugs = [True, True]

    def prepare(worker):
        if bugs:
            bugs.pop()
            worker._step = lambda: 1 // 0

    lines = []
    model = local_model(engine, sessions(engine, 1), prepare=prepare, log=lines.append)
    job, events = choice(range(5, 100))
    waiting, others = choice(range(7, 100))
    model.worker.submit([job])
    until(lambda: not events.empty())
    model.worker.submit([waiting])
    assert answer(events).code == "process_ended"
    assert isinstance(answer(others), str)
    assert len(lines) == 2
    model.worker.stop()
    model.worker.join()


def test_a_process_that_ends_no_step_is_ended(engine):
    stuck, free = threading.Event(), threading.Event()

    def prepare(worker):
        step = worker._batch.step_best

        def once(tokens, n):
            if not stuck.is_set():
                stuck.set()
                free.wait(60)
            return step(tokens, n)

        worker._batch.step_best = once

    class Stuck(ThreadProcess):
        def end(self):
            free.set()  # kill -KILL ends any process, nothing a thread
            return super().end()

    lines = []
    supervisor = Supervisor(
        lambda: Stuck(engine, sessions(engine, 1), prepare), 4, log=lines.append, step_seconds=0.5
    )
    supervisor.wait()
    job, events = choice(range(5, 100))
    supervisor.submit([job])
    assert isinstance(answer(events), str)
    assert "has not ended a step in 0.5 s" in lines[0]
    time.sleep(1.2)  # without jobs it may be silent
    assert len(lines) == 1
    supervisor.stop()
    supervisor.join()


def test_a_process_that_sends_what_it_should_not_is_ended(engine):
    lines, processes = [], []

    def start():
        processes.append(ThreadProcess(engine, sessions(engine, 1)))
        return processes[-1]

    supervisor = Supervisor(start, 4, log=lines.append)
    supervisor.wait()
    processes[0].far.sendall(b"\x0d\x04\x00\x00\x00null")
    until(lambda: lines)
    assert "what it should not" in lines[0]
    job, events = choice(range(5, 30))
    supervisor.submit([job])
    assert isinstance(answer(events), str)
    supervisor.stop()
    supervisor.join()


def test_a_model_that_cannot_be_loaded_again_is_said_to_every_client(engine):
    class NoMore(OSError):
        pass

    processes, lines = [], []

    def start():
        if processes:
            raise NoMore("no more memory")
        processes.append(ThreadProcess(engine, sessions(engine, 1)))
        return processes[0]

    supervisor = Supervisor(start, 4, log=lines.append)
    supervisor.wait()
    processes[0].crash()
    until(lambda: len(lines) == 2)
    assert not supervisor.ready
    with pytest.raises(ApiError) as refusal:
        supervisor.submit([choice(range(5, 30))[0]])
    assert refusal.value.status == 503
    assert "no more memory" in refusal.value.message
    supervisor.stop()
    supervisor.join()


def test_the_first_process_that_cannot_load_its_model_is_the_callers_error():
    def start():
        raise OSError("there is none")

    supervisor = Supervisor(start, 4)
    with pytest.raises(OSError, match="there is none"):
        supervisor.wait()
    supervisor.join()
    assert LoadError


class Clock(threading.Condition):
    """Waits no time, and notes how long it would have."""

    waits = []  # noqa: RUF012

    def wait(self, timeout=None):
        if timeout is None:
            return super().wait()
        self.waits.append(timeout)
        if len(self.waits) == 9:
            self.enough.set()
            return super().wait(30)
        return True


def test_a_model_that_cannot_be_loaded_again_is_tried_more_and_more_seldom(engine, monkeypatch):
    enough, begun = threading.Event(), []
    monkeypatch.setattr(Clock, "enough", enough, raising=False)
    monkeypatch.setattr(Clock, "waits", [])
    monkeypatch.setattr(threading, "Condition", Clock)

    def start():
        begun.append(True)
        if len(begun) > 1:
            raise OSError("no more memory")
        monkeypatch.undo()  # the worker's own
        return ThreadProcess(engine, sessions(engine, 1))

    waits = Clock.waits
    supervisor = Supervisor(start, 4)
    supervisor.wait()
    monkeypatch.setattr(Clock, "enough", enough, raising=False)
    monkeypatch.setattr(Clock, "waits", waits)
    supervisor._process.crash()
    assert enough.wait(30)
    assert waits == [0.0, 1, 2, 4, 8, 16, 30, 30, 30]
    supervisor.stop()
    supervisor.join()


def test_what_was_not_answered_has_failed(supervisor, gate):
    jobs = [choice(range(5, 90)) for _ in range(3)]
    supervisor.submit([job for job, _ in jobs])
    supervisor.stop()
    assert supervisor.counts.failed == 3
    assert all(answer(events).code == "stopping" for _, events in jobs)
    with pytest.raises(ApiError) as refusal:
        supervisor.submit([choice(range(5, 9))[0]])
    assert refusal.value.code == "stopping"
    assert supervisor.failed
    assert supervisor.stopped
