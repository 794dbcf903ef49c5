"""What a prompt cache keeps and for how long, with a clock of its own and without a model."""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.engine import prompt_cache
from tamis.engine.prompt_cache import PAGE_SECONDS, PromptCache
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.pages import OutOfPagesError

ROW = 4  # bytes of a token's K and V


class Held:
    """A session whose rows are numbers made of all tokens up to theirs."""

    has_states = False

    def __init__(self, tokens=(), n_ctx=8192, identity=b"model"):
        self.n_ctx, self.identity = n_ctx, identity
        self.asked, self.watch = [], lambda: None
        self.hold(tokens)

    def hold(self, tokens):
        self.tokens, self.rows = list(tokens), self.rows_of(tokens)
        return self

    @staticmethod
    def rows_of(tokens):
        found, state = [], b""
        for token in tokens:
            state = hashlib.blake2b(state + bytes([token]), digest_size=ROW).digest()
            found.append(np.frombuffer(state, np.uint8))
        return np.array(found, np.uint8).reshape(-1, ROW)

    @property
    def n_past(self):
        return len(self.tokens)

    def pages(self, first, end):
        self.asked.append((first, end))
        self.watch()
        rows = np.zeros(((end - first) * PAGE, ROW), np.uint8)
        part = self.rows[first * PAGE : end * PAGE]
        rows[: len(part)] = part
        return rows.reshape(end - first, -1)

    def states(self):
        return []

    def truncate(self, n):
        self.tokens, self.rows = self.tokens[:n], self.rows[:n]

    def append_pages(self, ids, pages, state):
        assert self.n_past % PAGE == 0
        assert len(pages) == -(-len(ids) // PAGE)
        assert state is None
        self.tokens += ids
        rows = np.concatenate(pages).reshape(-1, ROW)[: len(ids)]
        self.rows = np.concatenate([self.rows, rows])

    def check(self):
        np.testing.assert_array_equal(self.rows, self.rows_of(self.tokens))


PAGE_BYTES = PAGE * ROW


@pytest.fixture
def clock(monkeypatch):
    """The time, in seconds, which a test sets."""
    now = SimpleNamespace(time=1000.0)
    monkeypatch.setattr(prompt_cache.time, "time", lambda: now.time)
    return now


def text(n, seed=0):
    return np.random.default_rng(seed).integers(0, 250, n).tolist()


def kept_bytes(cache):
    return sum(record.n_byte for record in cache._records.values())


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 4 * PAGE), st.integers(1, 4 * PAGE)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 12),
)
def test_what_is_appended_is_what_was_read_and_no_more_is_kept_than_fits(steps, n_page):
    cache = PromptCache(n_page * PAGE_BYTES)
    for seed, n, n_asked in steps:
        cache.keep(Held(text(n, seed)))
        assert cache.ram_bytes == kept_bytes(cache) <= cache.n_ram
        assert cache._records.keys() == cache._due.keys()
        asked = text(n_asked, seed)
        session = Held(asked[: n_asked // 3])
        held = session.n_past
        n_now = cache.extend(session, asked)
        assert held <= n_now == session.n_past <= max(held, n_asked - 1)
        assert session.tokens == asked[:n_now]
        session.check()


@pytest.mark.parametrize(
    ("n_held", "n_asked", "found"),
    [
        (0, 2, 0),
        (0, 1, 0),
        (64, 66, 64),
        (63, 66, 64),
        (64, 65, 64),
        (10, 128, 127),
        (0, 200, 130),
        (130, 140, 130),
    ],
)
def test_a_prompt_is_kept_up_to_its_last_token(n_held, n_asked, found):
    cache, asked = PromptCache(1 << 20), [*text(130), *text(70, 1)]
    cache.keep(Held(asked[:130]))
    session = Held(asked[:n_held])
    assert cache.extend(session, asked[:n_asked]) == found
    session.check()
    assert cache.n_restored_tokens == found - n_held
    assert cache.n_hits == (found > n_held)


@pytest.mark.parametrize(("least", "found"), [(1, 20), (10, 20), (11, 10)])
def test_what_is_not_worth_it_is_not_appended(least, found):
    cache = PromptCache(1 << 20)
    cache.keep(Held(text(20)))
    assert cache.extend(Held(text(10)), text(40), least=least) == found


def test_a_scope_a_model_and_a_salt_have_prompts_of_their_own():
    cache, ids = PromptCache(1 << 20, salt="s"), text(100)
    cache.keep(Held(ids), "scope")
    assert cache.extend(Held(), ids, "scope") == 99
    assert cache.extend(Held(), ids, "other") == 0
    assert cache.extend(Held(), ids) == 0
    assert cache.extend(Held(identity=b"another"), ids, "scope") == 0
    other = PromptCache(1 << 20, salt="t")
    other._records = cache._records
    assert other.extend(Held(), ids, "scope") == 0


def test_a_conversation_is_worth_its_length_in_seconds_and_its_first_pages_most(clock):
    cache, session = PromptCache(1 << 20), Held(text(3 * PAGE + 5))
    cache.keep(session)
    names = prompt_cache._chain(cache._root(session, ""), np.array(session.tokens, np.int32))
    due = [1000.0 + 197 - PAGE_SECONDS * i for i in range(4)]
    assert [cache._due[name] for name in names] == due[:3]
    assert cache._due[prompt_cache._end_of(names[-1])] == due[3]
    clock.time = 900.0
    cache.keep(session)  # what is due later stays so
    assert [cache._due[name] for name in names] == due[:3]
    clock.time = 2000.0
    cache.keep(session)
    assert [cache._due[name] for name in names] == [x + 1000 for x in due[:3]]
    clock.time = 3000.0
    cache.extend(Held(), session.tokens)
    assert [cache._due[name] for name in names] == [x + 2000 for x in due[:3]]


def test_a_long_conversation_is_due_after_a_day(clock, monkeypatch):
    monkeypatch.setattr(prompt_cache, "LONGEST", 100)
    cache, session = PromptCache(1 << 20), Held(text(200))
    cache.keep(session)
    assert max(cache._due.values()) == 1100.0


def test_what_is_used_again_outlives_what_is_not(clock):
    """Three conversations of two pages, and room for two and a half."""
    cache = PromptCache(5 * PAGE_BYTES)
    first, second, third = (text(2 * PAGE, seed) for seed in (1, 2, 3))
    for ids in (first, second, first, third):
        clock.time += 10
        cache.keep(Held(ids))
    asked = [cache.extend(Held(), [*ids, 0]) for ids in (first, second, third)]
    assert asked == [2 * PAGE, 0, 2 * PAGE] or asked == [2 * PAGE, PAGE, 2 * PAGE]
    assert cache.n_evicted == cache.n_ram_evicted > 0


def test_a_full_cache_is_emptied_by_a_sixteenth(clock):
    cache = PromptCache(32 * PAGE_BYTES)
    for seed in range(32):
        clock.time += 1
        cache.keep(Held(text(PAGE, seed)))
    assert (cache.ram_bytes, cache.n_evicted) == (32 * PAGE_BYTES, 0)
    cache.keep(Held(text(PAGE, 99)))
    assert (cache.ram_bytes, cache.n_evicted) == (30 * PAGE_BYTES, 3)


def test_a_long_prompt_is_copied_in_parts_and_room_is_made_between_them():
    cache, most = PromptCache(8 * PAGE_BYTES), []
    session = Held(text(100 * PAGE))
    session.watch = lambda: most.append(cache.ram_bytes)
    cache.keep(session)
    assert session.asked == [(0, 64), (64, 100)]
    assert max(most) <= cache.n_ram
    assert cache.n_kept == 100 * PAGE_BYTES


def test_a_page_that_has_no_room_is_not_kept():
    for n_ram, found in ((PAGE_BYTES - 1, 0), (PAGE_BYTES, PAGE)):
        cache = PromptCache(n_ram)
        cache.keep(Held(text(PAGE)))
        assert cache.extend(Held(), text(PAGE + 1)) == 0 or found
        assert cache.ram_bytes == found * ROW


def test_only_what_is_new_is_copied(clock):
    cache, ids = PromptCache(1 << 20), text(4 * PAGE + 9)
    session = Held(ids[: 2 * PAGE])
    cache.keep(session)
    assert session.asked == [(0, 2)]
    session.hold(ids)
    session.asked.clear()
    cache.keep(session)
    assert session.asked == [(2, 4), (4, 5)]
    session.asked.clear()
    cache.keep(session)
    assert session.asked == []
    cache.keep(Held())
    assert cache.n_kept == 4 * PAGE_BYTES + PAGE_BYTES + 9 * 4  # the end, with its tokens


def test_a_longer_end_takes_the_place_of_a_shorter_one():
    cache, ids = PromptCache(1 << 20), text(60)
    for n in (20, 40):
        cache.keep(Held(ids[:n]))
    assert len(cache._records) == 1
    assert cache.ram_bytes == PAGE_BYTES + 40 * 4
    assert cache.extend(Held(), ids) == 40


def test_evicting_a_conversation_leaves_none_of_it():
    cache, ids = PromptCache(1 << 20), text(2 * PAGE + 9)
    session = Held(ids)
    cache.keep(session)
    cache.keep(Held(text(70, 5)))
    cache.evict(session)
    assert cache.extend(Held(), ids) == 0
    assert cache.extend(Held(), text(80, 5)) == 70
    assert cache.ram_bytes == kept_bytes(cache)


@pytest.mark.parametrize("error", [ValueError, MemoryError, OutOfPagesError])
def test_pages_that_do_not_fit_are_not_there(error):
    class Failing(Held):
        def append_pages(self, ids, pages, state):
            raise error("no")

    cache, ids = PromptCache(1 << 20), text(100)
    cache.keep(Held(ids))
    assert cache.extend(Failing(), ids) == 0
    assert (cache.n_hits, cache.n_restored, cache.n_restored_tokens) == (0, 0, 0)


def test_a_context_that_ends_before_is_filled_to_its_end():
    cache, ids = PromptCache(1 << 20), text(200)
    cache.keep(Held(ids))
    session = Held(n_ctx=100)
    assert cache.extend(session, ids) == 100
    session.check()


class Recurrent(Held):
    """A session with a state beside its rows, kept at the ends of its chunks, too."""

    has_states = True

    def __init__(self, tokens=(), ends=()):
        super().__init__(tokens)
        self.ends = ends

    @staticmethod
    def state_of(tokens):
        return np.array([len(tokens), sum(tokens)], np.float32)

    def states(self):
        return [(n, self.state_of(self.tokens[:n])) for n in (*self.ends, self.n_past)]

    def append_pages(self, ids, pages, state):
        super().append_pages(ids, pages, None)
        np.testing.assert_array_equal(state, self.state_of(self.tokens))


@pytest.mark.parametrize(
    ("ends", "n_asked", "found"),
    [
        ((), 150, 130), ((), 130, 0), ((64,), 130, 64), ((64, 128), 130, 128), ((64, 128), 120, 64),
        ((100,), 130, 100), ((100,), 101, 100), ((100,), 100, 0),
    ],
)  # fmt: skip
def test_a_recurrent_prompt_goes_on_where_a_state_is(ends, n_asked, found):
    cache, asked = PromptCache(1 << 20), [*text(130), *text(70, 1)]
    cache.keep(Recurrent(asked[:130], ends))
    session = Recurrent()
    assert cache.extend(session, asked[:n_asked]) == found
    session.check()


def test_names_cover_all_that_a_page_depends_on():
    """Of files that outlive a process: another name would make them useless."""
    cache, session = PromptCache(1, salt="s"), Held(identity=b"i")
    root = hashlib.blake2b(b"i" + json.dumps([1, "s", "of"]).encode(), digest_size=32).digest()
    assert cache._root(session, "of") == root
    tokens = np.array(text(2 * PAGE + 3), np.int32)
    first = hashlib.blake2b(root + tokens[:PAGE].tobytes(), digest_size=32).digest()
    second = hashlib.blake2b(first + tokens[PAGE : 2 * PAGE].tobytes(), digest_size=32).digest()
    assert prompt_cache._chain(root, tokens) == [first, second]
    assert prompt_cache._chain(root, tokens[: PAGE - 1]) == []


class Files:
    """A folder that writes down what it is asked."""

    held, n_evicted, n_failed = 70, 3, 2

    def __init__(self):
        self.records, self.seen = {}, []

    def has(self, name):
        return name in self.records

    def read(self, name):
        self.seen.append(("read", name))
        return self.records.get(name)

    def write(self, name, record, due):
        self.records[name] = record
        self.seen.append(("write", name, due))

    def touch(self, name, due):
        self.seen.append(("touch", name, due))

    def remove(self, name):
        self.records.pop(name, None)

    def close(self, seconds):
        self.seen.append(("close", seconds))


def test_files_have_what_ram_has_no_room_for(clock):
    files = Files()
    cache, ids = PromptCache(PAGE_BYTES, files), text(3 * PAGE)
    session = Held(ids)
    cache.keep(session)
    names = prompt_cache._chain(cache._root(session, ""), np.array(ids, np.int32))
    due = [1000.0 + len(ids) - PAGE_SECONDS * i for i in range(3)]
    writes = [("write", *pair) for pair in zip(names, due, strict=True)]
    assert files.seen == writes
    files.seen.clear()
    session = Held()
    assert cache.extend(session, [*ids, 1]) == 3 * PAGE
    session.check()
    assert [seen for seen in files.seen if seen[0] == "touch"] == [
        ("touch", name, x + 1) for name, x in zip(names, due, strict=True)
    ]
    assert cache.ram_bytes <= cache.n_ram
    assert (cache.disk_bytes, cache.n_evicted, cache.n_failed) == (70, 3, 2)
    cache.evict(session)
    assert files.records == {}
    cache.close(3.0)
    assert files.seen[-1] == ("close", 3.0)


def test_without_a_folder_there_are_no_files():
    cache = PromptCache.open(100)
    assert (cache.disk_bytes, cache.n_evicted, cache.n_failed) == (0, 0, 0)
    cache.close()


def test_a_page_of_a_file_that_is_no_more_ends_what_is_appended():
    files = Files()
    cache, ids = PromptCache(0, files), text(3 * PAGE)
    cache.keep(Held(ids))
    session = Held()
    names = prompt_cache._chain(cache._root(session, ""), np.array(ids, np.int32))
    files.has, whole = lambda name: name in names, dict(files.records)
    for gone, found in ((2, 2), (1, 1), (0, 0)):
        files.records = {n: r for n, r in whole.items() if n != names[gone]}
        assert cache.extend(session.hold([]), [*ids, 1]) == found * PAGE
        session.check()
