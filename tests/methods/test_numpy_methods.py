"""The methods' algorithms in NumPy, which kernels are compared with: by hand, on few numbers."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE, KVView
from tamis.select.base import SelectorShape
from tamis.select.hip import search
from tamis.select.in_numpy import NumpySelector
from tamis.select.magicpig import codes
from tamis.select.tactic import (
    Order,
    budget_by_fit,
    budget_by_samples,
    budgets_joint,
    densities,
)
from tamis.select.vertical_slash import VerticalSlash, lines

WEIGHTS = np.array([[1, 4, 0, 2, 0], [0, 1, 5, 0, 3]], float)  # of queries at positions 3 and 4


@pytest.mark.parametrize(
    ("parameters", "columns", "diagonals"),
    [
        # Columns have 1, 5, 5, 2, 3; diagonals 0, 2, 9, 0, 5.
        ({"n_vertical": 3, "n_slash": 2, "sink": 1, "local": 1}, [0, 1, 2], [2, 4]),
        ({"n_vertical": 1, "n_slash": 1, "sink": 0, "local": 1}, [1], [4]),
        ({"n_vertical": 2, "n_slash": 3, "sink": 2, "local": 2}, [0, 1], [2, 3, 4]),
        ({"n_vertical": 4, "n_slash": 4, "sink": 0, "local": 2}, [1, 2, 3, 4], [1, 2, 3, 4]),
        ({"n_vertical": 9, "n_slash": 9, "sink": 9, "local": 9}, [*range(5)], [*range(5)]),
    ],
)
def test_lines_are_the_largest_sums(parameters, columns, diagonals):
    found = lines(VerticalSlash(**parameters), WEIGHTS)
    assert [x.tolist() for x in found] == [columns, diagonals]


@pytest.mark.parametrize("low", [0, 3])
@pytest.mark.parametrize("n_chunk", [1, 2, 3, 5])
def test_a_search_finds_the_peak_of_scores_that_fall_from_it(n_chunk, low):
    for n in range(1, 41):
        for peak in range(low, low + n):
            found = search(lambda b, peak=peak: -abs(b - peak), low, low + n, n_chunk)
            assert len(found) == min(n, n_chunk)
            assert found == sorted(set(found))
            assert low <= found[0] <= found[-1] < low + n
            if n_chunk > 1:
                assert peak in found


def test_a_search_keeps_the_best_halves():
    """Of 8 blocks two chunks of 4: 2 3 and 4 5 of them go on, by the scores of 2 and 4."""
    scores = [0, 9, 1, 0, 8, 2, 0, 3]
    asked = []

    def score(b):
        asked.append(b)
        return scores[b]

    assert search(score, 0, 8, 2) == [4, 5]
    assert asked == [0, 2, 4, 6, 2, 3, 4, 5]


def least(cumulated, need):
    """The first place where sums reach as much."""
    return next(i for i, x in enumerate(cumulated) if x >= need - 1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 12, 100])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_fit_goes_through_the_means_of_two_windows(n, share):
    weights = 5 / np.arange(1, n + 1) + 0.25
    n_first, outside, half = n // 4, 1.5, 16
    mean = {x: weights[max(0, x - half) : x + half].mean() for x in (n // 10, n * 6 // 10)}
    (x_1, mu_1), (x_2, mu_2) = ((n // 10, mean[n // 10]), (n * 6 // 10, mean[n * 6 // 10]))
    x_1, x_2 = max(x_1, 1), max(x_2, 2)
    a = (mu_1 - mu_2) / (1 / x_1 - 1 / x_2)
    curve = [a / x + (mu_2 - a / x_2) for x in range(1, n + 1)]
    known = [*weights[:n_first], *(max(0, x) for x in curve[n_first:])]
    need = share * (outside + sum(known)) - outside
    expected = 0 if need <= 0 else least(np.cumsum(known), need) + 1
    assert budget_by_fit(weights, n_first, outside, share) == expected


def test_a_window_of_the_fit_is_a_part_of_many_weights():
    """16 places on either side of two points, of more than 3,200 a 200th, and at most 64."""
    for n, half in ((3000, 16), (4000, 20), (20_000, 64)):
        weights = np.full(n, 0.1)
        for x in (n // 10, n * 6 // 10):
            weights[x - half : x + half] = 1.0  # nothing else is seen
        assert budget_by_fit(weights, 0, 0.0, 0.5) == n // 2


def test_weight_that_is_not_clustered_may_be_enough():
    weights = np.array([4.0, 3, 2, 1])
    assert budget_by_fit(weights, 4, 10.0, 0.5) == 0
    assert budget_by_samples(whole(weights, 2), 4, 10.0, 0.5, (4, 0.0)) == 0
    assert budget_by_fit(weights, 4, 0.0, 1.0) == 4
    assert budget_by_samples(whole(weights, 2), 4, 0.0, 1.0, (4, 0.0)) == 4


def whole(weights, size):
    """Clusters of so many positions; each of them weighs what its centroid says."""
    n = len(weights) // size
    logits = np.log(weights[::size])
    return Order(weights, np.full(n, size), logits)


FALLING = np.repeat(2.0 ** -np.arange(0, 10, 0.5), 4)  # 20 clusters of 4


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize(("n_first", "margin"), [(8, 0.0), (80, 0.0), (8, 0.5), (30, 0.25)])
def test_samples_of_exact_centroids_find_the_exact_budget(share, n_first, margin):
    """Whole clusters; what is not known is taken for so much more than samples say."""
    outside, ends = 2.0, np.arange(4, 81, 4)
    last = least(ends, max(20, n_first))  # this cluster is known, and the ones after are not
    each = FALLING.reshape(-1, 4).sum(axis=1)
    each[last + 1 :] *= 1 + margin
    need = share * (outside + each.sum()) - outside
    expected = 0 if need <= 0 else int(ends[least(each.cumsum(), need)])
    found = budget_by_samples(whole(FALLING, 4), n_first, outside, share, (16, margin))
    assert found == expected


def test_samples_lie_evenly_in_what_centroids_say():
    """Two unknown clusters of 4 and 12 positions, which hold half of the estimate each."""
    sizes, logits = np.array([20, 4, 12]), np.log([1.0, 3.0, 1.0])
    weights = np.r_[np.full(20, 1.0), np.full(4, 6.0), np.full(12, 1.0)]
    # Samples weigh 2 and 1 times what their centroids say: half of all each, 1.5 on average.
    need = 0.9 * (20 + 24 * 1.5)
    assert need < 20 + 1.5 * 24
    assert budget_by_samples(Order(weights, sizes, logits), 0, 0.0, 0.9, (8, 0.0)) == 36
    assert budget_by_samples(Order(weights, sizes, logits), 0, 0.0, 0.65, (8, 0.0)) == 24


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_each_head_needs_its_own_part_of_one_order(share, margin):
    """Clusters as dense as the heads' weights, up to a factor: samples are exact."""
    weights = np.stack([FALLING, 3 * FALLING])
    sizes, logits = np.full(20, 4), np.log(weights[:, ::4])
    outside, dense = np.array([1.0, 40.0]), FALLING[::4] / 7
    found = budgets_joint(Order(weights, sizes, logits), dense, 8, outside, share, (16, margin))
    for head, count in enumerate(found):
        known, more = weights[head, :20], weights[head, 20:].reshape(-1, 4).sum(axis=1)
        more = more * (1 + margin)
        need = share * (outside[head] + known.sum() + more.sum()) - outside[head]
        reached = [0, *known.cumsum(), *(known.sum() + more.cumsum())]
        places = [*range(21), *range(24, 81, 4)]
        assert count == places[least(reached, need)]


def test_the_density_of_a_cluster_is_a_members_share_of_all_heads():
    logits, sizes = np.log([[1.0, 2.0], [3.0, 1.0]]), np.array([2, 3])
    # Heads hold 1 * 2 + 2 * 3 = 8 and 3 * 2 + 1 * 3 = 9, and what is outside.
    found = densities(logits, sizes, np.array([2.0, 1.0]))
    np.testing.assert_allclose(found, [1 / 10 + 3 / 10, 2 / 10 + 1 / 10])


def test_codes_are_signs_of_products_for_rows_of_any_shape():
    planes = np.array([[1, -1, 0, 1, 9], [0, 1, -1, 1, 9]], float)  # the last is padding
    rows = np.array([[[1, 0], [0, 1], [1, 2]], [[-1, 0], [0, -1], [2, 1]]], float)
    found = codes(rows, planes, 2, 2)  # the first plane of a table is bit 0
    assert found.tolist() == [[[1, 2], [2, 2], [3, 2]], [[2, 0], [0, 1], [1, 2]]]
    assert codes(rows[0, 2], planes, 2, 2).tolist() == [3, 2]


def test_positions_that_numpy_chose_are_the_rows_of_a_selection():
    """Two KV heads of two heads each: three positions, then two; and fewer in the next step."""
    shape = SelectorShape(1, 4, 2, 2, n_ctx=PAGE, n_ubatch=1, window=(0,))
    pages, table = np.zeros((1, 2, PAGE, 2), np.float16), np.zeros(1, np.int32)
    chosen, hooks = [[5, 0, 2], [1, 3]], []
    rec = SimpleNamespace(
        n_tok=1, q_block=1, step=np.zeros(ops.STEP_SIZE, np.int64),
        program=SimpleNamespace(pause=hooks.append, add=lambda op, **fields: None),
    )  # fmt: skip
    state = NumpySelector(lambda q, k: chosen).open(shape)
    view = KVView(pages, pages, table, table)
    sel = state.select_decode(rec, 0, np.zeros((1, 4, 2), np.float32), view)
    for pos, chosen[:] in ((6, [[5, 0, 2], [1, 3]]), (7, [[7], [4, 6]])):
        rec.step[1] = pos
        hooks[0]()
        rows = [sel.indices[a:b].tolist() for a, b in zip(sel.indptr, sel.indptr[1:], strict=False)]
        assert rows == [sorted(row) for row in chosen for _ in range(2)]
    for chosen[:] in ([[8], [0]], [[-1], [0]], [[0], [0.5]], [[], [0]]):
        with pytest.raises(ValueError, match="expected whole numbers from 0 to 7, at least one"):
            hooks[0]()
    chosen[:] = [[0]] * 3
    with pytest.raises(ValueError, match="3 sets of positions, expected one, 2 "):
        hooks[0]()


def test_an_error_of_a_users_function_has_its_line_and_the_shapes():
    shape = SelectorShape(1, 4, 2, 2, n_ctx=PAGE, n_ubatch=1, window=(0,))
    pages, table = np.zeros((1, 2, PAGE, 2), np.float16), np.zeros(1, np.int32)
    hooks = []
    rec = SimpleNamespace(
        n_tok=1, q_block=1, step=np.zeros(ops.STEP_SIZE, np.int64),
        program=SimpleNamespace(pause=hooks.append, add=lambda op, **fields: None),
    )  # fmt: skip

    def wrong(q, k):
        return np.concatenate([np.arange(4), np.argsort(k)])

    state = NumpySelector(wrong).open(shape)
    view = KVView(pages, pages, table, table)
    state.select_decode(rec, 0, np.zeros((1, 4, 2), np.float32), view)
    line = wrong.__code__.co_firstlineno + 1
    said = rf"{re.escape(__file__)}:{line}: ValueError: .*q \[4, 2\] .*k \[1, 2, 2\] "
    with pytest.raises(ValueError, match=said) as found:
        hooks[0]()
    assert isinstance(found.value.__cause__, ValueError)
