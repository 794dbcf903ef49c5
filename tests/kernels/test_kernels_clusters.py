"""CLUSTER_VALUES, CLUSTER_ZONES and CLUSTER_ESTIMATE against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import kept_as, normal, numbers, page_table, paged
from guarded import in_child, runs

from tamis.jit_kernels.contract import ops
from tamis.select.clusters import Zones, estimated, zones

N_HEAD_KV, N_CTX, SINK, PER, N_SLOT, SCALE = 2, 448, 3, 8, 64, 0.3
SHAPES = [(64, 3, "f16"), (32, 1, "q8_0")]  # head_dim, heads of a KV head, type of values
KERNELS = [
    *((ops.CLUSTER_VALUES, (head_dim, "f16", type_v)) for head_dim, _, type_v in SHAPES),
    *((ops.CLUSTER_ZONES, (group,)) for _, group, _ in SHAPES),
    *((ops.CLUSTER_ESTIMATE, (head_dim, group)) for head_dim, group, _ in SHAPES),
]
SPLITS = [Zones(False, 0.1, 0.5), Zones(False, 0, 1), Zones(True, 0.5, 0.9), Zones(True, 1, 1)]


def clustered(rng, n_cluster):
    """extent, starts and order of random clusters of each KV head, of which one is empty."""
    end = SINK + PER * n_cluster
    starts = np.full((N_HEAD_KV, N_SLOT + 1), -7, np.int32)
    order = np.full((N_HEAD_KV, N_CTX), -7, np.int32)
    for h in range(N_HEAD_KV):
        cuts = np.sort(rng.integers(0, end - SINK + 1, n_cluster - 1))
        if n_cluster > 2:
            cuts[1] = cuts[0]
        starts[h, : n_cluster + 1] = [0, *np.sort(cuts), end - SINK]
        order[h, : end - SINK] = SINK + rng.permutation(end - SINK)
    return np.array([SINK, end, n_cluster], np.int64), starts, order


def members(starts, order, h, c):
    return order[h, starts[h, c] : starts[h, c + 1]]


@pytest.mark.parametrize("n_cluster", [1, 37])
@pytest.mark.parametrize(("head_dim", "group", "type_v"), SHAPES)
@pytest.mark.on_threads
@in_child
def test_a_cluster_has_the_mean_of_its_values(head_dim, group, type_v, n_cluster):
    rng = np.random.default_rng((head_dim, n_cluster))
    extent, starts, order = clustered(rng, n_cluster)
    rows = kept_as(normal(rng, N_CTX, N_HEAD_KV, head_dim), type_v)
    table = page_table(rng, N_CTX, N_CTX // 64)
    for found in runs(
        ops.CLUSTER_VALUES, (head_dim, "f16", type_v),
        out={"values": np.full((N_HEAD_KV, N_SLOT, head_dim), -7, np.float16)},
        k_pages=np.zeros(1, np.uint8), k_table=np.zeros(1, np.int32), v_pages=paged(rows, table),
        v_table=table, extent=extent, starts=starts, order=order, per_cluster=PER, n_sink=SINK,
    ):  # fmt: skip
        for h, c in np.ndindex(N_HEAD_KV, n_cluster):
            values = numbers(rows)[members(starts, order, h, c), h]
            expected = values.mean(axis=0) if len(values) else 0
            np.testing.assert_allclose(found["values"][h, c], expected, rtol=0, atol=2e-3)
        assert (found["values"][:, n_cluster:] == -7).all()


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("n_cluster", [1, 37])
@pytest.mark.parametrize(("head_dim", "group", "type_v"), SHAPES)
@pytest.mark.on_threads
@in_child
def test_zones_are_the_best_clusters_and_the_next(head_dim, group, type_v, n_cluster, split):
    rng = np.random.default_rng((group, n_cluster))
    extent, starts, order = clustered(rng, n_cluster)
    scores = 8 * normal(rng, N_HEAD_KV * group, N_SLOT)
    values = normal(rng, N_HEAD_KV, N_SLOT, head_dim).astype(np.float16)
    head = np.arange(N_HEAD_KV * group)
    for found in runs(
        ops.CLUSTER_ZONES, (group,),
        out={
            "scores": scores,
            "tops": np.full((N_HEAD_KV * group, 2), np.nan, np.float32),
            "shares": np.full((N_HEAD_KV, N_SLOT), np.nan, np.float32),
            "bars": np.full((N_HEAD_KV, 2), -7, np.int32),
            "marks": np.full((N_HEAD_KV, N_CTX // 64), -7, np.int64),
            "count": np.full(N_HEAD_KV, -7, np.int32),
        },
        extent=extent, starts=starts, order=order, by_share=int(split.by_share),
        exact=split.exact, both=split.both, scale=SCALE,
    ):  # fmt: skip
        chosen = []
        for h in range(N_HEAD_KV):
            sizes = np.diff(starts[h, : n_cluster + 1])
            logits = SCALE * scores[h * group : (h + 1) * group, :n_cluster].astype(float)
            chosen.append((*zones(logits, sizes, split), sizes, logits))
            read = [members(starts, order, h, c) for c in np.flatnonzero(chosen[h][0])]
            bits = np.unpackbits(found["marks"][h].view(np.uint8), bitorder="little")
            expected = np.sort(np.concatenate([np.zeros(0, int), *read]))
            np.testing.assert_array_equal(np.flatnonzero(bits), expected)
            assert found["count"][h] == len(expected)
            bars, shares = found["bars"][h], found["shares"][h].view(np.int32)[:n_cluster]
            among = (bars[1] <= shares) & (shares < bars[0])
            np.testing.assert_array_equal(among, chosen[h][1])
    given = {name: found[name].copy() for name in ("scores", "shares", "bars")}
    for answer in runs(
        ops.CLUSTER_ESTIMATE, (head_dim, group),
        out={
            "out": np.full((1, len(head), head_dim), np.nan, np.float32),
            "lse": np.full((1, len(head)), np.nan, np.float32),
        },
        extent=extent, starts=starts, values=values, scale=SCALE, **given,
    ):  # fmt: skip
        for h, (_, among, sizes, logits) in enumerate(chosen):
            own = slice(h * group, (h + 1) * group)
            if not among.any():
                assert (answer["out"][0, own] == 0).all()
                assert (answer["lse"][0, own] < -1e29).all()
                continue
            out, lse = estimated(logits[:, among], sizes[among], values[h, :n_cluster][among])
            np.testing.assert_allclose(answer["out"][0, own], out, rtol=0, atol=2e-4)
            np.testing.assert_allclose(answer["lse"][0, own], lse, rtol=0, atol=1e-4)
