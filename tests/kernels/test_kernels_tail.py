"""TAIL_SIZE, TAIL_PLAN, TAIL_DRAW and TAIL_MERGE against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import kept_as, normal, numbers, page_table, paged
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import METER
from tamis.select.dense import Dense
from tamis.select.tail import BOUNDS, Tail, chances, need_of, random_number, sample_size, sampled

N_HEAD_KV, N_CTX, UNIT, N_SAMPLE, N_ROW = 2, 448, 16, 32, 4
SHAPES = [(64, 3, "f16"), (32, 1, "q8_0"), (80, 2, "f16")]  # head_dim, heads of a row, type
KERNELS = [
    *((ops.TAIL_SIZE, (*shape[:2], "f16", shape[2])) for shape in SHAPES),
    (ops.TAIL_PLAN, ()), (ops.TAIL_DRAW, ()), (ops.TAIL_MERGE, ()),
]  # fmt: skip


def left_of(kept):
    """Positions left out of each unit, int32 [n_row, n_unit]."""
    padded = np.zeros((len(kept), N_CTX), np.int32)
    padded[:, : kept.shape[1]] = ~kept
    return padded.reshape(len(kept), -1, UNIT).sum(axis=2).astype(np.int32)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("pos", "weight"), [(431, 0.1), (431, 0.4), (40, 0.1)])
@pytest.mark.parametrize(("head_dim", "group", "type_v"), SHAPES)
@pytest.mark.on_threads
@in_child
def test_a_row_samples_as_many_as_its_neediest_head(head_dim, group, type_v, pos, weight, bound):
    rng, n = np.random.default_rng((head_dim, pos)), pos + 1
    p = Tail(Dense(), epsilon=0.1, samples=N_SAMPLE, bound=bound)
    rows = kept_as(normal(rng, n, N_HEAD_KV, head_dim), type_v)
    table = page_table(rng, n, N_CTX // 64)
    kept = 2 + normal(rng, 1, N_ROW * group, head_dim)
    left = left_of(rng.random((N_ROW, n)) < 0.1)
    indices = rng.integers(0, n, (N_ROW, N_SAMPLE)).astype(np.int32)
    weights = np.exp(normal(rng, N_ROW, group, N_SAMPLE + 1)) * np.float32(weight / N_SAMPLE)
    weights[..., -1] = weights[..., :-1].sum(axis=-1)
    epsilon, z = p.asked
    report = np.full((N_ROW * group, len(METER)), 0.25, np.float32)
    size = (2 * group + 1) * head_dim + 2 * group
    for found in runs(
        ops.TAIL_SIZE, (head_dim, group, "f16", type_v),
        out={
            "work": np.full((N_ROW, size), np.nan, np.float32),
            "needs": np.full(N_ROW, -7, np.int32),
            "report": report,
        },
        step=step_of(1, pos), k_pages=np.zeros(1, np.uint8), k_table=np.zeros(1, np.int32),
        v_pages=paged(rows, table), v_table=table,
        indptr=np.arange(N_ROW + 1, dtype=np.int32) * N_SAMPLE, indices=indices, weights=weights,
        left=left, kept=kept, n_row=N_ROW, n_sample=N_SAMPLE, heads_per_kv=2 * group,
        n_head_kv=N_HEAD_KV, block=1, window=0, stride=1, unit=UNIT, bounded=BOUNDS.index(bound),
        epsilon=epsilon, z=z, most=p.most,
    ):  # fmt: skip
        for r in range(N_ROW):
            values = numbers(rows)[indices[r], r // 2].astype(float)
            heads = range(r * group, (r + 1) * group)
            sizes = np.array(
                [
                    sample_size(
                        p, weights[r, g, :-1].astype(float), values, kept[0, h].astype(float)
                    )
                    for g, h in enumerate(heads)
                ]
            )
            need = need_of(p, sizes, int(left[r].sum()))
            # Sums in float32: a number of samples may be rounded to its neighbour.
            assert abs(found["needs"][r] - need) <= 1 + need // 5000
            held = (1, ops.ALL) if need == ops.READ_ALL else (0.25, 0.25)
            for h in heads:
                assert (found["report"][h, METER.held], found["report"][h, METER.needed]) == held


@pytest.mark.parametrize("even", [1.0, 0.3])
@pytest.mark.parametrize("block", [1, 2, 64])
@pytest.mark.parametrize("pos", [130, 431])
@pytest.mark.on_threads
@in_child
def test_samples_are_apart_and_weigh_what_they_stand_for(pos, block, even):
    rng, n, p = np.random.default_rng((pos, block)), pos + 1, Tail(Dense(), even=even)
    n_block, n_unit = -(-n // block), N_CTX // UNIT
    rows = [np.flatnonzero(rng.random(n_block) < 0.3) for _ in range(N_ROW)]
    kept = np.array([np.isin(np.arange(n) // block, row) for row in rows])
    left, scores = left_of(kept), np.exp(2 * normal(rng, N_ROW, n_unit)).astype(np.float32)
    needs = np.array([32, ops.READ_ALL, 16, 48], np.int32)
    given = {
        "step": step_of(1, pos), "needs": needs, "left": left, "scores": scores, "unit": UNIT,
        "layer": 5, "seed": 9,
    }  # fmt: skip
    unwritten = np.full((N_ROW, n_unit + 1), -7, np.int32)
    rates = np.full((N_ROW, 2), np.nan, np.float32)
    (planned, *_) = runs(
        ops.TAIL_PLAN, (), out={"rates": rates, "starts": unwritten}, even=even, **given
    )
    expected = []
    for r in range(N_ROW):
        chance = chances(p, needs[r], left[r, : -(-n // UNIT)], scores[r, : -(-n // UNIT)])
        start, *starts = (random_number(9, 5 * 65536 + r, pos, u) for u in (4096, *range(n_unit)))
        expected.append(sampled(~kept[r], chance, UNIT, start, np.array(starts)))
        assert planned["starts"][r, -1] == len(expected[-1][0])
    some = sum(len(row) for row, _ in expected)
    for found in runs(
        ops.TAIL_DRAW, (),
        out={
            "indptr": np.full(N_ROW + 1, -7, np.int32),
            "indices": np.full(some, -7, np.int32),
            "log_weight": np.full(some, np.nan, np.float32),
        },
        chosen=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        blocks=np.concatenate(rows).astype(np.int32), block=block, rates=planned["rates"],
        starts=planned["starts"], **given,
    ):  # fmt: skip
        for r, (at, log_weights) in enumerate(expected):
            own = slice(*found["indptr"][r : r + 2])
            np.testing.assert_array_equal(found["indices"][own], at)
            np.testing.assert_allclose(found["log_weight"][own], log_weights, atol=1e-5)
            assert not kept[r, at].any()
            assert (np.diff(at) > 0).all()


@pytest.mark.on_threads
@in_child
def test_kept_and_sampled_keys_share_one_softmax():
    rng, n_head, head_dim = np.random.default_rng(1), 6, 32
    outs, lses = normal(rng, 2, 1, n_head, head_dim), 3 * normal(rng, 2, 1, n_head)
    lses[1, 0, 0] = -2e29  # nothing was sampled
    shares = 1 / (1 + np.exp(lses[::-1].astype(float) - lses))
    for found in runs(
        ops.TAIL_MERGE, (), out={"out": outs[0], "lse": lses[0]},
        kept=outs[0].copy(), kept_lse=lses[0].copy(), sampled=outs[1], sampled_lse=lses[1],
    ):  # fmt: skip
        expected = (shares[..., None] * outs).sum(axis=0)
        np.testing.assert_allclose(found["out"], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["lse"], np.logaddexp(*lses), rtol=1e-5)
        np.testing.assert_array_equal(found["out"][0, 0], outs[0, 0, 0])


@pytest.mark.parametrize(("scale", "is_even"), [(1.0, False), (3e29, False), (5e29, True)])
def test_scores_whose_sum_is_no_scale_give_equal_chances(scale, is_even):
    """Those of scores whose sum is more than 1e30 are equal, as the kernel's are."""
    p, left = Tail(Dense(), epsilon=0.1, even=0.25), np.array([10, 10, 10])
    found = chances(p, 6, left, scale * np.array([0.05, 0.1, 0.15]))
    assert found.sum() == pytest.approx(0.6)
    assert (found[0] == found[2]) == is_even
