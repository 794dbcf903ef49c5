"""Sets that outlive a step against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal
from guarded import in_child, runs, step_of
from kept_set_cases import best, listed, rows_in

from tamis.jit_kernels.contract import ops
from tamis.select.snapkv import SnapKV, chosen

KERNELS = [(op, ()) for op in (ops.KEPT_SETS, ops.H2O_KEEP, ops.SNAPKV_KEEP)]


@pytest.mark.parametrize(("pos", "begin"), [(0, 4), (3, 4), (20, 12), (40, 41)])
@pytest.mark.parametrize("owned", [False, True])
@in_child
def test_sets_are_sinks_kept_positions_and_the_end(pos, begin, owned):
    n_sink, n_keep, n_ctx = 4, 5, 64
    middle = range(n_sink, min(begin, pos + 1))
    rows = [list(middle)[:n] for n in (5, 0, 3)]
    owners = np.array([2, 0], np.int32)
    shown = [rows[i] for i in owners] if owned else rows
    expected = [[*range(min(4, pos + 1)), *row, *range(begin, pos + 1)] for row in shown]
    for found in runs(
        ops.KEPT_SETS, out={
            "sets": np.full((len(shown), n_ctx), -7, np.int32),
            "counts": np.full(len(shown), -7, np.int32),
        },
        step=step_of(1, pos), kept=listed(rows, n_keep), begin=np.array([begin]),
        n_row=len(shown), n_keep=n_keep, set_capacity=n_ctx, n_sink=n_sink,
        **({"owners": owners} if owned else {}), absent=() if owned else ("owners",),
    ):  # fmt: skip
        counts = found["counts"]
        assert [row[:n].tolist() for row, n in zip(found["sets"], counts, strict=True)] == expected


@pytest.mark.parametrize("n_keep", [0, 1, 12, 100])
@in_child
def test_heavy_hitters_are_the_largest_sums_so_far(n_keep):
    """Alg. 1: sums only grow for what is kept, so that what was evicted never belongs again."""
    rng = np.random.default_rng(n_keep)
    n_row, n_sink, n_local, capacity = 3, 4, 6, 128
    sums = rng.random((n_row, capacity), np.float32)
    kept = listed([[]] * n_row, n_keep)
    for pos in (60, 61, 62, 63, 64):
        low, high = n_sink, pos + 1 - n_local
        expected = [best(row, low, high, n_keep) for row in sums]
        for found in runs(
            ops.H2O_KEEP, out={"kept": kept, "begin": np.zeros(1, np.int64)}, step=step_of(1, pos),
            sums=sums, n_row=n_row, capacity=capacity, n_keep=n_keep, n_sink=n_sink,
            n_local=n_local, fresh=int(pos == 60),
        ):  # fmt: skip
            assert rows_in(found["kept"]) == expected
            assert found["begin"] == [high]
        kept = found["kept"].copy()
        for r, row in enumerate(expected):
            sums[r, row] += rng.random(len(row)).astype(np.float32)


@pytest.mark.parametrize(("pos", "fresh"), [(0, 1), (3, 0), (5, 1), (9, 0), (10, 0)])
@in_child
def test_without_a_middle_nothing_is_kept(pos, fresh):
    for found in runs(
        ops.H2O_KEEP, out={"kept": listed([[]], 3), "begin": np.zeros(1, np.int64)},
        step=step_of(1, pos), sums=np.zeros((1, 64), np.float32), n_row=1, capacity=64, n_keep=3,
        n_sink=4, n_local=7, fresh=fresh,
    ):  # fmt: skip
        assert rows_in(found["kept"]) == [[]]
        assert found["begin"] == [max(4, pos + 1 - 7)]


@pytest.mark.parametrize("average", [0, 1])
@pytest.mark.parametrize(("pool", "n_top"), [(1, 9), (7, 9), (3, 0), (7, 200)])
@pytest.mark.parametrize("ada", [0.0, 0.8])
@in_child
def test_votes_are_pooled_and_budgets_follow_them(average, pool, n_top, ada):
    rng = np.random.default_rng((pool, n_top))
    n_row, pos, n_sink, n_local, capacity = 3, 99, 4, 10, 128
    low, high = n_sink, pos + 1 - n_local
    sums = normal(rng, n_row, capacity) ** 2
    sums[1] *= 4  # this row's weights are spread: Ada-KV gives it more
    p = SnapKV(kernel=pool, pool="mean" if average else "max", ada=ada)
    expected = [(low + row).tolist() for row in chosen(p, sums[:, low:high].astype(float), n_top)]
    n_keep = int(np.ceil(n_top * (1 + ada * (n_row - 1))))
    assert ada == 0 or n_top != 9 or len(expected[1]) > n_top
    for found in runs(
        ops.SNAPKV_KEEP, out={
            "kept": listed([[]] * n_row, n_keep), "begin": np.zeros(1, np.int64),
            "pooled": np.full((n_row, capacity), np.nan, np.float32),
        },
        step=step_of(1, pos), sums=sums, n_row=n_row, capacity=capacity, n_keep=n_keep,
        n_sink=n_sink, n_local=n_local, n_top=n_top, pool=pool, average=average, ada=ada,
    ):  # fmt: skip
        assert rows_in(found["kept"]) == expected
        assert found["begin"] == [high]
