"""HIP_ESTIMATE and HIP_SELECT against NumPy, between unmapped pages."""

from itertools import pairwise

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from test_kernels_attention import normal, page_table, paged
from test_kernels_select import rows_of

from tamis.jit_kernels import ops

SHAPES = [(16, 1), (64, 2)]  # head_dim, group
KERNELS = [*((ops.HIP_ESTIMATE, shape) for shape in SHAPES), (ops.HIP_SELECT, ())]


def search(score, low, high, n_chunk):
    """Alg. 1 over blocks low .. high - 1, as the paper writes it, with inclusive ends."""
    n = high - low
    if n <= n_chunk:
        return list(range(low, high))

    def nearest(x):
        return int(np.floor(x + 0.5))

    ends = [low + nearest(j * n / n_chunk) for j in range(n_chunk + 1)]
    chunks = [(f, e - 1) for f, e in pairwise(ends)]
    while any(f < last for f, last in chunks):
        branches = []
        for f, last in chunks:
            m = nearest((f + last) / 2)
            branches += [(f, m - 1), (m, last)] if m > f else [(f, last)]
        scores = np.array([score((f + last) // 2) for f, last in branches])
        best = np.argsort(-scores, kind="stable")[:n_chunk]
        chunks = [branches[i] for i in sorted(best)]
    return [f for f, _ in chunks]


def check_search(q, k, *, group, heads_per_kv, block, stride, n_sink, n_local, n_chunk):
    n_kv, n_head_kv, head_dim = k.shape
    n_row = q.shape[1] // group
    expected = np.full((n_row, 1 + n_chunk), -7, np.int32)
    high = max(n_sink, (n_kv - n_local) // block)
    for r in range(n_row):
        heads = q[0, r * group : (r + 1) * group].astype(float)
        dots = (heads @ k[:, r * group // heads_per_kv].astype(float).T).max(axis=0)

        def score(b, dots=dots):
            return dots[b * block : (b + 1) * block : stride].max()

        found = search(score, n_sink, high, n_chunk)
        expected[r, 0], expected[r, 1 : 1 + len(found)] = len(found), found
    table = page_table(np.random.default_rng(3), n_kv, -(-n_kv // 64) + 1)
    for found in runs(
        ops.HIP_ESTIMATE, (head_dim, group),
        out={
            "mask": np.full((n_row, 1 + n_chunk), -7, np.int32),
            "tree": np.full((n_row, 8, n_chunk), -7, np.int32),
        },
        step=step_of(1, n_kv - 1), q=q, k_pages=paged(k, table), k_table=table, n_row=n_row,
        heads_per_kv=heads_per_kv, n_head_kv=n_head_kv, n_chunk=n_chunk, block=block,
        stride=stride, n_sink=n_sink, n_local=n_local,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["mask"], expected)


@pytest.mark.parametrize(("block", "stride"), [(1, 1), (2, 1), (7, 3), (16, 16)])
@pytest.mark.parametrize(("n_sink", "n_local", "n_chunk"), [(0, 1, 1), (1, 20, 5), (2, 33, 24)])
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
@pytest.mark.parametrize("n_kv", [1, 40, 333])
@in_child
def test_the_search_is_algorithm_1(head_dim, group, n_kv, n_sink, n_local, n_chunk, block, stride):
    rng = np.random.default_rng((head_dim, n_kv, block, n_chunk))
    k = normal(rng, n_kv, 2, head_dim).astype(np.float16)
    q = normal(rng, 1, 6 * group, head_dim)
    check_search(
        q, k, group=group, heads_per_kv=3 * group, block=block, stride=stride, n_sink=n_sink,
        n_local=n_local, n_chunk=n_chunk,
    )  # fmt: skip


@in_child
def test_equal_scores_keep_the_lower_blocks():
    q, k = np.ones((1, 2, 16), np.float32), np.ones((100, 2, 16), np.float16)
    check_search(
        q, k, group=1, heads_per_kv=1, block=2, stride=1, n_sink=1, n_local=5, n_chunk=6
    )  # fmt: skip


@pytest.mark.parametrize("pos", [0, 5, 40, 47, 48, 90])
@pytest.mark.parametrize(("n_sink", "n_local"), [(0, 1), (3, 7)])
@pytest.mark.parametrize("n_near", [0, 1, 30])
@in_child
def test_the_selection_joins_sinks_mask_and_window(pos, n_sink, n_local, n_near):
    block, n_chunk = 2, 4
    chosen = [[4, 5, 9], [3, 4, 5, 9], [], [20]]
    mask = np.full((len(chosen), 1 + n_chunk), 99, np.int32)
    expected = []
    high, end = max(0, pos + 1 - n_local) // block, pos // block + 1
    for row, blocks in zip(mask, chosen, strict=True):
        row[: 1 + len(blocks)] = len(blocks), *blocks
        near = {i for b in blocks for i in range(max(0, b - n_near), b + n_near + 1) if i < high}
        expected.append(sorted({*range(min(n_sink, high)), *near, *range(high, end)}))
    for found in runs(
        ops.HIP_SELECT,
        out={
            "indptr": np.full(len(chosen) + 1, -7, np.int32),
            "indices": np.full(sum(map(len, expected)), -7, np.int32),
        },
        step=step_of(1, pos), mask=mask, n_row=len(chosen), n_chunk=n_chunk, block=block,
        n_sink=n_sink, n_local=n_local, n_near=n_near,
    ):  # fmt: skip
        assert rows_of(found) == expected
