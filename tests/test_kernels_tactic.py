"""Tactic's ops against NumPy, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from test_kernels_attention import normal, page_table, paged
from test_kernels_select import rows_of

from tamis.jit_kernels import ops

DIMS = [16, 80]  # head_dim
GROUPS = [1, 3]
PANEL = 32
KERNELS = [
    *((op, (d,)) for d in DIMS
      for op in (ops.TACTIC_SEED, ops.TACTIC_ASSIGN, ops.TACTIC_MEAN, ops.TACTIC_BUDGET)),
    *((ops.TACTIC_MARK, (group,)) for group in GROUPS), (ops.TACTIC_SELECT, ()),
]  # fmt: skip


class Keys:
    """Keys of two KV heads, some of them equal, and where they lie."""

    def __init__(self, rng, n_kv, head_dim):
        self.k = normal(rng, n_kv, 2, head_dim).astype(np.float16)
        self.k[n_kv // 2 :: 7] = self.k[0]
        table = page_table(rng, n_kv, n_kv // 64 + 2)
        self.fields = {"k_pages": paged(self.k, table), "k_table": table, "n_head_kv": 2}


def panels(centroids, n_panel):
    """Centroids [n_head_kv, n, head_dim] in panels, what was there before where there is none."""
    n_head_kv, n, head_dim = centroids.shape
    rows = np.full((n_head_kv, n_panel * PANEL, head_dim), 3.5, np.float32)
    rows[:, :n] = centroids
    return rows.reshape(n_head_kv, n_panel, PANEL, head_dim).transpose(0, 1, 3, 2).copy()


def unpanelled(array, n):
    n_head_kv, n_panel, head_dim, _ = array.shape
    return array.transpose(0, 1, 3, 2).reshape(n_head_kv, n_panel * PANEL, head_dim)[:, :n]


def norms_of(centroids, n_panel):
    """Half the squared lengths, 1e30 where there is no centroid."""
    norms = np.full((len(centroids), n_panel * PANEL), 1e30, np.float32)
    norms[:, : centroids.shape[1]] = (centroids.astype(float) ** 2).sum(axis=2) / 2
    return norms


def extent_of(end, n_cluster):
    return np.array([end, n_cluster], np.int64)


@pytest.mark.parametrize(("n_kv", "n_sink", "n_local"), [(1, 4, 1), (50, 3, 20), (300, 0, 1)])
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_seeds_are_keys_of_different_positions(head_dim, n_kv, n_sink, n_local):
    keys = Keys(np.random.default_rng(head_dim), n_kv, head_dim)
    keys.k[:, :, 0] = np.arange(n_kv)[:, None]  # tells positions apart
    keys.fields["k_pages"] = paged(keys.k, keys.fields["k_table"])
    n_panel, per_cluster = 3, 4
    n_cluster = max(0, n_kv - n_local - n_sink) // per_cluster
    drawn = []
    for seed in (1, 2):
        out = {
            "extent": extent_of(-7, -7),
            "centroids": panels(np.zeros((2, 0, head_dim)), n_panel),
            "norms": np.zeros((2, n_panel * PANEL), np.float32),
            "moving": np.zeros(2, np.int64),
        }
        for found in runs(
            ops.TACTIC_SEED, (head_dim,), out=out, step=step_of(1, n_kv - 1), n_panel=n_panel,
            per_cluster=per_cluster, n_sink=n_sink, n_local=n_local, seed=seed, **keys.fields,
        ):  # fmt: skip
            end = n_kv - n_local if n_cluster else 0
            assert found["extent"].tolist() == [end, n_cluster]
            assert found["moving"].tolist() == [1, 1]
            centroids = unpanelled(found["centroids"], n_cluster)
            for h in range(2):
                at = centroids[h, :, 0].astype(int)
                assert (np.diff(at) > 0).all()
                assert ((at >= n_sink) & (at < max(end, 1))).all()
                np.testing.assert_array_equal(centroids[h], keys.k[at, h].astype(np.float32))
            expected = norms_of(centroids, n_panel)
            np.testing.assert_allclose(found["norms"], expected, rtol=1e-5)
        drawn.append(centroids[:, :, 0].tolist())
    if n_kv == 300:
        assert drawn[0] != drawn[1]
        assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize(("n_sink", "end"), [(0, 0), (4, 5), (3, 70), (0, 200)])
@pytest.mark.parametrize("n_cluster", [1, 31, 40])
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_labels_are_the_nearest_centroids(head_dim, n_cluster, n_sink, end):
    rng = np.random.default_rng((head_dim, n_cluster, end))
    keys, n_panel, capacity = Keys(rng, 200, head_dim), 2, 201
    centroids = normal(rng, 2, n_cluster, head_dim)
    centroids[:, n_cluster // 2] = centroids[:, 0]  # as near as the first one: never taken
    norms = norms_of(centroids, n_panel)
    labels = np.full((2, capacity), -7, np.int32)
    for found in runs(
        ops.TACTIC_ASSIGN, (head_dim,),
        out={"labels": labels, "best": np.zeros((2, capacity), np.float32)},
        extent=extent_of(end, n_cluster), centroids=panels(centroids, n_panel), norms=norms,
        moving=np.array([1, 0]), n_panel=n_panel, capacity=capacity, n_sink=n_sink, **keys.fields,
    ):  # fmt: skip
        expected = labels.copy()
        for j in range(n_sink, end):
            key = keys.k[j, 0].astype(float)
            away = ((key - centroids[0]) ** 2).sum(axis=1)
            nearest = found["labels"][0, j]
            # Sums of 80 squares in float32.
            assert away[nearest] <= away.min() + 1e-4 * (1 + away.min())
            assert n_cluster == 1 or nearest != n_cluster // 2
            expected[0, j] = nearest
        np.testing.assert_array_equal(found["labels"], expected)


@pytest.mark.parametrize(("n_sink", "end"), [(0, 0), (4, 5), (3, 70), (0, 200)])
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_centroids_become_the_means_of_their_members(head_dim, n_sink, end):
    rng = np.random.default_rng((head_dim, end))
    keys, n_panel, capacity, n_cluster = Keys(rng, 200, head_dim), 2, 201, 40
    labels = rng.integers(0, n_cluster, (2, capacity)).astype(np.int32)
    centroids = normal(rng, 2, n_cluster, head_dim)
    expected = centroids.astype(float)
    order = np.full((2, capacity), -7, np.int32)
    starts = np.full((2, n_panel * PANEL + 1), -7, np.int32)
    expected_order, expected_starts = order.copy(), starts.copy()
    span = np.arange(n_sink, end)
    for c in range(n_cluster):
        members = span[labels[0, n_sink:end] == c]
        if len(members):
            expected[0, c] = keys.k[members, 0].astype(float).mean(axis=0)
    sorted_span = span[np.argsort(labels[0, n_sink:end], kind="stable")]
    expected_order[0, : len(span)] = sorted_span
    counts = np.bincount(labels[0, n_sink:end], minlength=n_cluster)
    expected_starts[0, : n_cluster + 1] = [0, *np.cumsum(counts)]
    before = norms_of(centroids, n_panel)
    for found in runs(
        ops.TACTIC_MEAN, (head_dim,),
        out={
            "centroids": panels(centroids, n_panel), "norms": before, "moving": np.array([1, 0]),
            "starts": starts, "order": order, "sums": np.zeros((2, head_dim), np.float32),
        },
        extent=extent_of(end, n_cluster), labels=labels, n_panel=n_panel, capacity=capacity,
        n_sink=n_sink, **keys.fields,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["order"], expected_order)
        np.testing.assert_array_equal(found["starts"], expected_starts)
        means = unpanelled(found["centroids"], n_cluster)
        np.testing.assert_allclose(means, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found["norms"], norms_of(expected, n_panel), rtol=1e-4)
        assert found["moving"].tolist() == [int(end > n_sink), 0]


# --- the budget ----------------------------------------------------------------------------------


def budget(weights, n_first, outside, share):
    """Alg. 1 as it is printed, with the weight outside of the clusters."""
    n = len(weights)
    half, x_1, x_2 = max(16, n // 200), n // 10, n * 6 // 10
    mu_1 = weights[max(0, x_1 - half) : x_1 + half].mean()
    mu_2 = weights[max(0, x_2 - half) : x_2 + half].mean()
    x_1, x_2 = max(1, x_1), max(2, x_2)
    a = (mu_1 - mu_2) / (1 / x_1 - 1 / x_2)
    b = mu_2 - a / x_2
    curve = np.maximum(a / np.arange(1, n + 1) + b, 0)
    w = np.concatenate([weights[:n_first], curve[n_first:]])
    need = share * (outside + w.sum()) - outside
    if need <= 0:
        return 0
    return min(n, int(np.searchsorted(w.cumsum(), need)) + 1)


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize(("n_kv", "n_sink", "n_local"), [(9, 4, 2), (150, 3, 20), (1500, 4, 100)])
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_the_budget_is_algorithm_1(head_dim, n_kv, n_sink, n_local, share, counted):
    rng = np.random.default_rng((head_dim, n_kv))
    keys, capacity, n_panel, heads_per_kv = Keys(rng, n_kv, head_dim), n_kv + 1, 2, 2
    end, n_cluster = n_kv - n_local, min(40, n_kv - n_local - n_sink)
    centroids = normal(rng, 2, n_cluster, head_dim)
    labels = rng.integers(0, n_cluster, (2, end - n_sink))
    order, starts = np.zeros((2, capacity), np.int32), np.zeros((2, 65), np.int32)
    for h in range(2):
        order[h, : end - n_sink] = n_sink + np.argsort(labels[h], kind="stable")
        starts[h, 1 : n_cluster + 1] = np.bincount(labels[h], minlength=n_cluster).cumsum()
    q, scale = 3 * normal(rng, 1, 4, head_dim), head_dim**-0.5
    for found in runs(
        ops.TACTIC_BUDGET, (head_dim,),
        out={
            "rank": np.full((4, 64), -7, np.int32), "keep": np.full(4, -7, np.int32),
            "work": np.zeros((4, ops.tactic_work(capacity, n_panel)), np.float32),
        },
        step=step_of(1, n_kv - 1), q=q, extent=extent_of(end, n_cluster),
        centroids=panels(centroids, n_panel), starts=starts, order=order, n_head=4,
        heads_per_kv=heads_per_kv, n_panel=n_panel, capacity=capacity, n_sink=n_sink,
        counted=counted, share_f=share, first_share_f=0.02, scale_f=scale, **keys.fields,
    ):  # fmt: skip
        for head in range(4):
            h, query = head // heads_per_kv, q[0, head].astype(float)
            rank = found["rank"][head, :n_cluster]
            scores = centroids[h].astype(float) @ query
            assert sorted(rank) == list(range(n_cluster))
            assert (np.diff(scores[rank]) <= 1e-4).all()  # float32 sums
            parts = [order[h, starts[h, c] : starts[h, c + 1]] for c in rank]
            weights = np.exp(scale * (keys.k[:, h].astype(float) @ query))
            ranked = weights[np.concatenate(parts)]
            n_first = min(len(ranked), max(20, int(0.02 * len(ranked))))
            outside = counted * (weights.sum() - ranked.sum())
            expected = len(ranked) if share == 1 else budget(ranked, n_first, outside, share)
            # The curve's sum is a midpoint rule, the weights are float32.
            assert abs(found["keep"][head] - expected) <= 1


@in_child
def test_without_clusters_nothing_is_kept_of_them():
    keys = Keys(np.random.default_rng(0), 9, 16)
    for found in runs(
        ops.TACTIC_BUDGET, (16,),
        out={
            "rank": np.full((2, 32), -7, np.int32), "keep": np.full(2, -7, np.int32),
            "work": np.zeros((2, ops.tactic_work(9, 1)), np.float32),
        },
        step=step_of(1, 8), q=np.ones((1, 2, 16), np.float32), extent=extent_of(0, 0),
        centroids=np.zeros((2, 1, 16, 32), np.float32), starts=np.zeros((2, 33), np.int32),
        order=np.zeros((2, 9), np.int32), n_head=2, heads_per_kv=1, n_panel=1, capacity=9,
        n_sink=4, counted=1, share_f=0.9, first_share_f=0.02, scale_f=0.25, **keys.fields,
    ):  # fmt: skip
        assert found["keep"].tolist() == [0, 0]


# --- the selection -------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("end", [0, 60])
@in_child
def test_marked_are_the_positions_of_any_head_of_the_row(group, end):
    rng = np.random.default_rng(group)
    n_row, heads_per_kv, n_panel, capacity, n_sink, n_cluster = 2, group, 1, 64, 5, 7
    order, starts = np.full((2, capacity), -1, np.int32), np.zeros((2, 33), np.int32)
    n = max(0, end - n_sink)
    for h in range(2):
        order[h, :n] = n_sink + rng.permutation(n)
        starts[h, 1:n_cluster] = np.sort(rng.integers(0, n + 1, n_cluster - 1))
        starts[h, n_cluster] = n
    rank = np.array([[*rng.permutation(n_cluster), *[99] * 25] for _ in range(2 * group)], np.int32)
    keep = rng.integers(0, n + 1, 2 * group).astype(np.int32)
    keep[0] = n
    kept = [set(), set()]
    for head in range(2 * group):
        parts = [order[head // group, starts[head // group, c] : starts[head // group, c + 1]]
                 for c in rank[head, :n_cluster]]  # fmt: skip
        kept[head // group] |= set(np.concatenate(parts)[: keep[head]].tolist())
    marks = rng.integers(0, 2, (n_row, capacity)).astype(np.uint8)  # of the step before
    for found in runs(
        ops.TACTIC_MARK, (group,), out={"marks": marks, "count": np.full(n_row, -7, np.int32)},
        extent=extent_of(end, n_cluster if end else 0), starts=starts, order=order, rank=rank,
        keep=keep, n_row=n_row, heads_per_kv=heads_per_kv, n_panel=n_panel, capacity=capacity,
    ):  # fmt: skip
        assert [set(np.flatnonzero(row[:end]).tolist()) for row in found["marks"]] == kept
        assert found["count"].tolist() == [len(row) for row in kept]


@pytest.mark.parametrize(("pos", "end"), [(0, 0), (3, 0), (30, 0), (30, 13), (61, 40), (40, 41)])
@in_child
def test_the_selection_joins_marks_and_what_lies_outside_of_clusters(pos, end):
    rng = np.random.default_rng(pos)
    n_sink, n_row, capacity = 5, 3, 64
    marks = rng.integers(0, 2, (n_row, capacity)).astype(np.uint8)
    marks[1] = 0
    inside = [[j for j in np.flatnonzero(row).tolist() if n_sink <= j < end] for row in marks]
    outside = [j for j in range(pos + 1) if j < n_sink or j >= end]
    expected = [sorted([*row, *outside]) for row in inside]
    for found in runs(
        ops.TACTIC_SELECT,
        out={
            "indptr": np.full(n_row + 1, -7, np.int32),
            "indices": np.full(sum(map(len, expected)), -7, np.int32),
        },
        step=step_of(1, pos), extent=extent_of(end, 2), marks=marks,
        count=np.array([len(row) for row in inside], np.int32), n_row=n_row, capacity=capacity,
        n_sink=n_sink,
    ):  # fmt: skip
        assert rows_of(found) == expected
