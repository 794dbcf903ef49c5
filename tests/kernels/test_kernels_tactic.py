"""Tactic's ops against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal, page_table, paged
from guarded import in_child, runs, step_of
from selection_cases import rows_of

from tamis.jit_kernels.contract import ops
from tamis.select.tactic import Order, budget_by_fit, budget_by_samples, budgets_joint, densities

DIMS = [16, 80]  # head_dim
GROUPS = [1, 3]
LANES = 16
KERNELS = [
    *((op, (d,)) for d in DIMS
      for op in (ops.TACTIC_SEED, ops.TACTIC_ASSIGN, ops.TACTIC_MEAN, ops.TACTIC_BUDGET)),
    (ops.TACTIC_RANK, ()),
    *((ops.TACTIC_SCORE, (d, group)) for d in DIMS for group in (1, 4, 7)),
    *((op, (d, group)) for d in DIMS for group in GROUPS
      for op in (ops.TACTIC_JOINT_RANK, ops.TACTIC_JOINT)),
    *((ops.TACTIC_MARK, (group,)) for group in GROUPS), (ops.TACTIC_SELECT, ()),
]  # fmt: skip


class Keys:
    """Keys of two KV heads, some of them equal, and where they lie."""

    def __init__(self, rng, n_kv, head_dim):
        self.k = normal(rng, n_kv, 2, head_dim).astype(np.float16)
        self.k[n_kv // 2 :: 7] = self.k[0]
        table = page_table(rng, n_kv, n_kv // 64 + 2)
        self.fields = {"k_pages": paged(self.k, table), "k_table": table, "n_head_kv": 2}

    def turned(self):
        """The last key first: what `places` has to say then."""
        pages = paged(self.k[::-1].copy(), self.fields["k_table"])
        return self.fields | {"k_pages": pages}


class Segments:
    """Segments of positions, each with its clusters; what was there before where there are none."""

    def __init__(self, rng, n_sink, end, segment, per_cluster, head_dim, first=0):
        self.n = max(0, end - n_sink)
        self.spans = []  # first position, end, first cluster, number of clusters
        for start in range(0, self.n, segment):
            stop = min(self.n, start + segment)
            cluster, n_cluster = start // per_cluster, (stop - start) // per_cluster
            self.spans.append((n_sink + start, n_sink + stop, cluster, n_cluster))
        self.made = self.spans[first:]
        self.n_cluster = sum(span[3] for span in self.spans)
        self.n_slot = -(-max(self.n_cluster, 1) // LANES) * LANES
        self.extent = np.array([n_sink + first * segment, end, self.n_cluster], np.int64)
        self.centroids = normal(rng, 2, self.n_slot, head_dim)
        self.fields = {
            "extent": self.extent, "n_slot": self.n_slot, "n_segment": len(self.spans) + 1,
            "segment": segment, "per_cluster": per_cluster, "n_sink": n_sink,
        }  # fmt: skip

    def moving(self):
        """Segment 1 of head 1 no longer moves."""
        moving = np.ones((2, len(self.spans) + 1), np.int64)
        moving[1, 1:] = 0
        return moving


def norms_of(centroids):
    """Minus half the squared lengths."""
    return -((centroids.astype(float) ** 2).sum(axis=2) / 2).astype(np.float32)


# The last one's second segment is empty, and would begin in a page that is not there.
SPANS = [
    (0, 0, 64, 4), (4, 5, 64, 1), (3, 70, 64, 1), (0, 200, 96, 4), (5, 200, 80, 2),
    (5, 200, 252, 4),
]  # fmt: skip


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_sink", "end", "segment", "per_cluster"), SPANS)
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_seeds_are_keys_of_different_positions(head_dim, n_sink, end, segment, per_cluster):
    rng = np.random.default_rng((head_dim, end))
    keys, first = Keys(rng, 300, head_dim), int(segment < end == 200)
    keys.k[:, :, 0] = np.arange(300)[:, None]  # tells positions apart
    keys.fields["k_pages"] = paged(keys.k, keys.fields["k_table"])
    at = Segments(rng, n_sink, end, segment, per_cluster, head_dim, first)
    drawn = []
    for seed in (1, 2):
        out = {
            "centroids": at.centroids,
            "means": at.centroids.astype(np.float16),
            "norms": np.full((2, at.n_slot), -7, np.float32),
            "moving": np.full((2, len(at.spans) + 1), -7, np.int64),
        }
        for found in runs(ops.TACTIC_SEED, (head_dim,), out=out, seed=seed, **at.fields,
                          **keys.fields):  # fmt: skip
            centroids, norms = found["centroids"], found["norms"]
            for h in range(2):
                for low, high, cluster, n in at.made:
                    part = slice(cluster, cluster + n)
                    where = centroids[h, part, 0].astype(int)
                    assert (np.diff(where) > 0).all()
                    assert ((where >= low) & (where < high)).all()
                    expected = keys.k[where, h].astype(np.float32)
                    np.testing.assert_array_equal(centroids[h, part], expected)
                    np.testing.assert_array_equal(found["means"][h, part], expected)
            made = at.made[0][2] if at.made else 0
            assert (norms[:, :made] == -7).all()
            own = slice(made, at.n_cluster)
            np.testing.assert_allclose(norms[:, own], norms_of(centroids)[:, own], rtol=1e-5)
            assert (found["moving"][:, first:] == 1).all()
            assert (found["moving"][:, :first] == -7).all()
        drawn.append(centroids[:, :, 0].tolist())
    if first:
        assert drawn[0] != drawn[1]
        assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize(("n_sink", "end", "segment", "per_cluster"), SPANS)
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_labels_are_the_nearest_centroids(head_dim, n_sink, end, segment, per_cluster):
    rng = np.random.default_rng((head_dim, end))
    keys, capacity = Keys(rng, 200, head_dim), 201
    at = Segments(rng, n_sink, end, segment, per_cluster, head_dim)
    for _, _, cluster, n in at.spans:
        at.centroids[:, cluster + n // 2] = at.centroids[:, cluster]  # as near: never taken
    labels = np.full((2, capacity), -7, np.int32)
    panels = np.zeros((ops.TACTIC_WORKERS, (head_dim + 3) * 32), np.float32)
    for found in runs(
        ops.TACTIC_ASSIGN, (head_dim,), out={"labels": labels, "panels": panels},
        centroids=at.centroids, norms=norms_of(at.centroids), moving=at.moving(),
        capacity=capacity, **at.fields, **keys.fields,
    ):  # fmt: skip
        expected = labels.copy()
        for h in range(2):
            for low, high, cluster, n in at.spans[: 1 if h else None]:
                own = at.centroids[h, cluster : cluster + n].astype(float)
                for j in range(low, high if n else low):
                    away = ((keys.k[j, h].astype(float) - own) ** 2).sum(axis=1)
                    nearest = found["labels"][h, j] - cluster
                    # Sums of 80 squares in float32.
                    assert away[nearest] <= away.min() + 1e-4 * (1 + away.min())
                    assert n == 1 or nearest != n // 2
                    expected[h, j] = cluster + nearest
        np.testing.assert_array_equal(found["labels"], expected)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_sink", "end", "segment", "per_cluster"), SPANS)
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_centroids_become_the_means_of_their_members(head_dim, n_sink, end, segment, per_cluster):
    rng = np.random.default_rng((head_dim, end))
    keys, capacity = Keys(rng, 200, head_dim), 201
    at = Segments(rng, n_sink, end, segment, per_cluster, head_dim)
    labels, moving = np.zeros((2, capacity), np.int32), at.moving()
    order = np.full((2, capacity), -7, np.int32)
    starts = np.full((2, at.n_slot + 1), -7, np.int32)
    expected, expected_order, expected_starts = at.centroids.astype(float), order * 1, starts * 1
    for h in range(2):
        for low, high, cluster, n in at.spans:
            if n == 0:
                continue
            labels[h, low:high] = cluster + rng.integers(0, n, high - low)
            if h == 1 and low > n_sink:
                continue
            span, own = np.arange(low, high), labels[h, low:high]
            expected_order[h, low - n_sink : high - n_sink] = span[np.argsort(own, kind="stable")]
            for c in range(cluster, cluster + n):
                expected_starts[h, c] = low - n_sink + (own < c).sum()
                if (own == c).any():
                    expected[h, c] = keys.k[span[own == c], h].astype(float).mean(axis=0)
            if high == end:
                expected_starts[h, at.n_cluster] = end - n_sink
    for found in runs(
        ops.TACTIC_MEAN, (head_dim,),
        out={
            "centroids": at.centroids, "means": at.centroids.astype(np.float16),
            "norms": norms_of(at.centroids), "moving": moving, "starts": starts, "order": order,
            "cursor": np.zeros((2, at.n_slot), np.int32),
        },
        labels=labels, capacity=capacity, **at.fields, **keys.fields,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["order"], expected_order)
        np.testing.assert_array_equal(found["starts"], expected_starts)
        np.testing.assert_allclose(found["centroids"], expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found["means"], expected, rtol=1e-3, atol=1e-3)  # float16
        np.testing.assert_allclose(found["norms"], norms_of(expected), rtol=1e-4)
        np.testing.assert_array_equal(found["moving"], moving)
        again = {name: found[name].copy() for name in found}
    # With the same labels nothing moves any more.
    for found in runs(ops.TACTIC_MEAN, (head_dim,), out=again, labels=labels, capacity=capacity,
                      **at.fields, **keys.fields):  # fmt: skip
        still = [s for s, span in enumerate(at.spans) if span[3]]
        assert (found["moving"][:, still] == 0).all()


# --- the budget ----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("n_cluster", [0, 1, 16, 37])
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_scores_are_products_with_centroids(head_dim, n_cluster, group):
    rng = np.random.default_rng((head_dim, n_cluster, group))
    means = normal(rng, 2, 48, head_dim).astype(np.float16)
    q = normal(rng, 1, 2 * group, head_dim)
    for found in runs(
        ops.TACTIC_SCORE, (head_dim, group),
        out={"scores": np.full((2 * group, 48), -7, np.float32)}, q=q, means=means, n_slot=48,
        extent=np.array([0, 900, n_cluster]), n_head_kv=2,
    ):  # fmt: skip
        for head in range(2 * group):
            expected = means[head // group].astype(float) @ q[0, head].astype(float)
            scores = found["scores"][head]
            np.testing.assert_allclose(scores[:n_cluster], expected[:n_cluster], atol=1e-4)


SIZES = [(9, 4, 2), (150, 3, 20), (1500, 4, 100)]  # positions, sinks, local ones
ORDER = ("extent", "scores", "starts", "order", "n_slot", "capacity", "n_sink", "counted",
         "n_sample", "share", "first_share", "scale")  # fmt: skip


def budgets(head_dim, keys, n_kv, *, n_head, heads_per_kv, margin, q, **order):
    """TACTIC_RANK, and TACTIC_BUDGET with what it lists; each found, once for each run of both.

    The keys are elsewhere than at their positions, as in a token bank.
    """
    capacity, n_slot, step = order["capacity"], order["n_slot"], step_of(1, n_kv - 1)
    room = ops.tactic_list(capacity)
    for found in runs(
        ops.TACTIC_RANK,
        out={
            "rank": np.full((n_head, n_slot), -7, np.int32),
            "counts": np.full(n_head, -7, np.int32),
            "work": np.zeros((n_head, ops.tactic_work(capacity, n_slot)), np.float32),
            "sets": np.full((n_head, room), -7, np.int32),
        },
        step=step, n_head=n_head, heads_per_kv=heads_per_kv, set_capacity=room, **order,
    ):  # fmt: skip
        rank, work, sets, counts = (found[x].copy() for x in ("rank", "work", "sets", "counts"))
        indices = np.concatenate([row[:n] for row, n in zip(sets, counts, strict=True)])
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        given = {name: order[name] for name in ORDER if name not in ("scores", "starts", "order")}
        for kept in runs(
            ops.TACTIC_BUDGET, (head_dim,),
            out={"keep": np.full(n_head, -7, np.int32), "work": work}, step=step, q=q,
            indptr=indptr, indices=indices, places=(n_kv - 1 - indices).astype(np.int32),
            n_row=n_head, heads_per_kv=heads_per_kv, margin=margin, **given, **keys.turned(),
        ):  # fmt: skip
            yield {"rank": rank, "keep": kept["keep"].copy()}


def labelled(rng, n_sink, end, n_cluster, capacity, n_slot):
    """Random clusters of two KV heads: labels by position, positions by label, their starts."""
    labels = np.full((2, capacity), 10**9, np.int32)  # of positions outside of the clusters
    labels[:, n_sink:end] = rng.integers(0, n_cluster, (2, end - n_sink))
    order, starts = np.zeros((2, capacity), np.int32), np.zeros((2, n_slot + 1), np.int32)
    for h in range(2):
        own = labels[h, n_sink:end]
        order[h, : end - n_sink] = n_sink + np.argsort(own, kind="stable")
        starts[h, 1 : n_cluster + 1] = np.bincount(own, minlength=n_cluster).cumsum()
    return labels, order, starts


@pytest.mark.parametrize(("n_sample", "margin"), [(0, 0), (30, 0), (256, 0.5)])
@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize(("n_kv", "n_sink", "n_local"), SIZES)
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_the_budget_is_that_of_the_reference(
    head_dim, n_kv, n_sink, n_local, share, counted, n_sample, margin
):
    rng = np.random.default_rng((head_dim, n_kv))
    keys, capacity, n_slot, heads_per_kv = Keys(rng, n_kv, head_dim), n_kv + 1, 48, 2
    end, n_cluster = n_kv - n_local, min(40, n_kv - n_local - n_sink)
    _, order, starts = labelled(rng, n_sink, end, n_cluster, capacity, n_slot)
    q, scale = 3 * normal(rng, 1, 4, head_dim), head_dim**-0.5
    scores = 9 * normal(rng, 4, n_slot)  # whatever the clusters' scores are
    for found in budgets(
        head_dim, keys, n_kv, n_head=4, heads_per_kv=heads_per_kv, margin=margin, q=q,
        extent=np.array([n_sink, end, n_cluster]), scores=scores, starts=starts, order=order,
        n_slot=n_slot, capacity=capacity, n_sink=n_sink, counted=counted, n_sample=n_sample,
        share=share, first_share=0.02, scale=scale,
    ):  # fmt: skip
        for head in range(4):
            h, query = head // heads_per_kv, q[0, head].astype(float)
            rank, own = found["rank"][head, :n_cluster], scores[head, :n_cluster]
            assert sorted(rank) == list(range(n_cluster))
            assert (np.diff(own[rank]) <= np.ptp(own) / 65535 + 1e-6).all()
            parts = [order[h, starts[h, c] : starts[h, c + 1]] for c in rank]
            weights = np.exp(scale * (keys.k[:, h].astype(float) @ query))
            ranked, sizes = weights[np.concatenate(parts)], np.array([len(p) for p in parts])
            n_first = min(len(ranked), max(20, int(0.02 * len(ranked))))
            outside = counted * (weights.sum() - ranked.sum())
            if share == 1:
                expected, slack = len(ranked), 0
            elif n_sample == 0:
                # The curve's sum is a midpoint rule, the weights are float32.
                expected, slack = budget_by_fit(ranked, n_first, outside, share), 1
            else:
                logits = scale * own[rank].astype(float)
                expected, slack = budget_by_samples(
                    Order(ranked, sizes, logits), n_first, outside, share, (n_sample, margin)
                ), 0  # fmt: skip
            assert abs(found["keep"][head] - expected) <= slack


SCORES = {
    "random": lambda rng, n: rng.standard_normal(n),
    "one of them far from all": lambda rng, n: np.append(rng.standard_normal(n - 1), 1e6),
    "equal": lambda _rng, n: np.full(n, -3.5),
    "many equal": lambda rng, n: np.round(rng.standard_normal(n)),
    "near each other": lambda rng, n: 1000 + 0.01 * rng.standard_normal(n),
    "the first far from all": lambda rng, n: np.append(-3e4, rng.standard_normal(n - 1)),
}


@pytest.mark.parametrize("n_cluster", [1, 300, 5000, 9000])  # a GPU's block holds 8192
@pytest.mark.parametrize("kind", SCORES)
@in_child
def test_clusters_are_ranked_by_falling_score(kind, n_cluster):
    rng, n_slot = np.random.default_rng(n_cluster), n_cluster // 16 * 16 + 16
    capacity = -(-4 * n_cluster // 64) * 64
    _, order, starts = labelled(rng, 4, 4 * n_cluster, n_cluster, capacity, n_slot)
    scores = np.full((2, n_slot), 1e9, np.float32)
    scores[:, :n_cluster] = [SCORES[kind](rng, n_cluster) for _ in range(2)]
    for found in runs(
        ops.TACTIC_RANK,
        out={
            "rank": np.full((2, n_slot), -7, np.int32), "counts": np.full(2, -7, np.int32),
            "work": np.zeros((2, ops.tactic_work(capacity, n_slot)), np.float32),
            "sets": np.full((2, 8), -7, np.int32),
        },
        step=step_of(1, capacity), n_head=2, heads_per_kv=1, set_capacity=8, scores=scores,
        extent=np.array([4, 4 * n_cluster, n_cluster]), starts=starts, order=order, n_slot=n_slot,
        capacity=capacity, n_sink=4, counted=1, n_sample=0, share=1, first_share=0.02, scale=1,
    ):  # fmt: skip
        assert found["counts"].tolist() == [0, 0]
        for rank, own in zip(found["rank"], scores, strict=True):
            assert sorted(rank[:n_cluster]) == list(range(n_cluster))
            falls = -np.diff(own[rank[:n_cluster]].astype(float))
            assert (falls >= -np.ptp(own[:n_cluster]) / 65535 - 1e-6).all()


def joint_budgets(head_dim, group, keys, n_kv, *, margin, n_reach, q, **order):
    """As `budgets`, by TACTIC_JOINT_RANK and TACTIC_JOINT."""
    capacity, n_slot, step = order["capacity"], order["n_slot"], step_of(1, n_kv - 1)
    room, scratch = ops.tactic_list(capacity), np.zeros((2, n_slot), np.float32)
    own = {name: order[name] for name in order if name != "scores"}
    for found in runs(
        ops.TACTIC_JOINT_RANK, (head_dim, group),
        out={
            "rank": np.full((2, n_slot), -7, np.int32), "counts": np.full(2, -7, np.int32),
            "work": np.zeros((2, ops.tactic_joint_work(group, capacity, n_slot)), np.float32),
            "scores": order["scores"], "sizes": scratch, "density": scratch,
            "sets": np.full((2, room), -7, np.int32),
        },
        step=step, q=q, set_capacity=room, **own, **keys.fields,
    ):  # fmt: skip
        names = ("rank", "work", "sets", "counts", "scores", "sizes")
        rank, work, sets, counts, scores, sizes = (found[name].copy() for name in names)
        indices = np.concatenate([row[:n] for row, n in zip(sets, counts, strict=True)])
        names = ("extent", "n_slot", "capacity", "n_sink", "n_sample", "share", "first_share")
        given = {name: order[name] for name in (*names, "scale")}
        for kept in runs(
            ops.TACTIC_JOINT, (head_dim, group),
            out={"keep": np.full(2, -7, np.int32), "work": work, "sizes": sizes}, step=step, q=q,
            scores=scores, rank=rank, indptr=np.cumsum([0, *counts]).astype(np.int32),
            indices=indices, places=(n_kv - 1 - indices).astype(np.int32), n_row=2, margin=margin,
            n_reach=n_reach, **given, **keys.turned(),
        ):  # fmt: skip
            yield {"rank": rank, "keep": kept["keep"].copy()}


@pytest.mark.parametrize(("n_sample", "margin"), [(1, 0), (30, 0), (256, 0.5)])
@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize(("n_kv", "n_sink", "n_local"), SIZES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", DIMS)
@in_child
def test_the_joint_budget_is_that_of_the_reference(
    head_dim, group, n_kv, n_sink, n_local, share, counted, n_sample, margin
):
    rng = np.random.default_rng((head_dim, n_kv, group))
    keys, capacity, n_slot = Keys(rng, n_kv, head_dim), n_kv + 1, 48
    end, n_cluster = n_kv - n_local, min(40, n_kv - n_local - n_sink)
    _, order, starts = labelled(rng, n_sink, end, n_cluster, capacity, n_slot)
    q, scale = 3 * normal(rng, 1, 2 * group, head_dim), head_dim**-0.5
    scores = 9 * normal(rng, 2 * group, n_slot)  # whatever the clusters' scores are
    n_reach = (2 * group + 2) // 3
    for found in joint_budgets(
        head_dim, group, keys, n_kv, margin=margin, n_reach=n_reach, q=q, scores=scores,
        extent=np.array([n_sink, end, n_cluster]), starts=starts, order=order, n_slot=n_slot,
        capacity=capacity, n_sink=n_sink, counted=counted, n_sample=n_sample, share=share,
        first_share=0.02, scale=scale,
    ):  # fmt: skip
        for h in range(2):
            heads, rank = slice(group * h, group * h + group), found["rank"][h, :n_cluster]
            weights = np.exp(scale * (q[0, heads].astype(float) @ keys.k[:, h].astype(float).T))
            logits = scale * scores[heads, :n_cluster].astype(float)
            outside = counted * (weights[:, :n_sink].sum(axis=1) + weights[:, end:].sum(axis=1))
            sizes = np.diff(starts[h, : n_cluster + 1])
            density = densities(logits, sizes, outside)
            assert sorted(rank) == list(range(n_cluster))
            falls = density[rank]  # in 512 steps an octave
            assert (falls[1:] <= falls[:-1] * 2 ** (1 / 256)).all()
            parts = [order[h, starts[h, c] : starts[h, c + 1]] for c in rank]
            if share == 1:
                expected = end - n_sink
            else:
                clusters = Order(weights[:, np.concatenate(parts)], sizes[rank], logits[:, rank])
                counts = budgets_joint(
                    clusters, falls, int(0.02 * (end - n_sink)), outside, share, (n_sample, margin)
                )  # fmt: skip
                expected = sorted(counts)[n_reach - 1]
            assert found["keep"][h] == expected


@pytest.mark.parametrize("joint", [False, True])
@in_child
def test_without_clusters_nothing_is_kept_of_them(joint):
    keys, q = Keys(np.random.default_rng(0), 9, 16), np.ones((1, 2, 16), np.float32)
    fields = {
        "extent": np.array([4, 4, 0]), "starts": np.zeros((2, 17), np.int32),
        "order": np.zeros((2, 9), np.int32), "n_slot": 16, "capacity": 9, "n_sink": 4, "counted": 1,
        "n_sample": 0, "share": 0.9, "first_share": 0.02, "margin": 0, "scale": 0.25,
    }  # fmt: skip
    scores = np.zeros((2, 16), np.float32)
    fields |= {"scores": scores, "q": q}
    found = (
        joint_budgets(16, 1, keys, 9, n_reach=1, **fields)
        if joint
        else budgets(16, keys, 9, n_head=2, heads_per_kv=1, **fields)
    )
    for each in found:
        assert each["keep"].tolist() == [0, 0]


# --- the selection -------------------------------------------------------------------------------


@pytest.mark.on_threads
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("end", "n_cluster", "capacity"),
    # Last: a GPU's block holds 16384 clusters' ends.
    [(5, 7, 128), (60, 7, 128), (128, 7, 128), (128, 128, 192), (5000, 1500, 5056),
     (33000, 17000, 33024)],
)  # fmt: skip
@in_child
def test_marked_are_the_positions_of_any_head_of_the_row(group, end, n_cluster, capacity):
    rng = np.random.default_rng(group)
    n_row, heads_per_kv, n_slot, n_sink = 2, group, n_cluster // 16 * 16 + 16, 5
    n = max(0, end - n_sink)
    labels, order, starts = labelled(rng, n_sink, end, n_cluster, capacity, n_slot)
    rank = np.full((2 * group, n_slot), 10**9, np.int32)
    for head in range(2 * group):
        rank[head, :n_cluster] = rng.permutation(n_cluster)
    keep = rng.integers(0, n + 1, 2 * group).astype(np.int32)
    keep[0], keep[-1] = n, min(n, 3)
    kept, ends = [set(), set()], np.full((2 * group, n_cluster + 3), -7, np.int32)
    for head in range(2 * group):
        parts = [order[head // group, starts[head // group, c] : starts[head // group, c + 1]]
                 for c in rank[head, :n_cluster]]  # fmt: skip
        ends[head, :n_cluster] = np.cumsum([len(part) for part in parts])
        kept[head // group] |= set(np.concatenate(parts)[: keep[head]].tolist())
    marks = rng.integers(-9, 9, (n_row, capacity // 64))  # of the step before
    for found in runs(
        ops.TACTIC_MARK, (group,),
        out={"marks": marks, "count": np.full(n_row, -7, np.int32)}, ends=ends,
        n_end=ends.shape[1],
        extent=np.array([n_sink, end, n_cluster]), labels=labels, starts=starts, order=order,
        rank=rank, keep=keep, n_row=n_row, heads_per_kv=heads_per_kv, n_slot=n_slot,
        capacity=capacity, n_sink=n_sink,
    ):  # fmt: skip
        bits = np.unpackbits(found["marks"].view(np.uint8), axis=1, bitorder="little")
        n_word = (end + 63) // 64
        assert [set(np.flatnonzero(row[: 64 * n_word]).tolist()) for row in bits] == kept
        np.testing.assert_array_equal(found["marks"][:, n_word:], marks[:, n_word:])
        assert found["count"].tolist() == [len(row) for row in kept]


@pytest.mark.on_threads
@pytest.mark.parametrize(
    ("pos", "end"), [(0, 5), (3, 5), (30, 5), (30, 13), (91, 70), (40, 41), (9300, 9001)]
)
@in_child
def test_the_selection_joins_marks_and_what_lies_outside_of_clusters(pos, end):
    rng = np.random.default_rng(pos)
    n_sink, n_row, capacity = 5, 3, 64 * (pos // 64 + 1)
    bits = rng.integers(0, 2, (n_row, capacity)).astype(np.uint8)
    bits[1] = 0
    bits[:, :n_sink] = bits[:, end:] = 0
    marks = np.packbits(bits, axis=1, bitorder="little").view(np.int64)
    inside = [np.flatnonzero(row).tolist() for row in bits]
    outside = [j for j in range(pos + 1) if j < n_sink or j >= end]
    expected = [sorted([*row, *outside]) for row in inside]
    for found in runs(
        ops.TACTIC_SELECT,
        out={
            "indptr": np.full(n_row + 1, -7, np.int32),
            "indices": np.full(sum(map(len, expected)), -7, np.int32),
        },
        step=step_of(1, pos), extent=np.array([n_sink, end, 2]), marks=marks,
        count=np.array([len(row) for row in inside], np.int32), n_row=n_row, capacity=capacity,
        n_sink=n_sink,
    ):  # fmt: skip
        assert rows_of(found) == expected
