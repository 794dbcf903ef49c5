"""Frames of pages in memory, and pages of a store: what is held, evicted, read and given back."""

from types import SimpleNamespace

import numpy as np
import pytest

from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.frame_pool import Frames, Load, OutOfFramesError
from tamis.kv.page_store import PageStore
from tamis.kv.paged import PagedKV
from tamis.kv.recurrent import RecurrentStates
from tamis.kv.types import KVTypes
from tamis.kv.unit_file import KVFile

N_LAYER, N_HEAD_KV, DIM, N_PAGE, UNIT = 3, 2, 4, 6, 16
PER_PAGE = N_HEAD_KV * PAGE // UNIT
HP = SimpleNamespace(
    n_layer=N_LAYER, n_head_kv=N_HEAD_KV, head_dim=DIM, latent=SimpleNamespace(n_latent=0)
)


@pytest.fixture
def make(tmp_path):
    def make(n_frame):
        return Frames(HP, "f16", n_frame, N_PAGE, UNIT, (KVFile(tmp_path), 0))

    return make


def need(*pages, units=range(PER_PAGE)):
    found = np.zeros((N_PAGE, PER_PAGE), bool)
    found[np.ix_(pages, list(units))] = True
    return found


def held(frames):
    """The pages in memory, of each layer."""
    return [np.flatnonzero(row >= 0).tolist() for row in frames.table]


def read(frames, layer, *pages, step=1, **how):
    """Look pages up as a step does that reads them."""
    load = frames.lookup(layer, need(*pages), step, **how)
    frames.loaded(load)
    frames.unpin()
    return load


def written(frames, layer, *pages):
    """Pages with bytes of their own, in memory and in the file."""
    numbers = np.array(pages)
    frames.allocate(layer, numbers)
    for page in pages:
        frames.frames.view(np.uint8)[frames.table[layer, page]] = 16 * layer + page + 1
    frames.write(layer, numbers)
    frames.clean(layer, numbers)


def test_pages_that_the_file_does_not_have_stay(make):
    frames = make(2)
    frames.allocate(0, np.array([0, 1]))
    assert frames.dirty_pages(0, N_PAGE).tolist() == [0, 1]
    assert frames.dirty_pages(0, 1).tolist() == [0]
    assert [frames.is_dirty(0, page) for page in (0, 1, 2)] == [True, True, False]
    with pytest.raises(OutOfFramesError) as missing:
        frames.allocate(1, np.array([0]))
    assert missing.value.n == 1
    assert frames.n_spare() == 0
    frames.clean(0, np.array([0]))
    assert not frames.is_dirty(0, 0)
    frames.allocate(1, np.array([3]))
    assert held(frames) == [[1], [3], []]
    assert frames.dirty_pages(0, N_PAGE).tolist() == [1]


def test_what_a_layer_has_not_asked_for_the_longest_goes_first(make):
    frames = make(4)
    for step, page in enumerate((0, 1, 2, 3), 1):
        read(frames, 0, page, step=step)
    read(frames, 0, 4, step=5)
    assert held(frames)[0] == [1, 2, 3, 4]
    read(frames, 0, 1, step=6)
    read(frames, 0, 5, step=7)
    assert held(frames)[0] == [1, 3, 4, 5], "the second was asked for again"


@pytest.mark.parametrize(("layer", "left"), [(0, 1), (1, 2), (2, 0)])
def test_of_pages_of_the_last_step_those_of_the_layer_go_that_runs_last(make, layer, left):
    """After layer 0 come 1 and 2, and then 0 again: its own page is needed last of all."""
    frames = make(3)
    for each in range(N_LAYER):
        read(frames, each, 0, step=1)
    frames.allocate(layer, np.array([5]))
    found = held(frames)
    assert found[layer] == [5]
    assert all(found[each] == [0] for each in range(N_LAYER) if each != layer)
    read(frames, left, 4, step=1)
    assert 5 in held(frames)[layer], "it is not in the file yet"


def test_old_pages_of_a_layer_that_runs_next_go_before_those_of_its_last_step(make):
    frames = make(3)
    read(frames, 1, 0, step=1)
    read(frames, 1, 1, step=2)
    read(frames, 2, 0, step=2)
    read(frames, 0, 0, step=2)
    assert held(frames) == [[0], [1], [0]]
    assert frames.n_spare() == 0
    read(frames, 1, 1, step=3)
    read(frames, 1, 2, step=4)  # its page 1 is old, but it is the only one
    assert held(frames) == [[0], [2], [0]]


def test_what_is_pinned_or_kept_stays(make):
    frames = make(3)
    read(frames, 0, 0, 1, 2)
    frames.keep(0, np.array([0]))
    frames.lookup(0, need(1), 2)
    read_ahead = frames.lookup(1, need(0, 1), 2, ahead=True)
    assert held(frames) == [[0, 1], [0], []], "as many as there are"
    assert len(read_ahead.numbers) == PER_PAGE
    with pytest.raises(OutOfFramesError):
        frames.lookup(2, need(0), 2)
    frames.release()
    frames.lookup(2, need(0), 2)
    assert held(frames) == [[1], [0], [0]]


def test_units_are_read_once_and_come_from_where_they_were_written(make):
    frames = make(2)
    written(frames, 1, 4)
    frames.drop(1, 0)
    some = frames.lookup(1, need(4, units=[1, 3]), 1)
    base = (1 * N_PAGE + 4) * PER_PAGE
    assert some.numbers.tolist() == [base + 1, base + 3]
    some.run()
    frames.loaded(some)
    again = frames.lookup(1, need(4), 2)
    assert again.numbers.tolist() == [base + i for i in range(PER_PAGE) if i not in (1, 3)]
    again.run()
    frames.loaded(again)
    assert (frames.frames.view(np.uint8)[frames.table[1, 4]] == 16 + 4 + 1).all()
    assert len(frames.lookup(1, need(4), 3).numbers) == 0
    out = np.zeros((PER_PAGE, frames.unit_bytes), np.uint8)
    frames.read_page(1, 4, out)
    assert (out == 21).all()


@pytest.mark.parametrize("n_valid", [0, 1, PER_PAGE])
def test_a_page_is_copied_from_its_frame_only_where_all_of_it_is_there(make, n_valid):
    frames = make(2)
    written(frames, 2, 3)
    frames.drop(2, 0)
    if n_valid:
        load = frames.lookup(2, need(3, units=range(n_valid)), 1)
        load.run()
        frames.loaded(load)
    out = np.zeros((PER_PAGE, frames.unit_bytes), np.uint8)
    frames.read_page(2, 3, out)
    assert (out == 16 * 2 + 3 + 1).all()


def test_dropped_frames_are_free_and_nothing_of_them_is_valid(make):
    frames = make(3)
    frames.allocate(0, np.array([0, 1, 2]))
    frames.drop(0, 1)
    assert held(frames) == [[0], [], []]
    assert frames.n_spare() == 2
    assert frames.dirty_pages(0, N_PAGE).tolist() == [0]
    assert len(frames.lookup(1, need(0), 1).numbers) == PER_PAGE
    few = make(3)
    few.limit(1)
    few.allocate(0, np.array([0]))
    with pytest.raises(OutOfFramesError, match=r"^1 frames are missing$"):
        few.allocate(0, np.array([1]))


@pytest.mark.parametrize("n_part", [1, 2, 3, 5])
def test_parts_of_a_load_are_all_of_it_once(n_part):
    seen = []
    numbers = np.arange(4)
    load = Load(numbers, numbers * 10, lambda n, rows: seen.append((n.tolist(), rows.tolist())))
    for part in range(n_part):
        load.run(part, n_part)
    assert [n for each, _ in seen for n in each] == [0, 1, 2, 3]
    assert [row for _, each in seen for row in each] == [0, 10, 20, 30]
    assert all(each for each, _ in seen), "no call for nothing"
    seen.clear()
    load.run()
    assert seen == [([0, 1, 2, 3], [0, 10, 20, 30])], "all of it where no part is named"


# --- pages of a store -----------------------------------------------------------------------------


def rows(n, seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, N_HEAD_KV, DIM)).astype(np.float16) for _ in range(2)]


def test_a_sequence_that_takes_anothers_pages_has_none_of_its_own_left():
    types = KVTypes("f16", "f16")
    store = PageStore(HP, types, 12)
    one, two = (PagedKV(HP, N_PAGE * PAGE, store) for _ in range(2))
    n = 2 * PAGE + 5
    given = [rows(n, layer) for layer in range(N_LAYER)]
    for layer, (k, v) in enumerate(given):
        one.write(layer, k, v)
        two.write(layer, *rows(4 * PAGE, 9))
    n_free = store.pool.n_free
    assert two.share(one, n)
    assert store.pool.n_free == n_free + 4
    assert (two._table >= 0).tolist() == [True] * 3 + [False] * (N_PAGE - 3)
    for layer, both in enumerate(given):
        for whole, late, expected in zip(two.read(layer, n), two.read(layer, n, 1), both,
                                         strict=True):  # fmt: skip
            np.testing.assert_array_equal(whole, expected)
            np.testing.assert_array_equal(late, expected[PAGE:])
    two.truncate(PAGE + 1)
    assert (two._table >= 0).tolist() == [True] * 2 + [False] * (N_PAGE - 2)
    two.truncate(PAGE)
    assert len(two._held) == 1
    assert not two.share(PagedKV(HP, PAGE, PageStore(HP, types, 1)), 0)
    kept = one.pages_from(PAGE)
    one.write(0, *rows(n, 5))
    one.put_back(PAGE, kept)
    np.testing.assert_array_equal(one.read(0, n, 1)[0], given[0][0][PAGE:])
    np.testing.assert_array_equal(one.read(0, n)[0][:PAGE], rows(n, 5)[0][:PAGE])


# --- snapshots ------------------------------------------------------------------------------------


def test_the_snapshot_goes_whose_neighbours_are_close_for_how_far_back_they_are():
    states = RecurrentStates({(0, "s"): (1,)}, most=3)
    for n in (10, 20, 100):
        states.end(n)
        states.live[:] = n
        states.keep()
    assert states.snapshots == [10, 20, 100]
    states.end(101)
    states.keep()
    # Shares of the way back from 101: of 10 it is 20/101, of 20 it is 90/91, of 100 it is 81/81.
    assert states.snapshots == [20, 100, 101]
    states.end(102)
    states.keep()
    # Of 20 it is 100/102, of 100 it is 81/82, of 101 it is 2/2.
    assert states.snapshots == [100, 101, 102]
    assert [values[0] for _, values in states.kept()] == [100, 100, 100]
