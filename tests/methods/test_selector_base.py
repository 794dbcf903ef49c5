"""What methods share: the last queries that are kept, and when decode steps start anew."""

import pytest

from tamis.select.base import LastQueries, SelectorShape, SelectorState, Steps

SHAPE = SelectorShape(2, 2, 1, 16, n_ctx=128, n_ubatch=16, window=(0, 0))


@pytest.mark.parametrize("n_tokens", [0, 7, 8, 9, 10, 11, 12])
def test_queries_of_dropped_positions_are_dropped(n_tokens):
    """Of positions 8 to 11, those from n_tokens on."""
    queries = LastQueries(SHAPE, 4)
    for layer in range(2):
        queries.of(layer)["past_pos"][:] = 8, 9, 10, 11
    queries.truncate(n_tokens)
    expected = [p if p < n_tokens else -1 for p in (8, 9, 10, 11)]
    assert [queries.of(layer)["past_pos"].tolist() for layer in range(2)] == [expected] * 2


def test_a_step_that_follows_the_last_one_continues_it():
    steps = Steps()
    assert [steps.fresh(i) for i in (5, 6, 7, 9, 10)] == [True, False, False, True, False]
    assert steps.since(12) == 3, "since position 9"


@pytest.mark.parametrize(("n_tokens", "fresh"), [(0, True), (7, True), (8, False), (9, False)])
def test_a_step_starts_anew_where_one_before_it_was_dropped(n_tokens, fresh):
    """After steps at 5, 6 and 7; 8 tokens hold the last of them."""
    steps = Steps()
    for i in (5, 6, 7):
        steps.fresh(i)
    steps.truncate(n_tokens)
    assert steps.fresh(8) == fresh


def test_a_period_has_as_many_steps():
    steps = Steps(period=3)
    assert [steps.fresh(i) for i in range(4, 12)] == [True, False, False] * 2 + [True, False]


def test_recording_asks_for_step_0_and_leaves_nothing():
    steps = Steps()
    assert steps.fresh(0)
    assert steps.fresh(1), "whatever the first step will be"


@pytest.mark.parametrize("old", ["decode", "prefill"])
def test_a_hook_of_an_older_name_is_refused(old):
    """It would never be called: the method would be dense attention in silence."""
    with pytest.raises(TypeError, match=f"rename it select_{old}"):
        type("State", (SelectorState,), {old: lambda self, rec, layer, q, kv: None})
