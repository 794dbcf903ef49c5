"""Jobs that the model's process cannot take: each fails alone, and the process lives on."""

import json
import os
import queue
import signal
import socket

import pytest
from serving import ThreadProcess

from tamis.bindings.drop_in.completion import Piece, Request
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve import process
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http import helper
from tamis.bindings.serve.jobs import (
    Choice,
    Embedding,
    Job,
    jobs_of_record,
    jobs_to_record,
)
from tamis.bindings.serve.supervisor import Supervisor


@pytest.fixture
def started(engine):
    """A supervisor, and its processes."""
    processes = []

    def start():
        processes.append(ThreadProcess(engine, [engine.session(n_ctx=512, n_ubatch=32)]))
        return processes[-1]

    supervisor = Supervisor(start, 8)
    supervisor.wait()
    yield supervisor, processes
    supervisor.stop()
    supervisor.join()


def choice(prompt=(5, 6, 7), seed=1, **how):
    events = queue.SimpleQueue()
    request, greedy = Request(list(prompt), 4, "tiny"), Sampling(temp=0)
    how = {"request": request, "sampling": greedy, "seed": seed} | how
    return Choice(request.prompt, events.put, **how), events


def test_a_process_gets_all_that_a_choice_asks_for():
    asked = {"seed": 7, "number": 2, "cached": False, "reuse": 96, "slot": 1}
    first, _ = choice(**asked)
    second, _ = choice(prompt=(8, 9))
    record = json.loads(json.dumps(jobs_to_record([first, second], [4, 5])))
    found, other = jobs_of_record(record)
    assert (found.id, found.prompt, other.id, other.prompt) == (4, [5, 6, 7], 5, [8, 9])
    assert {name: getattr(found, name) for name in asked} == asked
    assert (other.cached, other.reuse, other.slot, found.request) == (True, 0, None, first.request)


def end(events):
    """The last event of a job."""
    while True:
        event = events.get(timeout=30)
        if isinstance(event, ApiError | Embedding) or (isinstance(event, Piece) and event.finish):
            return event


def lives(supervisor, processes):
    job, events = choice()
    supervisor.submit([job])
    assert isinstance(end(events), Piece)
    assert len(processes) == 1, "it was not started again"
    job, events = choice()
    supervisor.submit([job])
    assert isinstance(end(events), Piece)


@pytest.mark.parametrize("prompt", [[5, 1 << 20], [-1, 5], [1 << 40]])
def test_a_prompt_of_no_tokens_of_the_vocabulary_is_one_requests_error(started, prompt):
    supervisor, processes = started
    (first, events), (second, others) = choice(prompt), choice()
    supervisor.submit([first, second])  # of one request: all of it fails
    error = end(events)
    assert error.status == 400
    assert str(prompt[1 if prompt[0] == 5 else 0]) in error.message
    assert end(others).status == 400
    supervisor.drop([first, second])
    assert supervisor.counts.failed == 2
    lives(supervisor, processes)


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyError("no"), MemoryError("no")])
def test_whatever_keeps_a_job_from_being_made_is_one_requests_error(started, monkeypatch, error):
    supervisor, processes = started
    made = process.sampler_of

    def sampler_of(sampling, seed, *rest):
        if seed == 666:
            raise error
        return made(sampling, seed, *rest)

    monkeypatch.setattr(process, "sampler_of", sampler_of)
    good, kept = choice()
    bad, events = choice(seed=666)
    supervisor.submit([good])
    supervisor.submit([bad])
    assert end(events).status == (503 if isinstance(error, MemoryError) else 500)
    assert isinstance(end(kept), Piece)
    lives(supervisor, processes)


def test_a_vector_that_cannot_be_made_is_one_requests_error(started):
    supervisor, processes = started
    events = queue.SimpleQueue()
    supervisor.submit([Job([5, 6], events.put, pooling="no such")])
    assert end(events).status == 500
    lives(supervisor, processes)


def test_a_slot_is_free_again_where_a_job_cannot_begin_in_it(started, monkeypatch):
    supervisor, processes = started
    monkeypatch.setattr("tamis.bindings.serve.worker.Answer", lambda *_: 1 // 0)
    job, events = choice()
    supervisor.submit([job])
    assert end(events).status == 500
    monkeypatch.undo()
    lives(supervisor, processes)
    assert processes[0].runner._worker.n_running == 0


class Masked:
    """Stands in for the process that follows a grammar."""

    def follow(self):
        ours, self.theirs = socket.socketpair()
        return ours


@pytest.fixture
def lossy(monkeypatch):
    """Before a process starts: descriptors are lost while the set has anything in it."""
    received, lost = socket.recv_fds, set()

    def recv_fds(channel, n_byte, n_file):
        data, numbers, flags, address = received(channel, n_byte, n_file)
        if not (lost and numbers):
            return data, numbers, flags, address
        for number in numbers:
            os.close(number)
        return data, [], flags | socket.MSG_CTRUNC, address

    monkeypatch.setattr(process.socket, "recv_fds", recv_fds)
    return lost


def test_a_grammar_whose_masks_find_no_descriptor_is_one_requests_error(lossy, started):
    supervisor, processes = started
    lossy.add("all")
    masks = Masked()
    job, events = choice(masks=masks)
    supervisor.submit([job])
    error = end(events)
    assert (error.status, error.code) == (503, "unavailable")
    assert masks.theirs.recv(1) == b"", "nobody reads masks any more"
    lossy.clear()
    lives(supervisor, processes)


def test_the_masks_of_a_request_that_fails_are_closed(started):
    supervisor, processes = started
    masks = Masked()
    job, events = choice([1 << 20], masks=masks)
    supervisor.submit([job])
    assert end(events).status == 400
    assert masks.theirs.recv(1) == b""
    lives(supervisor, processes)


@pytest.fixture
def nursery():
    """The helper's process as an object, and the socket that orders it."""
    before, wakes = signal.getsignal(signal.SIGCHLD), signal.set_wakeup_fd(-1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = helper._Nursery(theirs, None, None, None)
        yield found, ours
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, before)
        os.close(found._ended)
        os.close(found._wake)


def test_a_helper_without_descriptors_or_processes_loses_one_request(nursery, monkeypatch):
    made, ours = nursery
    ours.send(b"p")  # its socket was lost on the way
    assert made._start()

    def none_left(run):
        raise BlockingIOError

    monkeypatch.setattr(helper, "start_fork", none_left)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        socket.send_fds(ours, [b"p"], [theirs.fileno()])
        theirs.close()
        assert made._start()
        assert mine.recv(1) == b"", "its client hears of it"
    assert not made._children
    ours.close()
    assert not made._start()
