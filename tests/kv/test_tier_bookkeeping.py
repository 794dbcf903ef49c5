"""What tiers of the KV cache keep, drop, read and count, without a model."""

from types import SimpleNamespace

import numpy as np
import pytest
from recorded_ops import HP, N_CTX, N_UBATCH, PAGE_BYTES, SHAPE, TYPES, Tape, cache_of

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv import disk_tier
from tamis.kv.cache import KVCounts
from tamis.kv.composite import CompositeKV, divided
from tamis.kv.convert import as_rows
from tamis.kv.disk_tier import MARGIN, MOST_KEPT, DiskTier
from tamis.kv.gpu_page_cache import GpuPageCache
from tamis.kv.token_bank import LEAST_UNIT, TokenBank, least
from tamis.kv.types import Tier
from tamis.kv.unit_file import KVFile, KVFileError, _after, _cuts
from tamis.select.base import SelectorShape

N_PAGE, RING = N_CTX // PAGE, HP.n_layer * (1 + N_UBATCH // PAGE)
UNIT = 16
UNIT_BYTES = UNIT * 2 * HP.head_dim  # of K or of V of a head, float16


def rows(n, seed=0):
    rng = np.random.default_rng(seed)
    size = (n, HP.n_head_kv, HP.head_dim)
    return [as_rows(rng.standard_normal(size), type) for type in TYPES]


def disk(folder, n_frame, n_ctx=N_CTX):
    return DiskTier(HP, n_ctx, TYPES, Tier(n_frame * PAGE_BYTES, folder, UNIT), N_UBATCH)


def filled(cache, n):
    """The cache with n tokens in each layer."""
    for layer in range(HP.n_layer):
        cache.write(layer, *rows(n, layer))
    return cache


@pytest.fixture
def banked(tmp_path):
    """A cache with a token bank in which every unit has a slot, and 300 tokens."""
    cache = disk(tmp_path, RING + MARGIN + 2 * N_PAGE + 40)
    bank = cache._own_bank(shared=False)
    bank.open(UNIT)
    filled(cache, 300)
    fill(bank)
    return cache


def fill(bank):
    slots = bank._maps["slots"]
    slots[...] = np.arange(slots.shape[2])
    bank._maps["owner"][...], bank._maps["used"][...] = 5, 7


def first_dropped(bank):
    """The first unit of the bank that is dropped, in all layers and heads."""
    slots, n = bank._maps["slots"], bank._maps["slots"].shape[2]
    held = (slots >= 0).all(axis=(0, 1))
    unit = int(held.sum())
    assert held[:unit].all()
    assert (slots[:, :, unit:] == -1).all()
    assert (bank._maps["owner"][:, :unit] == 5).all()
    assert (bank._maps["owner"][:, unit:n] == -1).all()
    assert (bank._maps["used"][:, unit:n] == -ops.KV_OLD).all()
    assert (bank._maps["used"][:, n:] == 7).all()
    return unit


def test_a_bank_drops_what_is_written_anew(banked):
    bank, n_unit = banked._bank, N_CTX // UNIT
    assert bank._maps["slots"].shape == (HP.n_layer, HP.n_head_kv, n_unit)
    assert first_dropped(bank) == n_unit
    banked.begin(300, 1)
    assert first_dropped(bank) == n_unit  # a step that goes on
    banked.finish(300, 1)
    banked.begin(290, 3)
    assert first_dropped(bank) == 290 // UNIT
    fill(bank)
    banked.truncate(270)
    assert first_dropped(bank) == 270 // UNIT
    fill(bank)
    banked.write(1, *rows(70), 2)
    assert first_dropped(bank) == 2 * PAGE // UNIT


def test_a_bank_that_was_given_something_else_is_empty(banked):
    bank = banked._bank
    bank.state[ops.BANK_STATE.n_bad // 8] = 1
    banked.begin(300, 1)
    with pytest.raises(KVFileError, match="was changed"):
        banked.finish(300, 1)
    assert first_dropped(bank) == 0
    banked.finish(300, 1)  # it is said once


def test_a_bank_counts_units_of_k_and_v(banked):
    at, before = ops.BANK_STATE, banked.counts
    banked._bank.state[[at.n_hit // 8, at.n_miss // 8, at.n_read // 8]] = 30, 12, 5000
    both = UNIT * TYPES.row_bytes(HP.head_dim)
    asked = 42 * both
    assert banked.counts == KVCounts(
        before.n_hit + 60, before.n_miss + 24, before.n_ahead, before.n_read + 5000,
        before.n_written, before.n_chosen + asked, before.n_covered + asked,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n_more", "shared", "n_bank"),
    [
        (40, False, 40),  # all that no op needs
        (least(N_CTX) - 1, False, None),
        (least(N_CTX), False, least(N_CTX)),
        (least(N_CTX) + 9, True, least(N_CTX)),  # and 8 pages stay for each layer
        (400, True, (RING + MARGIN + N_PAGE + 400) // 2),
    ],
)
def test_a_bank_takes_the_memory_that_no_op_needs(tmp_path, n_more, shared, n_bank):
    n_frame = RING + MARGIN + N_PAGE + n_more
    cache = disk(tmp_path, n_frame)
    bank = cache._own_bank(shared=shared)
    if n_bank is None:
        assert bank is None
        return
    assert bank._n_bank == n_bank
    assert cache._own_bank(shared=shared) is bank
    for side in cache._sides:
        assert side.n_spare() == n_frame - n_bank


def test_a_session_that_has_begun_gets_no_bank(tmp_path):
    cache = disk(tmp_path, RING + MARGIN + 2 * N_PAGE + 40)
    cache.begin(0, 1)
    assert cache._own_bank(shared=False) is None


def test_a_bank_begins_empty_at_pass_1():
    bank = TokenBank(HP, N_CTX - 5, TYPES, least(N_CTX))
    state = np.zeros(ops.BANK_STATE_SIZE, np.int64)
    state[ops.BANK_STATE.serial // 8] = 1
    np.testing.assert_array_equal(bank.state, state)
    assert bank.arrays == (bank.state,)
    bank.truncate(0)  # it has no units yet
    bank.open(16)
    bank.open(64)
    assert bank.unit == 16
    assert first_dropped_of_new(bank)
    assert [bank.fits(block) for block in (1, 8, 16, 32, 5)] == [True, True, True, False, False]
    assert len(bank.arrays) == 4
    small = TokenBank(HP, N_CTX, TYPES, least(N_CTX), 1)
    assert small.unit == LEAST_UNIT


def first_dropped_of_new(bank):
    maps = bank._maps
    return (
        (maps["slots"] == -1).all()
        and (maps["owner"] == -1).all()
        and (maps["used"] == -ops.KV_OLD).all()
        and maps["slots"].shape[2] == N_CTX // 16
        and maps["owner"].shape[1] == least(N_CTX) * PAGE // 16
    )


# ---- reading -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("pos", "n_unit"), [(65, 1), (80, 1), (81, 2), (127, 4)])
def test_a_page_that_is_gone_on_with_is_read_up_to_there(tmp_path, pos, n_unit):
    cache = filled(disk(tmp_path, RING + MARGIN), 128)
    cache.truncate(pos)
    before = cache.counts.n_read
    cache.begin(pos, 1)
    n_head = HP.n_layer * HP.n_head_kv
    assert cache.counts.n_read - before == 2 * n_head * n_unit * UNIT_BYTES
    cache.finish(pos, 1)


def test_units_are_counted_as_they_are_found(tmp_path):
    cache = filled(disk(tmp_path, RING + MARGIN + 4), 256)
    before = cache.counts
    need = np.zeros((4, HP.n_head_kv * PAGE // UNIT), bool)
    need[1, :3] = need[3, 5] = True
    for n_hit, n_miss, n_read in ((0, 8, 8), (8, 8, 8)):  # K and V
        cache.fetch_units(0, [need, need])
        found = cache.counts
        assert (found.n_hit - before.n_hit, found.n_miss - before.n_miss) == (n_hit, n_miss)
        assert found.n_read - before.n_read == n_read * UNIT_BYTES


def test_what_a_step_asks_twice_is_read_ahead_together(tmp_path):
    """And what another step asked for is dropped."""
    cache = filled(disk(tmp_path, RING + MARGIN + 4), 256)
    one, other = np.zeros((2, 4, HP.n_head_kv * PAGE // UNIT), bool)
    one[1, 2], other[3, 0] = True, True
    cache.begin(256, 1)
    for need in (one, other):
        cache.fetch_units(0, [need])
    step, found = cache._needed[0, 0]
    np.testing.assert_array_equal(found, one | other)
    cache.begin(257, 1)
    cache.fetch_units(0, [other])
    assert cache._needed[0, 0][0] == step + 1
    np.testing.assert_array_equal(cache._needed[0, 0][1], other)
    n_ahead = cache.counts.n_ahead
    cache._read_ahead(0)
    cache._join()
    assert cache.counts.n_ahead - n_ahead == 0  # they are there


class Writing:
    """A write that is not done before it is waited for."""

    def __init__(self, error=None):
        self.waited, self.error = 0, error

    def done(self):
        return self.waited > 0

    def exception(self):
        self.waited += 1
        return self.error


CALLS = {
    "truncate": lambda cache: cache.truncate(70),
    "read": lambda cache: cache.read(0, 200),
    "write": lambda cache: cache.write(1, *rows(10), 1),
    "drop_cached": lambda cache: cache.drop_cached(),
}


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_waits_for_writes_and_a_failed_one_is_tried_again(tmp_path, call, failing):
    """A caller that needs the file gets the error; for the others memory has the data."""
    cache = filled(disk(tmp_path, RING + MARGIN + 8), 200)
    error = KVFileError("full") if failing else None
    job, n_written = Writing(error), cache.counts.n_written
    cache._writing = [(job, 0, 0, np.array([1, 2]))]
    for side in cache._sides:
        side.allocate(0, np.array([1, 2]))
    if failing and call == "drop_cached":
        with pytest.raises(KVFileError, match="full"):
            CALLS[call](cache)
    else:
        CALLS[call](cache)
    assert (job.waited, cache._writing, cache._failed) == (1, [], failing)
    if call in ("read", "drop_cached"):
        assert [side.is_dirty(0, 1) for side in cache._sides] == [failing, True]
        n = 0 if failing else 2 * cache._sides[0].page_bytes
        assert cache.counts.n_written - n_written == n


def test_writes_are_looked_at_without_waiting_while_there_is_room(tmp_path):
    cache = filled(disk(tmp_path, RING + MARGIN + 8), 128)
    late, done = Writing(), Writing()
    done.waited = 1
    cache._writing = [(late, 0, 0, np.array([0])), (done, 0, 1, np.array([0]))]
    cache._settle()
    assert [job for job, *_ in cache._writing] == [late]
    assert (late.waited, done.waited) == (0, 2)
    cache._settle(wait=True)
    assert (cache._writing, late.waited) == ([], 1)


def test_a_failed_write_is_reported_once_and_tried_again(tmp_path):
    cache = disk(tmp_path, RING + MARGIN + 8)
    cache.begin(0, PAGE)
    cache._writing = [(Writing(KVFileError("full")), 0, 0, np.array([0]))]
    with pytest.raises(KVFileError, match="full"):
        cache._settle(wait=True)
    assert cache._failed
    assert cache._sides[0].is_dirty(0, 0)
    cache.begin(PAGE, 1)
    assert not cache._failed
    assert not any(side.is_dirty(layer, 0) for side in cache._sides for layer in range(3))
    assert all(side.is_dirty(layer, 1) for side in cache._sides for layer in range(3))


# ---- pages that stay -----------------------------------------------------------------------------
def stepping(tmp_path, n_more=30):
    """A cache of 300 tokens, a decode Program over it, and the calls that read."""
    cache = disk(tmp_path, RING + MARGIN + 2 * N_PAGE + n_more)
    shape = SelectorShape(**SHAPE | {"window": (0, 0, 0)})
    tape = Tape("quest:budget=64,page=8,dense=0", shape, cache)
    tape.state.counters[0][...] = 296  # positions whose bounds are known
    program = tape.programs["decode"]
    return filled(cache, 300), program, cache.stops(program), tape


def kept_pages(cache):
    """By layer, the pages that both sides keep."""
    found = {}
    for layer in range(HP.n_layer):
        for page, frame in enumerate(cache._sides[0].table[layer]):
            if frame >= 0 and cache._sides[0]._kept[frame]:
                found.setdefault(layer, set()).add(page)
                assert cache._sides[1]._kept[cache._sides[1].table[layer, page]]
    return found


def test_what_every_step_reads_stays_until_a_chunk_comes(tmp_path):
    cache, program, stops, tape = stepping(tmp_path)
    tape._step[:] = 1, 300, 0, 300, 301, 0
    cache.begin(300, 1)
    left = cache.due(program, stops)
    assert len(stops) == 3  # bounds in each layer; attention reads the bank
    assert left == []
    assert kept_pages(cache) == {layer: set(pages) for layer, pages in cache._kept.items()}
    assert kept_pages(cache) == {layer: {4} for layer in range(3)}  # of positions 296 to 300
    before = dict(cache._kept)
    cache.due(program, stops)
    assert cache._kept == before
    cache.finish(300, 1)
    cache.begin(301, 64)
    assert kept_pages(cache) == {}
    assert cache.due(program, stops) == stops
    assert cache._stopping == {0, 1, 2}


def test_what_no_step_reads_any_more_may_go(tmp_path):
    cache, *_ = stepping(tmp_path)
    cache._keep({0: frozenset({1, 2}), 2: frozenset({0})})
    assert kept_pages(cache) == {0: {1, 2}, 2: {0}}
    cache._keep({0: frozenset({2})})
    assert kept_pages(cache) == {0: {2}}
    for side in cache._sides:
        assert not side._pinned.any()


def test_where_too_much_would_stay_every_call_stops(tmp_path, monkeypatch):
    cache, program, stops, tape = stepping(tmp_path)
    tape._step[:] = 1, 300, 0, 300, 301, 0
    cache.begin(300, 1)
    left = cache.due(program, stops)
    n_kept = sum(map(len, cache._kept.values()))
    n_other = MARGIN + 2 * HP.n_layer + (N_PAGE if left else 0)
    for n_frame, stopped in ((n_other + n_kept, left), (n_other + n_kept - 1, stops)):
        cache._n_frame = n_frame
        assert cache.due(program, stops) == stopped
    assert (cache._kept, cache._stopping) == ({}, {0, 1, 2})


@pytest.mark.parametrize(
    ("asked", "left", "kept", "stopping"),
    [
        ({1: (0, {1}), 4: (2, {0, 3}), 7: (2, {2})}, [], {0: {1}, 2: {0, 2, 3}}, set()),
        ({1: (0, {1}), 4: (1, None), 7: (1, {2})}, [4], {0: {1}, 1: {2}}, {1}),
        ({1: (0, None), 4: (0, None), 7: (2, set())}, [1, 4], {}, {0}),
    ],
)
def test_calls_stop_whose_pages_are_not_known(tmp_path, asked, left, kept, stopping):
    cache, program, *_ = stepping(tmp_path)
    seen = []

    def reader(layer, pages):
        return SimpleNamespace(layer=layer, pages=lambda n_page: (seen.append(n_page), pages)[1])

    cache._spans[program] = {at: reader(*found) for at, found in asked.items()}
    cache._n_tok, cache._stopping, cache._n_frame = 1, {0, 1, 2}, 100  # room for all
    assert cache.due(program, [*asked]) == left
    assert {layer: set(pages) for layer, pages in cache._kept.items()} == kept
    assert kept_pages(cache) == kept
    assert cache._stopping == stopping
    assert seen == [5] * 3, "pages of 300 tokens"


def test_each_layer_gets_what_the_next_one_reads(tmp_path):
    """The last layer gets that of the first, which runs next, in the step after."""
    cache, program, *_ = stepping(tmp_path)
    found = []
    for call in program.calls:
        if call.spec.op is ops.BANK_LOOKUP:
            fields = dict(zip(call.spec.op.fields, call.values, strict=True))
            names = "indptr", "indices", "block", "n_row", "layer"
            found.append([fields[name] for name in names])
    assert [layer for *_, layer in found] == [0, 1, 2]
    ahead = [array.tolist() for array in cache._banked[program].ahead]
    assert ahead == [*found[1:], found[0]]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 4), (130, 200)], {0, 2, 3}),
        ([(0, PAGE * MOST_KEPT)], set(range(MOST_KEPT))),
        ([(5, PAGE * MOST_KEPT + 1)], None),
        ([(PAGE, PAGE * (MOST_KEPT + 1))], set(range(1, MOST_KEPT + 1))),
        ([(64, 1 << 40)], set(range(1, 20))),
        ([], set()),
    ],
)
def test_a_call_reads_few_pages_or_it_stops(monkeypatch, spans, expected):
    reader = disk_tier._SpanReader.__new__(disk_tier._SpanReader)
    reader._reads = reader._fields = None
    reader._is_known = True
    monkeypatch.setattr(disk_tier.reads, "spans", lambda reads, fields: spans)
    n_page = 20 if spans and spans[-1][1] > 1 << 30 else 99
    assert reader.pages(n_page) == expected
    reader._is_known = False
    assert reader.pages(n_page) is None


# ---- a GPU's frames ------------------------------------------------------------------------------
def on_gpu(n_frame, n_ctx=N_CTX):
    return GpuPageCache(HP, n_ctx, TYPES, n_frame * PAGE_BYTES, N_UBATCH, lambda x: x)


def test_the_least_memory_of_a_gpu_is_said(tmp_path):
    n_least = 1 + RING + 16
    assert on_gpu(n_least)._n_cache == 16
    on_gpu(n_least, 16 * PAGE)
    with pytest.raises(ValueError, match=r"kv_vram is .* raise kv_vram, or lower n_ctx"):
        on_gpu(n_least, 16 * PAGE + 1)
    with pytest.raises(ValueError, match=r"this context needs 1 MiB"):
        on_gpu(n_least - 1)
    assert on_gpu(n_least + 15)._n_cache == 16
    assert on_gpu(n_least + 16)._n_cache == 32


@pytest.mark.parametrize("choosing", [False, True])
def test_a_gpu_has_a_bank_where_a_method_chooses_and_there_is_room(choosing):
    n_bank = -(-least(N_CTX) // 16) * 16
    for n_more, found in ((n_bank - 16, False), (n_bank, choosing)):
        cache = on_gpu(1 + RING + 16 + n_more)
        cache.expect(choosing=choosing)
        assert (cache._bank is not None) is found
        assert cache._n_cache == (16 if found else 16 + n_more)
        assert (cache._used == -ops.KV_OLD).all()
        assert (cache._owner == -1).all()
        assert len(cache.arrays) == (10 if found else 6)
        assert len(cache.counters) == (2 if found else 1)
    if choosing:
        assert (cache._bank._n_bank, cache._bank.unit) == (n_bank, UNIT)


def test_a_gpus_bank_may_be_as_small_as_it_can_be():
    n_page = next(n for n in range(16, 40) if least(n * PAGE) % 16 == 0)
    n_least = -(-n_page // 16) * 16
    for n_less, found in ((0, True), (16, False)):
        cache = on_gpu(1 + RING + n_least + least(n_page * PAGE) - n_less, n_page * PAGE)
        cache.expect(choosing=True)
        assert (cache._bank is not None) is found
        assert len(cache._frames[0]) == RING + n_least + (0 if found else least(n_page * PAGE) - 16)


def test_a_gpu_has_positions_up_to_the_last_that_was_reserved():
    cache = on_gpu(1 + RING + 16)
    k, v = rows(200)
    for layer in range(HP.n_layer):
        cache.write(layer, k, v)
    assert len(cache.pages_from(64)[0][0]) == 200 - 64
    cache.truncate(150)
    assert len(cache.pages_from(0)[0][0]) == 150
    cache.truncate(190)
    cache.reserve(64, 128)
    assert len(cache.pages_from(0)[0][0]) == 150
    cache.reserve(150, 151)
    assert len(cache.pages_from(0)[0][0]) == 151


def test_pages_of_a_gpu_are_counted_in_bytes_and_units_of_its_bank_too():
    cache, at = on_gpu(1 + RING + 16 + 64), ops.KV_STATE
    cache._state[[at.n_hit // 8, at.n_miss // 8]] = 30, 7
    assert cache.counts == KVCounts(n_hit=30, n_miss=7, n_read=7 * PAGE_BYTES)
    cache.expect(choosing=True)
    at = ops.BANK_STATE
    cache._bank.state[[at.n_hit // 8, at.n_miss // 8]] = 100, 10
    unit = UNIT * TYPES.row_bytes(HP.head_dim)
    assert cache.counts == KVCounts(n_hit=130, n_miss=17, n_read=7 * PAGE_BYTES + 10 * unit)


# ---- several caches as one -----------------------------------------------------------------------
class Spied:
    """A cache that writes down what it is asked."""

    types, resident, kv_ram, kv_vram = TYPES, True, None, None

    def __init__(self, name, capacity=640, **facts):
        self.name, self.capacity, self.seen = name, capacity, []
        self.table = np.zeros((9, 4), np.int32)
        self.arrays = self.tables = self.counters = (self.table,)
        self.counts = None
        for fact, value in facts.items():
            setattr(self, fact, value)

    def view(self, layer):
        return SimpleNamespace(k_table=self.table[layer], cache=self.name, layer=layer)

    def __getattr__(self, hook):
        if hook.startswith("__"):
            raise AttributeError(hook)

        def seen(*given, **named):
            self.seen.append((hook, *given, *named.values()))
            return f"{self.name}.{hook}"

        return seen


def test_a_layers_rows_are_where_it_is():
    a, b = Spied("a", 640), Spied("b", 320)
    both = CompositeKV([([0, 3], a), ([1, 2], b)])
    assert both.capacity == 320
    for layer, (cache, own) in enumerate([(a, 0), (b, 0), (b, 1), (a, 1)]):
        view = both.view(layer)
        assert (view.cache, view.layer) == (cache.name, own)
        assert both.read(layer, 70, 1) == f"{cache.name}.read"
        assert cache.seen == [("read", own, 70, 1)]
        cache.seen.clear()
        k = np.zeros((70, 1))
        both.write(layer, k, k, 1)
        assert cache.seen == [("reserve", 64, 134), ("write", own, k, k, 1)]
        for one in (a, b):
            assert one.seen[0] == ("reserve", 64, 134)  # where the layer is not, too
            one.seen.clear()
        fields = {"k_table": view.k_table}
        assert both.before("program", "step", "op", {}, fields) == f"{cache.name}.before"
        cache.seen.clear()


def test_all_caches_hear_of_the_whole_sequence():
    a, b = Spied("a"), Spied("b")
    both = CompositeKV([([0], a), ([1], b)])
    both.reserve(5, 9)
    both.truncate(7)
    both.expect(choosing=True)
    both.record_begin("program", "step")
    both.record_end("program", "step")
    both.begin(3, 4)
    both.finish(3, 4)
    both.drop_cached()
    assert both.pages_from(64) == ["a.pages_from", "b.pages_from"]
    both.put_back(64, ["of a", "of b"])
    hooks = [
        ("reserve", 5, 9), ("truncate", 7), ("expect", True), ("record_begin", "program", "step"),
        ("record_end", "program", "step"), ("begin", 3, 4), ("finish", 3, 4), ("drop_cached",),
        ("pages_from", 64),
    ]  # fmt: skip
    assert a.seen == [*hooks, ("put_back", 64, "of a")]
    assert b.seen == [*hooks, ("put_back", 64, "of b")]
    assert [x is a.table or x is b.table for x in both.arrays] == [True, True]
    assert len(both.tables) == len(both.counters) == 2


def test_a_sequence_is_shared_by_all_caches_or_by_none():
    class Sharing(Spied):
        def share(self, other, n_tokens):
            self.seen.append(("share", other.name, n_tokens))
            return self.shares

    def pair(names, *shares):
        parts = [Sharing(name, shares=does) for name, does in zip(names, shares, strict=True)]
        return CompositeKV([([i], part) for i, part in enumerate(parts)]), parts

    theirs, _ = pair("cd", True, True)
    mine, parts = pair("ab", True, True)
    assert mine.share(theirs, 70)
    assert [part.seen for part in parts] == [[("share", "c", 70)], [("share", "d", 70)]]
    mine, parts = pair("ab", True, False)
    assert not mine.share(theirs, 70)
    assert all(part.seen[-1] == ("truncate", 0) for part in parts)
    assert not mine.share(parts[0], 70)
    assert not mine.share(pair("c", True)[0], 70)


def test_stops_go_to_the_cache_that_they_are_of():
    class Stopping(Spied):
        def stops(self, program):
            return self.calls

        def due(self, program, stops):
            return stops[1:]

    a, b = Stopping("a", calls=[1, 4, 6]), Stopping("b", calls=[2, 5])
    both, program = CompositeKV([([0], a), ([1], b)]), SimpleNamespace()

    class Program:
        """One that a weak reference may hold."""

    program = Program()
    assert both.stops(program) == [1, 2, 4, 5, 6]
    assert both.due(program, [1, 2, 5, 6]) == [5, 6]
    both.fetch(program, 5)
    both.fetch(program, 4)
    assert (a.seen, b.seen) == ([("fetch", program, 4)], [("fetch", program, 5)])


def test_numbers_of_caches_are_added_up_where_there_are_any():
    some = KVCounts(1, 2, 3, 4, 5, 6, 7)
    a = Spied("a", counts=some, kv_ram=5, resident=False)
    b = Spied("b", counts=some, kv_ram=7, kv_vram=9)
    both, none = CompositeKV([([0], a), ([1], b)]), CompositeKV([([0], Spied("c"))])
    assert both.counts == KVCounts(2, 4, 6, 8, 10, 12, 14)
    assert (both.kv_ram, both.kv_vram, both.resident) == (12, 9, False)
    assert (none.counts, none.kv_ram, none.kv_vram, none.resident) == (None, None, None, True)
    assert divided(100, [1, 3]) == [25, 75]
    assert divided(100, [1, 2]) == [33, 66]


def test_a_composite_of_kinds_records_for_each(tmp_path):
    both = cache_of("composite", tmp_path)
    assert both.capacity == N_CTX
    assert both.kv_vram == (1 + 2 * 2 + 16) * PAGE_BYTES


# --- calls to the system that move less than they were asked to ----------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_a_call_that_moves_a_part_is_followed_by_one_for_the_rest(tmp_path, most):
    """Three buffers of 3, 2 and 4 bytes, to byte 10 and on."""
    file, text, calls = KVFile(tmp_path), bytearray(b"abcdefghi"), []

    def move(handle, buffers, at):
        asked = b"".join(buffers)
        assert len(calls) < 9, "every call moves a byte"
        calls.append((asked, at))
        return min(most, len(asked))

    views = [memoryview(text)[a:b] for a, b in ((0, 3), (3, 5), (5, 9))]
    assert file._all(move, views, 10)
    assert calls == [(bytes(text[n:]), 10 + n) for n in range(0, 9, most)]
    n_moved = iter([1, 2, 0])
    assert not file._all(lambda *_: next(n_moved), views, 0), "the file ends there"
    file.close()


def test_buffers_without_their_first_bytes():
    buffers = [memoryview(b"abc"), memoryview(b"de")]
    left = [[bytes(buffer) for buffer in _after(buffers, n)] for n in range(6)]
    assert left == [[b"abc", b"de"], [b"bc", b"de"], [b"c", b"de"], [b"de"], [b"e"], []]


@pytest.mark.parametrize(
    ("jumps", "runs"),
    [
        ([], [(0, 1)]),
        ([0, 0], [(0, 3)]),
        ([1, 0], [(0, 1), (1, 3)]),
        ([1, 1, 0, 1], [(0, 1), (1, 2), (2, 4), (4, 5)]),
    ],
)
def test_runs_end_at_jumps(jumps, runs):
    assert _cuts(np.array(jumps, bool), len(jumps) + 1) == runs


@pytest.mark.parametrize(
    ("spans", "units", "n"),
    [
        ([(0, 1)], [0], 1),
        ([(UNIT, 2 * UNIT)], [1], UNIT),
        ([(UNIT - 1, UNIT + 1)], [0, 1], 2),
        ([(3 * UNIT, 3 * UNIT)], [], 0),
        ([(0, 1), (5 * UNIT, 6 * UNIT)], [0, 5], UNIT + 1),
        ([(0, 10 * PAGE)], list(range(2 * PAGE // UNIT)), 2 * PAGE),
    ],
)
def test_spans_of_positions_are_units_of_pages(tmp_path, spans, units, n):
    """Of two pages; what lies behind them is not there."""
    cache = disk(tmp_path, RING + MARGIN + 2 * N_PAGE)
    need, n_position = cache._spanned(spans, 2)
    assert need.shape == (2, HP.n_head_kv, PAGE // UNIT)
    for head in range(HP.n_head_kv):
        assert np.flatnonzero(need[:, head].reshape(-1)).tolist() == units
    assert n_position == HP.n_head_kv * n
