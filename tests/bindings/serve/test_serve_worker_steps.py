"""The worker's rules one by one, with sessions that only note what they are asked for."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from tamis.bindings.drop_in.completion import Counts as Taken
from tamis.bindings.drop_in.completion import Request
from tamis.bindings.serve import worker
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.jobs import (
    Counts,
    Embedding,
    Job,
    Keeping,
    Kept,
    Progress,
    SlotState,
    Started,
)
from tamis.bindings.serve.worker import WHOLE, Completion, Worker, _Slot
from tamis.engine.session import ContextError
from tamis.engine.session_file import SessionFileError
from tamis.formats.gguf import GGUFError
from tamis.graph.topk_logits import Best
from tamis.sampling.base import LogitsError, SamplerError


class Session:
    """Tokens without a model; `calls` are what was asked for beyond them."""

    def __init__(self, *tokens, n_ctx=64):
        self.tokens, self.n_ctx, self.calls, self.mass = list(tokens), n_ctx, [], None

    @property
    def n_past(self):
        return len(self.tokens)

    def truncate(self, n):
        del self.tokens[n:]

    def copy(self, other):
        self.tokens = list(other.tokens)
        self.calls.append("copy")

    def remove(self, begin, end):
        self.calls.append((begin, end))

    def prefill_steps(self, ids):
        self.calls.append(("read", list(ids)))
        yield len(ids)
        return "row"

    def hidden(self, ids):
        yield np.ones((len(ids), 2), np.float32)

    def save(self, path):
        self.calls.append(("save", path))

    def load(self, path):
        self.tokens = [1] * 5
        self.calls.append(("load", path))

    def close(self):
        self.calls.append("close")


class Sampler:
    """Chooses the likeliest token."""

    n_best = None

    def sample(self, row):
        return int(np.argmax(row))

    def accept(self, token):
        self.accepted = token


TOKENIZER = SimpleNamespace(eog={9}, piece=lambda token, special: f"<{token}>".encode())


def job_of(*prompt, max_tokens=5, cls=Completion, **more):
    """A job that notes its events."""
    events = []
    if cls is Completion:
        fields = {k: more.pop(k) for k in ("logprobs", "echo", "n_keep", "stop") if k in more}
        more |= {"request": Request(list(prompt), max_tokens, "m", **fields)}
        more |= {"sampler": more.get("sampler", Sampler())}
    found = cls(list(prompt), events.append, **more)
    found.events = events
    return found


def working(*sessions, cache=None, reopen=None):
    """A worker without its thread."""
    made = Worker.__new__(Worker)
    made._slots = [_Slot(session, TOKENIZER, None) for session in sessions]
    made._waiting, made._served, made._refused = deque(), {}, []
    made._outbox, made._to_keep, made._cache, made._reopen = [], [], cache, reopen
    made._zipped = deque()
    made.counts, made._flushed = Counts(), lambda: None
    made._heads = SimpleNamespace(pooling_or_mean="mean", pooled=lambda rows, how: (how, rows))
    made._file = SimpleNamespace(check_unchanged=lambda *, thorough: None)
    return made


def sent(made):
    found, made._outbox = made._outbox, []
    return [event for _, event in found]


# --- slots ----------------------------------------------------------------------------------------


def test_a_slot_begins_empty_and_shows_the_job_that_it_runs(monkeypatch):
    monkeypatch.setattr(worker.time, "monotonic", lambda: 7.0)
    slot = _Slot(Session(1, 2), TOKENIZER, None)
    assert (slot.used, slot.scope, slot.lora, slot.n_read, slot.moved) == (
        0,
        "",
        None,
        WHOLE,
        False,
    )
    assert slot.state() == SlotState(False, 2, 0, 0, -1)
    job = job_of(1, 2, 3, 4, max_tokens=5, scope="s")
    slot.take(job)
    assert (job.n_cached, slot.scope, slot.used, job.begun, job.read) == (2, "s", 7.0, 7.0, 7.0)
    job.n_answer = 2
    assert slot.state() == SlotState(True, 2, 2, 4, 3)
    assert next(slot.reading) == 2
    assert slot.session.calls == [("read", [3, 4])]
    settled = []
    slot.drafting = SimpleNamespace(settle=lambda: settled.append(1))
    slot.release()
    assert (slot.job, slot.reading, slot.answer, slot.row, list(slot.forced), settled) == (
        None, None, None, None, [], [1],
    )  # fmt: skip
    vector = job_of(1, 2, 3, cls=Job)
    slot.take(vector)
    assert slot.state() == SlotState(True, 2, 0, 3, -1)
    assert list(slot.reading) == [1]


def test_the_counters_of_an_answer(monkeypatch):
    monkeypatch.setattr(worker.time, "monotonic", lambda: 17.0)
    job = job_of(1, 2, 3, 4, begun=10.0, read=13.0, n_drafted=6, n_accepted=5)
    job.n_cached, job.n_answer = 1, 8
    assert job.taken() == Taken(1, 3, 8, 3.0, 4.0, None, 6, 5)
    for echo, logprobs, found in (("a", 0, True), ("a", None, False), (None, 0, False)):
        assert job_of(1, echo=echo, logprobs=logprobs).reads_all is found


def test_rows_of_a_text_come_in_parts_and_are_given_whole():
    session = SimpleNamespace(hidden=lambda ids: iter([np.ones((2, 3)), np.zeros((1, 3))]))
    steps = worker._hidden(session, [1, 2, 3])
    assert [next(steps), next(steps)] == [2, 3]
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]


def test_the_logprobs_of_a_prompt_are_each_of_the_row_before():
    rows = np.arange(4, dtype=np.float32)[:, None]
    answer = SimpleNamespace(
        first_info=lambda: "first", prompt_info=lambda i, row: (i, float(row[0]))
    )
    events = []
    session = SimpleNamespace(logits=lambda ids: iter([rows[:2], rows[2:]]))
    steps = worker._scored(session, [5, 6, 7, 8], answer, events.append)
    assert [next(steps), next(steps)] == [2, 4]
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value.tolist() == [3.0]
    assert [event.tokens for event in events] == [["first", (1, 0.0), (2, 1.0)], [(3, 2.0)]]


@pytest.mark.parametrize(
    ("action", "n", "n_byte", "left"), [("save", 3, 4, 3), ("restore", 5, 4, 5), ("erase", 3, 0, 0)]
)
def test_what_an_action_on_a_slot_gives(tmp_path, monkeypatch, action, n, n_byte, left):
    times = iter([10.0, 12.5])
    monkeypatch.setattr(worker.time, "monotonic", lambda: next(times))
    path = tmp_path / "a.bin"
    path.write_bytes(b"1234")
    session = Session(1, 2, 3)
    job = job_of(cls=Keeping, action=action, path=str(path))
    assert worker._kept(job, session) == Kept(n, n_byte, 2.5)
    assert session.n_past == left
    assert session.calls == [] if action == "erase" else session.calls[0][1] == str(path)


# --- who is next ----------------------------------------------------------------------------------


def test_the_owner_with_the_fewest_jobs_is_next_then_the_longest_unserved():
    made = working(Session(), Session(), Session())
    made._slots[0].job = job_of(1, owner="a")
    jobs = [job_of(i, owner=owner) for i, owner in enumerate("aabbc")]
    made._waiting.extend(jobs)
    made._served = {"b": 5, "gone": 4, "a": 6}
    assert made._next() is jobs[4], "c was never served"
    assert made._served == {"b": 5, "a": 6, "c": 7}
    made._slots[1].job = jobs[4]
    assert made._next() is jobs[2], "b runs nothing"
    assert made._served["b"] == 8
    made._slots[2].job = jobs[2]
    assert [made._next() for _ in range(4)] == [jobs[0], jobs[3], jobs[1], None]
    assert made._served == {"c": 7, "a": 11, "b": 10}
    first = working(Session())
    first._waiting.append(jobs[0])
    first._next()
    assert first._served == {"a": 1}


def test_a_job_waits_for_its_own_slot_and_lets_others_pass():
    made = working(Session(), Session())
    made._slots[0].job = job_of(1)
    first, second = job_of(2, slot=0), job_of(3, slot=1)
    made._waiting.extend([first])
    assert made._next() is None
    made._waiting.append(second)
    assert made._next() is second
    assert list(made._waiting) == [first]


def test_cancelled_jobs_leave_queue_and_slots_and_are_counted():
    made = working(Session(), Session())
    waiting = [job_of(1), job_of(2), job_of(3)]
    waiting[0].cancelled = waiting[2].cancelled = True
    made._waiting.extend(waiting)
    made._drop_cancelled()
    assert (list(made._waiting), made.counts.cancelled) == ([waiting[1]], 2)
    running = [job_of(1), job_of(2)]
    for slot, job in zip(made._slots, running, strict=True):
        slot.take(job)
    running[0].cancelled = True
    made._release_cancelled()
    assert [slot.job for slot in made._slots] == [None, running[1]]
    assert (made.counts.cancelled, made._to_keep) == (3, [made._slots[0]])


def test_jobs_are_admitted_one_prompt_at_a_time():
    made = working(Session(), Session())
    jobs = [job_of(1, 2, owner="a"), job_of(3, owner="b")]
    made._waiting.extend(jobs)
    made._admit()
    assert sent(made) == [Started(0, 0)]
    assert (made._slots[0].job, list(made._waiting)) == (jobs[0], [jobs[1]])
    assert made._reader() is made._slots[0]
    made._admit()
    assert sent(made) == []
    made._slots[0].reading = None
    made._admit()
    assert sent(made) == [Started(0, 1)]
    made._slots[1].reading = None
    made._waiting.append(job_of(4))
    made._admit()
    assert (sent(made), len(made._waiting)) == ([], 1), "no slot is free"


def test_a_job_that_cannot_begin_fails_and_frees_its_slot():
    made = working(Session())

    def broken(*args):
        raise ContextError("no room")

    made._slots[0].session.prefill_steps = broken
    made._waiting.append(job_of(1))
    made._admit()
    (error,) = sent(made)
    assert (error.status, error.message, made.counts.failed) == (400, "no room", 1)
    assert made._slots[0].job is None


def test_actions_on_slots_are_done_at_once_and_mark_what_was_read(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"1234")
    evicted = []
    cache = SimpleNamespace(evict=lambda *args: evicted.append(args))
    made = working(Session(1), Session(2, 3), cache=cache)
    slot = made._slots[1]
    for action, n_read in (("save", 7), ("restore", 0), ("erase", WHOLE)):
        slot.n_read, slot.scope = 7, "before"
        job = job_of(cls=Keeping, action=action, path=str(path), slot=1, scope="after")
        made._waiting.append(job)
        made._admit()
        assert isinstance(sent(made)[0], Kept)
        assert (slot.n_read, slot.scope, slot.job) == (n_read, "after", None)
    assert evicted == [(slot.session, "before")]
    assert made._slots[0].session.tokens == [1]
    with pytest.raises(FileNotFoundError):
        made._keep_file(slot, job_of(cls=Keeping, action="save", path=str(tmp_path / "none")))


def test_refused_jobs_fail_once():
    made = working(Session())
    made._refused = [(job_of(1), ValueError("x")), (job_of(2), SamplerError("y"))]
    made._send_refused()
    assert [(e.status, e.message) for e in sent(made)] == [
        (500, "the model failed: ValueError"), (400, "y")
    ]  # fmt: skip
    assert (made.counts.failed, made._refused) == (2, [])


# --- where a job goes -----------------------------------------------------------------------------


LONG = list(range(100, 140))


def placed(made, job, *free):
    slots = [made._slots[i] for i in free] if free else made._slots
    return made._slots.index(made._placed(job, list(slots)))


def test_a_prompt_goes_where_most_of_it_is_held_and_its_last_token_is_read_again():
    made = working(Session(1, 9, 9), Session(1, 2, 3), Session(7))
    assert placed(made, job_of(1, 2, 3)) == 1
    assert made._slots[1].session.tokens == [1, 2]
    made._slots[0].session.tokens = [1, 2, 9]
    assert placed(made, job_of(1, 2, 3, 4)) == 0, "both hold two: the first one"
    assert made._slots[0].session.tokens == [1, 2]
    made._slots[0].used = 1.0
    assert placed(made, job_of(1, 2, 3, 4)) == 1, "of equal ones the longest unused"
    assert placed(made, job_of(1, 2, slot=2)) == 2
    assert made._slots[2].session.tokens == []


@pytest.mark.parametrize("how", [{"scope": "other"}, {"lora": (0.5,)}])
def test_another_scope_or_other_adapters_share_nothing(how):
    made = working(Session(1, 2, 3), Session())
    assert placed(made, job_of(1, 2, 3, **how)) == 0
    assert made._slots[0].session.tokens == []


@pytest.mark.parametrize("how", [{"cached": False}, {"echo": "a", "logprobs": 0}, {"cls": Job}])
def test_what_is_read_whole_goes_to_the_longest_unused_slot(how):
    made = working(Session(1, 2, 3), Session(1, 2, 3))
    made._slots[0].used, made._slots[1].n_read, made._slots[1].moved = 5.0, 3, True
    assert placed(made, job_of(1, 2, 3, **how)) == 1
    slot = made._slots[1]
    assert (slot.session.tokens, slot.n_read, slot.moved) == ([], WHOLE, False)


@pytest.mark.parametrize(("n", "copied"), [(15, False), (16, True), (17, True)])
def test_sixteen_tokens_more_in_a_busy_slot_are_copied(n, copied):
    made = working(Session(*LONG[:n]), Session(), Session())
    made._slots[0].n_read, made._slots[1].used = 1 << 20, 3.0
    assert placed(made, job_of(*LONG), 1, 2) == 2
    slot = made._slots[2]
    assert slot.session.tokens == (LONG[:n] if copied else [])
    assert slot.session.calls == (["copy"] if copied else [])
    assert (slot.n_read, slot.moved) == (WHOLE, False)
    assert worker.WORTH_SHARING == 16


def test_what_was_not_read_anew_stays_marked_and_is_not_kept():
    extended = []
    cache = SimpleNamespace(extend=lambda *args, **how: extended.append((args, how)))
    made = working(Session(*LONG), cache=cache)
    slot = made._slots[0]
    slot.n_read = 4
    placed(made, job_of(*LONG[:6]))
    assert (slot.session.tokens, slot.n_read, extended) == (LONG[:5], 4, [])
    placed(made, job_of(*LONG[:5], scope=""))
    assert (slot.session.tokens, slot.n_read) == (LONG[:4], WHOLE)
    assert extended == [((slot.session, LONG[:5], ""), {"least": 16})]


def test_chunks_are_moved_only_for_who_asks(monkeypatch):
    asked = []

    def moved(session, prompt, n, least):
        asked.append((list(prompt), n, least))
        session.tokens = list(prompt[: n + 3])
        return n + 3

    monkeypatch.setattr(worker, "move_chunks", moved)
    made = working(Session(1, 2, 8, 5, 6, 7))
    slot = made._slots[0]
    placed(made, job_of(1, 2, 5, 6, 7, 9, reuse=2))
    assert asked == [([1, 2, 5, 6, 7], 2, 2)]
    assert (slot.session.tokens, slot.n_read, slot.moved) == ([1, 2, 5, 6, 7], 2, True)
    assert made.counts.moved_tokens == 3
    placed(made, job_of(1, 2, 5, 6, 7, 9, reuse=2))
    assert len(asked) == 1, "nothing is left beyond the common beginning"
    placed(made, job_of(1, 2, 5, 6, 7, 9))
    assert (slot.session.tokens, slot.n_read, slot.moved) == ([1, 2], WHOLE, False)
    placed(made, job_of(5, 6, reuse=2))
    assert len(asked) == 1, "nothing of the beginning is held"


def test_other_adapters_need_a_session_of_their_own():
    fresh = []
    made = working(Session(1), reopen=lambda lora: fresh.append(lora) or Session())
    slot, before = made._slots[0], made._slots[0].session
    slot.drafting = SimpleNamespace(moved_to=lambda session: ("drafting", session))
    made._adapt(slot, job_of(1))
    assert (fresh, slot.session) == ([], before)
    made._adapt(slot, job_of(1, lora=(0.5,)))
    assert (fresh, slot.lora, before.calls) == ([(0.5,)], (0.5,), ["close"])
    assert slot.drafting == ("drafting", slot.session)
    slot.drafting = None
    restored = job_of(cls=Keeping, action="restore", path="", slot=0, lora=(1.0,))
    assert placed(made, restored) == 0
    assert slot.lora == (1.0,)
    placed(made, job_of(cls=Keeping, action="save", path="", slot=0, lora=(2.0,)))
    assert slot.lora == (1.0,)


def test_only_sequences_that_were_read_whole_are_kept(capsys):
    kept, counted = [], []
    cache = SimpleNamespace(keep=lambda *args: kept.append(args))
    made = working(Session(1, 2, 3), Session(1, 2), Session(1), cache=cache)
    made.counts.take_cache = counted.append
    made._slots[0].n_read, made._slots[1].n_read = 2, 2
    made._to_keep = made._slots[:2]
    made._keep()
    assert (kept, counted, made._to_keep) == ([(made._slots[1].session, "")], [cache], [])

    def full(*args):
        raise OSError("full")

    cache.keep = full
    made._to_keep = made._slots[2:]
    made._keep()
    assert capsys.readouterr().err == "tamis: prompt cache: full\n"
    bare = working(Session())
    bare._to_keep = list(bare._slots)
    bare._keep()
    assert bare._to_keep == []


# --- reading and steps ----------------------------------------------------------------------------


def test_a_prompt_is_read_in_chunks_that_are_reported(monkeypatch):
    monkeypatch.setattr(worker.time, "monotonic", lambda: 12.0)
    made = working(Session(1, 2))
    slot, job = made._slots[0], job_of(1, 2, 3, 4, 5)
    slot.take(job)
    slot.used = 10.0
    made._read()
    assert sent(made) == [Progress(5, 5, 2)]
    made._read()
    assert (slot.reading, slot.row, job.read) == (None, "row", 12.0)
    c = made.counts
    assert (c.chunks, c.prompt_seconds, c.most_tokens, c.prompt_tokens, c.cached_tokens) == (
        1, 2.0, 5, 3, 2,
    )  # fmt: skip
    assert made._to_keep == [slot]
    made._read()
    assert (sent(made), c.chunks) == ([], 1), "nothing is being read"


def test_a_prompt_without_an_answer_ends_and_a_vector_is_pooled():
    made = working(Session(), Session())
    slot, job = made._slots[0], job_of(1, 2, max_tokens=0)
    slot.take(job)
    made._begin_answer(slot, job, "row")
    (last,) = sent(made)
    assert (last.text, last.finish, last.counts.n_read, last.counts.n_answer) == (
        "",
        "length",
        2,
        0,
    )
    assert slot.job is None
    for given, how in (("cls", "cls"), (None, "mean")):
        vector = job_of(1, 2, cls=Job, pooling=given)
        made._slots[1].take(vector)
        made._begin_answer(made._slots[1], vector, "rows")
        assert sent(made) == [Embedding((how, "rows"))]
        assert made._slots[1].job is None
    assert made.counts.most_tokens == 2


def test_a_chunk_that_fails_fails_its_job():
    made = working(Session())

    def broken(ids):
        raise LogitsError("nan")
        yield

    checked = []
    made._file = SimpleNamespace(check_unchanged=lambda *, thorough: checked.append(thorough))
    made._slots[0].session.prefill_steps = broken
    made._slots[0].take(job_of(1))
    made._read()
    (error,) = sent(made)
    assert (error.status, error.message, error.code) == (500, "the model failed: nan", "failed")
    assert (made._slots[0].job, made.counts.failed, checked) == (None, 1, [True])
    made._fail(made._slots[0], error)
    assert (sent(made), made.counts.failed) == ([], 1), "a job fails once"


def answering(made, i=0, row=(0, 0, 1), **how):
    """A slot that has read its prompt and may choose its next token."""
    slot, job = made._slots[i], job_of(5, 6, 7, **how)
    slot.take(job)
    slot.reading, slot.row = None, np.array(row, np.float32)
    return slot, job


def test_a_token_is_chosen_sent_and_counted(monkeypatch):
    monkeypatch.setattr(worker.time, "monotonic", lambda: 8.0)
    made = working(Session(5, 6))
    slot, job = answering(made, max_tokens=2)
    job.read = 5.0
    assert made._choose(slot) == 2
    assert (job.sampler.accepted, job.n_answer, made.counts.answer_tokens) == (2, 1, 1)
    (one,) = sent(made)
    assert (one.text, one.ids, one.finish, one.counts.n_answer) == ("<2>", (2,), None, 1)
    assert (made.counts.answer_seconds, made.counts.answer_steps) == (0, 0)
    slot.session.mass = "mass"
    assert made._choose(slot) is None
    text, last = sent(made)
    assert (text.finish, last.finish, last.counts.mass, last.counts.n_answer) == (
        None, "length", "mass", 2,
    )  # fmt: skip
    c = made.counts
    assert (c.answer_tokens, c.answer_seconds, c.answer_steps, c.most_tokens) == (2, 3.0, 1, 5)
    assert (slot.job, made._to_keep) == (None, [slot])


def test_an_answer_of_no_token_takes_no_step():
    made = working(Session(5, 6))
    slot, job = answering(made, row=[0] * 9 + [1])
    assert made._choose(slot) is None
    (last,) = sent(made)
    assert (last.text, last.finish, job.n_answer) == ("", "stop", 0)
    assert (made.counts.answer_steps, made.counts.most_tokens) == (0, 3)


def test_tokens_that_must_come_next_do_whatever_the_logits():
    made = working(Session())
    slot, job = answering(made)
    slot.forced.extend([4])
    slot.budget = SimpleNamespace(accept=lambda token: [token + 1, token + 2])
    assert made._choose(slot) == 4
    assert (job.sampler.accepted, list(slot.forced)) == (4, [5, 6])
    slot.budget = None
    assert [made._choose(slot) for _ in range(3)] == [5, 6, 2]


class Steps:
    """Stands in for Batch: a row for each session."""

    def __init__(self):
        self.asked = []

    def step_best(self, tokens, n):
        self.asked.append(([*tokens.values()], n))
        return {session: np.array([0, 1, 0], np.float32) for session in tokens}


def test_answers_step_together_and_rows_come_back():
    made = working(Session(), Session(), Session())
    made._batch = Steps()
    answering(made, 0)
    answering(made, 2, row=(1, 0, 0))
    flushed = []
    made._flushed = lambda: flushed.append(len(made._batch.asked))
    made._step()
    assert made._batch.asked == [([2, 0], None)]
    assert [None if s.row is None else int(np.argmax(s.row)) for s in made._slots] == [1, None, 1]
    assert (made.counts.steps, made.counts.rows, flushed) == (1, 2, [0])
    assert [slot.job.events[0].ids for slot in (made._slots[0], made._slots[2])] == [(2,), (0,)]
    made._slots[0].job = made._slots[0].row = made._slots[2].job = made._slots[2].row = None
    made._step()
    assert (made.counts.steps, len(flushed)) == (1, 1)


def test_a_step_that_fails_fails_its_answers_and_a_choice_its_own():
    made = working(Session(), Session())
    made._batch = Steps()
    slot, job = answering(made, 0)
    answering(made, 1)

    def refuse(row):
        raise SamplerError("nothing is allowed")

    job.sampler.sample = refuse
    made._step()
    (error,) = [e for e in job.events if isinstance(e, ApiError)]
    assert (error.message, slot.job, made.counts.rows) == ("nothing is allowed", None, 1)

    def broken(tokens, n):
        raise MemoryError

    made._batch.step_best = broken
    made._step()
    (error,) = [event for event in sent(made) if isinstance(event, ApiError)]
    assert (error.status, error.message, made.counts.failed) == (503, "out of memory", 2)


@pytest.mark.parametrize(
    ("n_past", "n_keep", "removed"),
    [(63, 0, None), (64, 0, (0, 32)), (64, 4, (4, 34)), (64, 63, (62, 63)), (64, 5, (5, 34))],
)
def test_a_full_context_loses_the_older_half_of_what_is_not_kept(n_past, n_keep, removed):
    made = working(Session(*range(n_past)))
    slot, _ = answering(made, n_keep=n_keep)
    slot.n_read = 50
    assert made._has_room(slot) is True
    assert slot.session.calls == ([] if removed is None else [removed])
    assert slot.n_read == (50 if removed is None else min(50, removed[0]))


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(ValueError("no single tokens"), 400, "no single tokens"), (MemoryError("m"), 503, "m")],
)
def test_a_context_that_cannot_lose_tokens_ends_its_answer(error, status, message):
    made = working(Session(*range(64)))
    slot, _ = answering(made)

    def broken(begin, end):
        raise error

    slot.session.remove = broken
    assert made._has_room(slot) is False
    (found,) = sent(made)
    assert (found.status, found.message, found.code) == (status, message, "failed")
    vector = job_of(1, cls=Job)
    slot.job = vector
    assert made._has_room(slot) is True


class Draft:
    """Stands in for Drafting: three tokens are drafted in each step."""

    def __init__(self, *, own_steps=False):
        self.own_steps, self.n_drafted, self.n_most, self.known = own_steps, 0, 9, {}

    def take(self, token):
        return self.known.get(token)

    def decode_best(self, token, n):
        self.n_drafted += 3
        return token, n, self.n_most

    def settle(self):
        pass


def test_drafts_are_for_a_single_answer_or_those_with_steps_of_their_own():
    made = working(Session(), Session())
    made._batch = Steps()
    (slot, job), drafting = answering(made, 0), Draft()
    slot.drafting = drafting
    assert made._rows({slot.session: 2}) == {slot.session: (2, None, None)}
    assert (job.n_drafted, made.counts.drafted_tokens, made.counts.drafts) == (3, 3, 1)
    assert made._batch.asked == []
    other, _ = answering(made, 1)
    assert set(made._rows({slot.session: 2, other.session: 1})) == {slot.session, other.session}
    assert made._batch.asked == [([2, 1], None)]
    drafting.own_steps = True
    found = made._rows({slot.session: 2, other.session: 1})
    assert found[slot.session] == (2, None, None)
    assert made._batch.asked[1:] == [([1], None)]
    assert made._rows({other.session: 1}).keys() == {other.session}
    drafting.decode_best = lambda token, n: "none was drafted"
    made._rows({slot.session: 2})
    assert (made.counts.drafts, job.n_drafted) == (2, 6)


def test_a_token_that_was_drafted_has_its_row_already():
    made = working(Session())
    slot, job = answering(made)
    assert made._drafted(slot, 2) is False
    slot.drafting = Draft()
    slot.drafting.known[2] = "row of 2"
    assert made._drafted(slot, 1) is False
    assert made._drafted(slot, 2) is True
    assert (slot.row, job.n_accepted, made.counts.accepted_tokens) == ("row of 2", 1, 1)


def test_a_slow_grammar_is_waited_for_once_and_not_while_a_prompt_is_read():
    made = working(Session(), Session(), Session())
    waits = []

    def ready(seconds):
        waits.append(seconds)
        return False

    for i in range(2):
        _, job = answering(made, i)
        job.mask = SimpleNamespace(ready=ready)
    slot, _ = answering(made, 2)
    assert made._ready() == [slot]
    assert waits == [0.005, 0.0]
    made._slots[2].reading, made._slots[2].row = iter(()), None
    assert made._ready() == []
    assert waits[2:] == [0.0, 0.0]

    def ended(seconds):
        raise SamplerError("has ended")

    made._slots[0].job.mask.ready = ended
    made._ready()
    assert [error.message for error in sent(made)] == ["has ended"]


@pytest.mark.parametrize(
    ("asked", "most"),
    [([], None), ([(None, None)], None), ([(5, None), (9, None)], 9), ([(9, None), (5, None)], 9),
     ([(5, 0)], None), ([(5, None), (None, None)], None)],
)  # fmt: skip
def test_as_many_logits_are_looked_at_as_one_needs(asked, most):
    made = working(*(Session() for _ in asked), Session())
    for i, (n_best, logprobs) in enumerate(asked):
        _, job = answering(made, i, logprobs=logprobs)
        job.sampler.n_best = n_best
    assert worker._most_looked_at(made._slots) == most


def test_of_the_best_logits_a_sampler_sees_its_own_number():
    given = []
    sampler = SimpleNamespace(n_best=2, sample=lambda row: "whole")
    sampler.sample_best = lambda ids, logits: given.append((ids.tolist(), logits.tolist())) or 1
    row = Best(np.array([7, 8, 9]), np.array([3.0, 2.0, 1.0], np.float32), None)
    assert worker._sampled(sampler, row) == 8
    assert given == [([7, 8], [3.0, 2.0])]
    assert worker._sampled(sampler, np.zeros(3)) == "whole"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (LogitsError("nan"), 500, "the model failed: nan"),
        (OSError("gone"), 400, "gone"),
        (SessionFileError("odd"), 400, "odd"),
        (SamplerError("odd"), 400, "odd"),
        (ContextError("odd"), 400, "odd"),
        (MemoryError("why"), 503, "why"),
        (MemoryError(), 503, "out of memory"),
        (ZeroDivisionError("secret"), 500, "the model failed: ZeroDivisionError"),
    ],
)
def test_what_a_client_hears_of_an_error(error, status, message):
    found = worker._as_api_error(error)
    assert (found.status, found.message, found.code) == (status, message, "failed")


def test_errors_of_clients_stay_and_those_of_the_file_end_the_process():
    error = ApiError(418, "x")
    assert worker._as_api_error(error) is error
    with pytest.raises(GGUFError, match="damaged"):
        worker._as_api_error(GGUFError("damaged", path="a.gguf"))
