"""HShare's ops against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal
from guarded import in_child, runs, step_of
from kept_set_cases import best, listed, rows_in
from selection_cases import maxima_of, middle

from tamis.jit_kernels.contract import ops
from tamis.select.hshare import sharing

HEAD_DIM, HEADS, N_HEAD_KV = 16, 4, 2
KERNELS = [
    *((ops.HSHARE_GATE, (HEAD_DIM, HEADS, group)) for group in (1, 2)),
    (ops.HSHARE_KEEP, ()),
    (ops.HSHARE_MAP, ()),
]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("fresh", [0, 1])
@in_child
def test_rows_that_own_their_set_ask(group, fresh):
    rng = np.random.default_rng(group)
    n_row, first = N_HEAD_KV * HEADS // group, 30
    q = normal(rng, N_HEAD_KV, HEADS, HEAD_DIM)
    owners = first + np.arange(n_row, dtype=np.int32)
    owners[[0, n_row - 2]] = 3, first
    owns = np.full(n_row, True) if fresh else owners == first + np.arange(n_row)
    for found in runs(
        ops.HSHARE_GATE, (HEAD_DIM, HEADS, group),
        out={
            "owners": owners, "asking": np.full(q.shape, np.nan, np.float32),
            "n_asking": np.full(N_HEAD_KV, -7, np.int32),
        },
        step=step_of(1, 9), q=q, n_head_kv=N_HEAD_KV, first=first, fresh=fresh,
    ):  # fmt: skip
        whose = owners if not fresh else first + np.arange(n_row)
        np.testing.assert_array_equal(found["owners"], whose)
        for h in range(N_HEAD_KV):
            asks = np.repeat(owns.reshape(N_HEAD_KV, -1)[h], group)
            assert found["n_asking"][h] == asks.sum()
            np.testing.assert_array_equal(found["asking"][h, : asks.sum()], q[h, asks])


@pytest.mark.parametrize(("pos", "n_keep"), [(3, 5), (40, 50), (500, 0), (500, 5), (500, 90)])
@pytest.mark.parametrize("group", [1, 2])
@in_child
def test_owners_keep_the_best_of_what_was_scored(pos, n_keep, group):
    rng = np.random.default_rng((pos, n_keep))
    n_sink, n_local, capacity, first = 4, 9, 512, 8
    n_row, rows_per_kv = N_HEAD_KV * HEADS // group, HEADS // group
    low, high = middle(pos, n_sink, n_local)
    owners = first + np.arange(n_row, dtype=np.int32)
    owners[rows_per_kv] = first  # the second KV head's first row shares
    scores = normal(rng, N_HEAD_KV * HEADS, capacity)
    scores[:, :low] = scores[:, max(low, high) :] = -3e38
    kept = listed([[5]] * n_row, n_keep + 1)[:, : 1 + n_keep]
    expected = rows_in(kept)
    for h in range(N_HEAD_KV):
        own = [r for r in range(h * rows_per_kv, (h + 1) * rows_per_kv) if owners[r] == first + r]
        for i, r in enumerate(own):
            expected[r] = best(scores[h * HEADS + i * group], low, high, n_keep)
    for found in runs(
        ops.HSHARE_KEEP,
        out={
            "scores": scores, "maxima": maxima_of(scores, low, high), "kept": kept,
            "order": np.full((n_row, capacity), -7, np.int32), "begin": np.zeros(1, np.int64),
        },
        step=step_of(1, pos), owners=owners, n_row=n_row, rows_per_kv=rows_per_kv, group=group,
        capacity=capacity, n_keep=n_keep, n_sink=n_sink, n_local=n_local, first=first,
    ):  # fmt: skip
        assert rows_in(found["kept"]) == expected
        assert found["begin"] == [high]


@pytest.mark.parametrize(("n_layer_own", "n_row_own"), [(4, 3), (3, 2), (1, 1), (2, 3)])
@in_child
def test_the_most_alike_share(n_layer_own, n_row_own):
    rng = np.random.default_rng((n_layer_own, n_row_own))
    n_layer, n_row, n_keep = 4, 3, 20
    layers = np.array([0, 1, 3, 4], np.int32)  # layer 2 has a window of its own
    sets = [
        [sorted(rng.choice(60, rng.integers(0, n_keep), replace=False)) for _ in range(n_row)]
        for _ in range(5)
    ]
    common = [
        [[len({*a} & {*b}) for b in sets[m]] for a in sets[n]] for n in range(5) for m in range(5)
    ]
    at = np.array(common).reshape(5, 5, n_row, n_row)
    expected = np.full((5, n_row), -7)
    for m in layers:
        expected[m] = n_row * m + np.array(sharing(at[m, m], n_row_own))
    alike = [[np.trace(at[a, b]) for b in layers] for a in layers]
    for m, i in zip(layers, sharing(alike, n_layer_own), strict=True):
        expected[m] = expected[layers[i]]
    assert len({*map(tuple, expected[layers])}) == n_layer_own
    n = max(n_layer, n_row)
    for found in runs(
        ops.HSHARE_MAP,
        out={
            "owners": np.full((5, n_row), -7, np.int32), "chosen": np.zeros(n, np.int32),
            "alike": np.full((n, n), np.nan, np.float32),
        },
        kept=np.concatenate([listed(rows, n_keep) for rows in sets]), layers=layers,
        n_layer=n_layer, n_row=n_row, n_keep=n_keep, n_layer_own=n_layer_own, n_row_own=n_row_own,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["owners"], expected)
