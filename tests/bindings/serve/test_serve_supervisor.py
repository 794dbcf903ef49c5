"""The model's process: what is refused, crashes, hangs, and what becomes of requests then."""

import contextlib
import http.client
import json
import os
import queue
import shutil
import signal
import threading
import time

import pytest
from serve_process import ServeProcess
from serving import ThreadProcess, local_model, local_server
from starlette.testclient import TestClient
from tiny_models import TinySpec, write_tiny_model

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


# --- crashes of real processes --------------------------------------------------------------------


def asked(i, **how):
    return {"prompt": list(range(5 + i, 60 + i)), "max_tokens": 150, "temperature": 0} | how


def stream(server, body):
    """The text of a stream, and the error that it ended with."""
    text, error = "", None
    with server.open(TEXT, body | {"stream": True}) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                error = event.get("error", error)
                text += "".join(choice["text"] for choice in event.get("choices", []))
    return text, error


def test_a_crash_under_load_loses_no_other_request(path, tmp_path):
    """SIGSEGV of the model's process: replies that are whole begin anew, streams end cleanly."""
    with ServeProcess(path, tmp_path, "-c", "512", "--parallel", "2", "--metrics") as server:
        front = server.process.pid
        alone = [server.post(asked(i), TEXT)[1]["choices"][0]["text"] for i in range(6)]
        grammar = {"grammar": "root ::= [a-z ]*", "max_tokens": 60}
        with_grammar = server.post(asked(0, **grammar), TEXT)[1]["choices"][0]["text"]
        found, streams, seconds = {}, {}, {}

        def ask(i):
            found[i] = server.post(asked(i % 6), TEXT)

        def ask_grammar():
            found["grammar"] = server.post(asked(0, **grammar), TEXT)

        def ask_stream(i):
            streams[i] = stream(server, asked(i))

        threads = [threading.Thread(target=ask, args=[i]) for i in range(12)]
        threads += [threading.Thread(target=ask_stream, args=[i]) for i in range(6)]
        threads.append(threading.Thread(target=ask_grammar))
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        begin = time.monotonic()
        os.kill(server.model_pid(), signal.SIGSEGV)
        until(lambda: server.get("/ready")[0] == 503)
        assert server.get("/health")[0] == 200
        until(lambda: server.get("/ready")[0] == 200, 60)
        seconds["restart"] = time.monotonic() - begin
        for thread in threads:
            thread.join(120)
        assert {status for status, _ in found.values()} == {200}
        for i in range(12):
            assert found[i][1]["choices"][0]["text"] == alone[i % 6]
        assert found["grammar"][1]["choices"][0]["text"] == with_grammar
        for i, (text, error) in streams.items():
            assert alone[i].startswith(text)
            assert text == alone[i] if error is None else error["code"] == "process_ended"
        assert server.process.pid == front
        assert "SIGSEGV" in server.log.read_text()
        assert "Traceback" not in server.log.read_text()


def test_a_model_file_that_is_cut_off_ends_no_server(path, tmp_path):
    """Noticed and said between steps; within one it is SIGBUS, a crash of the model's process."""
    mine = tmp_path / "mine.gguf"
    shutil.copy(path, mine)
    with ServeProcess(mine, tmp_path, "-c", "512", "--parallel", "1") as server:
        text, error = stream(server, asked(0, max_tokens=2))
        assert text
        assert error is None
        os.truncate(mine, 1 << 16)
        status, reply = server.post(asked(1, max_tokens=2), TEXT)
        assert (status, reply["error"]["code"]) == (503, "not_loaded")
        assert "changed" in reply["error"]["message"]
        assert str(tmp_path) not in reply["error"]["message"]
        assert "was cut off" in server.log.read_text()
        status, reply = server.post(asked(1, max_tokens=2), TEXT)
        assert (status, reply["error"]["code"]) == (503, "not_loaded")
        assert "incomplete" in reply["error"]["message"]
        assert server.get("/health")[0] == 200
        assert server.get("/ready")[0] == 503
        shutil.copy(path, mine)  # whole again: the next request loads it
        assert stream(server, asked(0, max_tokens=2)) == (text, None)
        os.kill(server.model_pid(), signal.SIGBUS)
        until(lambda: "SIGBUS" in server.log.read_text())
        assert stream(server, asked(0, max_tokens=2)) == (text, None)


def said_of_a_cut(folder, whole, share):
    """What a server says whose model file is cut off after a share of a step's time.

    None where that step had ended by then.
    """
    mine = folder / "mine.gguf"
    shutil.copy(whole, mine)
    bodies = [
        {"prompt": [first + i % 90 for i in range(480)], "max_tokens": 1, "temperature": 0}
        for first in (4, 5, 6)
    ]
    body = bodies[-1]
    with ServeProcess(mine, folder, "-c", "512", "--parallel", "1") as server:
        took = []
        for other in bodies[:-1]:  # the first may wait for what a first step prepares
            begin = time.monotonic()
            assert server.post(other, TEXT)[0] == 200
            took.append(time.monotonic() - begin)
        cut = threading.Timer(share * min(took), os.truncate, (mine, 1 << 16))
        cut.start()
        status, reply = server.post(body, TEXT)
        cut.join()
        if status == 200:
            return None
        assert (status, reply["error"]["code"]) in ((503, "not_loaded"), (503, "process_ended"))
        said = server.log.read_text()
        assert "Traceback" not in said
        assert server.get("/health")[0] == 200
        shutil.copy(whole, mine)
        assert server.post(body, TEXT)[0] == 200
    return said


def test_a_model_file_cut_off_within_a_step_ends_that_request_cleanly(tmp_path):
    """Pages of the mapping that are gone are SIGBUS: that request's error, and a new process.

    As a step begins, the file is looked at: a cut before that is said, and tried again later.
    """
    whole = tmp_path / "whole.gguf"
    write_tiny_model(whole, TinySpec("llama", "F16", embd=512, layers=12))
    for share in (0.5, 0.6, 0.5, 0.7, 0.6):
        said = said_of_a_cut(tmp_path, whole, share)
        if said is not None and "SIGBUS" in said:
            return
        assert said is None or "was cut off" in said
    pytest.fail("no cut fell into a step")


def test_no_process_is_left_behind(path, tmp_path):
    """Neither by SIGTERM, which ends it in a moment, nor where the server is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with ServeProcess(path, tmp_path, "-c", "512") as server:
            pid = server.model_pid()

            def ask(server=server):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    stream(server, asked(0, max_tokens=400))

            thread = threading.Thread(target=ask)
            thread.start()
            time.sleep(0.2)
            begin = time.monotonic()
            server.process.send_signal(number)
            code = server.process.wait(10)
            assert time.monotonic() - begin < 2
            assert code == (0 if number == signal.SIGTERM else -number)
            until(lambda: not os.path.exists(f"/proc/{pid}"), 5)  # noqa: B023
            thread.join(10)
