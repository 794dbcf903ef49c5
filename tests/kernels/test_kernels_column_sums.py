"""COLUMN_SUMS and COLUMN_ADD against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal, page_table, paged
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops

SHAPES = [(16, 2, 1), (64, 7, 7), (80, 6, 3)]  # head_dim, heads, group
KERNELS = [
    *((ops.COLUMN_SUMS, shape) for shape in SHAPES),
    *((ops.COLUMN_ADD, (head_dim, group)) for head_dim, _, group in SHAPES),
]
N_HEAD_KV, SCALE = 2, 0.3


def softmax(q, k):
    """Weights float64 [group, n] of f32 q [group, head_dim] over f16 k [n, head_dim]."""
    scores = SCALE * (q.astype(float) @ k.astype(float).T)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("pos", "n_held"), [(0, 0), (3, 3), (63, 5), (64, 5), (200, 5), (200, 0)])
@pytest.mark.parametrize(("head_dim", "heads", "group"), SHAPES)
@in_child
def test_sums_are_of_the_last_queries_weights(head_dim, heads, group, pos, n_held):
    rng = np.random.default_rng((head_dim, pos, n_held))
    n_row, n_past, capacity = N_HEAD_KV * heads // group, 5, 256
    k = normal(rng, pos + 1, N_HEAD_KV, head_dim).astype(np.float16)
    q = normal(rng, pos + 1, N_HEAD_KV * heads, head_dim)
    past, past_pos = normal(rng, n_past, N_HEAD_KV * heads, head_dim), np.full(n_past, -1, np.int64)
    for p in range(pos - n_held, pos):
        past[p % n_past], past_pos[p % n_past] = q[p], p
    expected = np.zeros((n_row, capacity))
    for p in range(pos - n_held, pos) if n_held else [pos]:
        for r in range(n_row):
            own = slice(r * group, (r + 1) * group)
            weights = softmax(q[p, own], k[: p + 1, r * group // heads])
            expected[r, : p + 1] += weights.sum(axis=0)
    table = page_table(rng, pos + 1, 5)
    for found in runs(
        ops.COLUMN_SUMS, (head_dim, heads, group),
        out={
            "sums": normal(rng, n_row, capacity),
            "scores": np.full((N_HEAD_KV * heads, capacity), np.nan, np.float32),
        },
        step=step_of(1, pos), q=q[pos:], past=past, past_pos=past_pos, k_pages=paged(k, table),
        k_table=table, n_head_kv=N_HEAD_KV, capacity=capacity, n_past=n_past, scale=SCALE,
    ):  # fmt: skip
        # Sums of up to 35 float32 weights.
        np.testing.assert_allclose(found["sums"], expected, rtol=1e-4, atol=1e-6)


@in_child
def test_a_query_that_is_missing_ends_the_ones_before_it():
    """Queries at 7, 8 and 10 before position 11: only the last one is next to it."""
    head_dim, heads, group = SHAPES[0]
    rng = np.random.default_rng(0)
    n = N_HEAD_KV * heads
    k, q = normal(rng, 12, N_HEAD_KV, head_dim).astype(np.float16), normal(rng, 12, n, head_dim)
    past, at = np.zeros((4, n, head_dim), np.float32), np.full(4, -1, np.int64)
    for p in (7, 8, 10):
        past[p % 4], at[p % 4] = q[p], p
    table = page_table(rng, 12, 1)
    for found in runs(
        ops.COLUMN_SUMS, (head_dim, heads, group),
        out={"sums": np.zeros((n, 64), np.float32), "scores": np.zeros((n, 64), np.float32)},
        step=step_of(1, 11), q=q[11:], past=past, past_pos=at, k_pages=paged(k, table),
        k_table=table, n_head_kv=N_HEAD_KV, capacity=64, n_past=4, scale=SCALE,
    ):  # fmt: skip
        np.testing.assert_allclose(found["sums"].sum(axis=1), 1, rtol=1e-5)
        assert (found["sums"][:, 11:] == 0).all()


@pytest.mark.parametrize("n_kept", [1, 15, 16, 100])
@pytest.mark.parametrize(("head_dim", "heads", "group"), SHAPES)
@in_child
def test_a_steps_weights_over_its_selection_are_added(head_dim, heads, group, n_kept):
    rng = np.random.default_rng((head_dim, n_kept))
    n, n_row, most = 150, N_HEAD_KV * heads // group, -(-n_kept // 16) * 16
    k = normal(rng, n, N_HEAD_KV, head_dim).astype(np.float16)
    q = normal(rng, 1, N_HEAD_KV * heads, head_dim)
    sizes = np.maximum(1, n_kept - np.arange(n_row) % 3)
    rows = [np.sort(rng.choice(n, size, replace=False)).astype(np.int32) for size in sizes]
    before = normal(rng, n_row, n)
    expected = before.astype(float)
    for r, row in enumerate(rows):
        weights = softmax(q[0, r * group : (r + 1) * group], k[row, r * group // heads])
        expected[r, row] += weights.sum(axis=0)
    table = page_table(rng, n, 4)
    for found in runs(
        ops.COLUMN_ADD, (head_dim, group),
        out={
            "sums": before, "lines": np.full((n_row, most), -1, np.int32),
            "scores": np.full((N_HEAD_KV * heads, most), np.nan, np.float32),
        },
        step=step_of(1, n - 1), q=q, k_pages=paged(k, table), k_table=table,
        indptr=np.cumsum([0, *sizes]).astype(np.int32), indices=np.concatenate(rows), n_row=n_row,
        heads_per_kv=heads, n_head_kv=N_HEAD_KV, capacity=n, most=most, scale=SCALE,
    ):  # fmt: skip
        np.testing.assert_allclose(found["sums"], expected, rtol=1e-5, atol=1e-5)
