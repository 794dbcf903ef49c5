"""Recurrent states: what is live, what snapshots restore, what is left to compute again."""

import numpy as np
import pytest

from tamis.kv.recurrent import RecurrentStates, StateKey, state_bytes

SHAPES = {StateKey(0, "conv"): (3, 5), StateKey(0, "scan"): (2, 4, 4), StateKey(2, "scan"): (7,)}


def new_states(most=8):
    return RecurrentStates(SHAPES, most)


def written(n_tokens):
    """What a stand-in of kernels makes of a state after so many tokens; zero before the first."""
    values = np.random.default_rng(n_tokens).standard_normal(15 + 32 + 7).astype(np.float32)
    return values if n_tokens else 0 * values


def advance(states, n_tokens, keep=True):
    states.begin()
    states.live[:] = written(n_tokens)
    states.end(n_tokens)
    if keep:
        states.keep()


def test_views_are_parts_of_the_live_state_and_stay_where_they_are():
    states = new_states()
    views = {key: states.view(*key) for key in SHAPES}
    assert {key: view.shape for key, view in views.items()} == SHAPES
    advance(states, 4)
    states.go_back(0)
    advance(states, 9)
    for key, view in views.items():
        assert view.ctypes.data == states.view(*key).ctypes.data
    np.testing.assert_array_equal(
        np.concatenate([view.reshape(-1) for view in views.values()]), written(9)
    )


@pytest.mark.parametrize(
    ("n", "found"), [(0, 0), (9, 0), (10, 10), (15, 10), (20, 20), (24, 20), (25, 25), (40, 25)]
)
def test_the_newest_state_at_or_before_is_restored(n, found):
    """Snapshots after 10 and 20 tokens; the live state, after 25, is good where it is allowed."""
    states = new_states()
    for n_tokens in (10, 20):
        advance(states, n_tokens)
    advance(states, 25, keep=False)
    assert states.go_back(n) == found
    assert states.n_tokens == found
    np.testing.assert_array_equal(states.live, written(found))
    assert states.snapshots == [s for s in (10, 20) if s <= n]


def test_a_state_that_was_being_written_is_recovered():
    states = new_states()
    advance(states, 10)
    states.begin()
    states.live[::2] = np.nan
    assert states.n_tokens is None
    assert states.go_back(10) == 10
    np.testing.assert_array_equal(states.live, written(10))


def test_an_interrupted_state_is_not_taken_for_the_one_before_it():
    states = new_states()
    advance(states, 10)
    advance(states, 12, keep=False)
    states.begin()
    states.live[3] = np.nan
    assert states.go_back(12) == 10
    np.testing.assert_array_equal(states.live, written(10))


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize("step", [1, 64])
def test_of_many_snapshots_some_near_and_some_far_are_kept(most, step):
    """What must be computed again is a share of the distance that shrinks with their number."""
    states, n = new_states(most), 1000 * step
    for n_tokens in range(step, n + 1, step):
        advance(states, n_tokens)
    assert len(states.snapshots) == most
    assert states.snapshots[-1] == n
    gaps = np.diff([0, *states.snapshots])
    distance = n - np.array([0, *states.snapshots[:-1]])
    if most == 8:
        # Eight snapshots of a thousand: spaced by a factor of 1000^(1/8) = 2.4, twice that at most.
        assert (gaps[:-1] <= 0.8 * distance[:-1] + step).all()
    for n_tokens in states.snapshots[::-1]:
        assert states.go_back(n_tokens) == n_tokens
        np.testing.assert_array_equal(states.live, written(n_tokens))


@pytest.mark.parametrize(("n", "found"), [(30, 25), (25, 25), (24, 20), (5, 0)])
def test_a_copy_goes_on_by_itself(n, found):
    states, other = new_states(), new_states()
    for n_tokens in (10, 20):
        advance(other, n_tokens)
    advance(other, 25, keep=False)
    advance(states, 7)
    assert states.copy(other, n) == found
    np.testing.assert_array_equal(states.live, written(found))
    advance(states, found + 50)
    assert other.n_tokens == 25
    np.testing.assert_array_equal(other.live, written(25))
    assert other.go_back(22) == 20
    np.testing.assert_array_equal(other.live, written(20))


def test_a_loaded_state_has_no_past():
    states = new_states()
    advance(states, 7)
    states.load(written(30), 30)
    assert states.go_back(30) == 30
    np.testing.assert_array_equal(states.live, written(30))
    assert states.go_back(29) == 0
    assert not states.live.any()


def test_the_plan_counts_all_that_may_be_kept():
    assert state_bytes(SHAPES, most=3) == 4 * new_states().live.nbytes == 4 * 4 * (15 + 32 + 7)
    assert state_bytes({}) == 0


def test_a_devices_states_are_those_of_its_layers():
    states = new_states()
    states.live[:] = np.arange(54)
    firsts = {layers: [view.flat[0] for view in states.views(range(*layers))]
              for layers in ((0, 3), (0, 1), (1, 2), (2, 3), (0, 0))}  # fmt: skip
    assert firsts == {
        (0, 3): [0, 15, 47], (0, 1): [0, 15], (1, 2): [], (2, 3): [47], (0, 0): []
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "now", "left"),
    [
        # Of 30 it is 30/100, of 15 it is (40 - 15)/(100 - 15) = 0.294, of 40 it is 1.
        ((15, 30, 40), 100, [15, 40, 100]),
        # Of 10 it is 30/100, of 30 it is 80/90, of 90 it is 70/70.
        ((10, 30, 90), 100, [30, 90, 100]),
        # Of 4 it is 6/12, of 6 it is (8 - 4)/(12 - 4), the same: the earlier one goes.
        ((4, 6, 8), 12, [6, 8, 12]),
    ],
)
def test_a_snapshots_share_of_the_way_back_is_counted_from_the_start(before, now, left):
    states = new_states(3)
    for n_tokens in before:
        advance(states, n_tokens)
    advance(states, now)
    assert states.snapshots == left
    for n_tokens, values in states.kept():
        np.testing.assert_array_equal(values, written(n_tokens))


@pytest.mark.parametrize(("most", "kept"), [(1, [30]), (2, [20, 30]), (3, [10, 20, 30])])
def test_a_copy_keeps_as_many_snapshots_as_it_has_room_for(most, kept):
    other, states = new_states(), new_states(most)
    for n_tokens in (10, 20, 30):
        advance(other, n_tokens)
    assert states.copy(other, 30) == 30
    assert states.snapshots == kept
    for (n_tokens, values), (_, theirs) in zip(
        states.kept()[::-1], other.kept()[::-1], strict=False
    ):
        np.testing.assert_array_equal(values, written(n_tokens))
        assert not np.shares_memory(values, theirs)


def test_no_snapshot_is_taken_twice_or_of_nothing():
    states = new_states()
    states.keep()
    assert states.snapshots == []
    advance(states, 10)
    states.keep()
    assert states.snapshots == [10]
    with pytest.raises(ValueError, match="0 snapshots, expected 1 or more"):
        new_states(0)
