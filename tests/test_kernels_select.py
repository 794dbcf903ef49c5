"""SELECT_WINDOW, SCORE_KEYS and SELECT_TOP_K against NumPy, between unmapped pages."""

from itertools import pairwise

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from test_kernels_attention import normal, page_table, paged

from tamis.jit_kernels import ops

SCORED = [(16, 1), (64, 2), (80, 7)]  # head_dim, group
KERNELS = [
    (ops.SELECT_WINDOW, ()), (ops.SELECT_TOP_K, ()), *((ops.SCORE_KEYS, s) for s in SCORED),
]  # fmt: skip


def rows_of(found):
    """The rows of a Selection."""
    indptr = found["indptr"]
    assert indptr[0] == 0
    return [found["indices"][a:b].tolist() for a, b in pairwise(indptr)]


# --- windows -------------------------------------------------------------------------------------


def window_rows(n_tok, pos, n_row, *, q_block, block, n_sink, n_recent):
    """Blocks that hold a sink or a recent position of some query, by trying every position."""
    rows = []
    for first in range(0, n_tok, q_block):
        queries = range(pos + first, pos + min(n_tok, first + q_block))
        kept = {
            j // block
            for p in queries
            for j in range(p + 1)
            if j < n_sink or n_recent == 0 or j > p - n_recent
        }
        # Whole blocks between a row's first and last query are all recent.
        rows += [sorted(kept)] * n_row
    return rows


@pytest.mark.parametrize(("n_sink", "n_recent"), [(0, 0), (4, 1), (0, 20), (17, 33), (64, 1000)])
@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize(
    ("n_tok", "pos", "q_block"), [(1, 0, 1), (1, 100, 1), (5, 98, 1), (37, 0, 16), (37, 100, 16)]
)
@in_child
def test_window(n_tok, pos, q_block, block, n_sink, n_recent):
    n_row = 2
    fixed = {"q_block": q_block, "block": block, "n_sink": n_sink, "n_recent": n_recent}
    expected = window_rows(n_tok, pos, n_row, **fixed)
    # The buffers end where the Selection does.
    indptr = np.full(len(expected) + 1, -7, np.int32)
    indices = np.full(sum(map(len, expected)), -7, np.int32)
    for found in runs(
        ops.SELECT_WINDOW, out={"indptr": indptr, "indices": indices}, step=step_of(n_tok, pos),
        n_row=n_row, **fixed,
    ):  # fmt: skip
        assert rows_of(found) == expected


# --- the best k ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pos", [0, 62, 150])
@pytest.mark.parametrize(("head_dim", "group"), SCORED)
@pytest.mark.parametrize("rows_per_kv", [1, 3])
@in_child
def test_scores_are_the_best_of_a_rows_heads(head_dim, group, rows_per_kv, pos):
    rng = np.random.default_rng((head_dim, pos, rows_per_kv))
    n_kv, n_head_kv = pos + 1, 2
    n_row, heads_per_kv = n_head_kv * rows_per_kv, group * rows_per_kv
    q = normal(rng, 1, n_row * group, head_dim)
    k = normal(rng, n_kv, n_head_kv, head_dim).astype(np.float16)
    table = page_table(rng, n_kv, 4)
    by_head = np.einsum("hd,jhd->hj", q[0], np.repeat(k.astype(float), heads_per_kv, axis=1))
    expected = 0.3 * by_head.reshape(n_row, group, n_kv).max(axis=1)
    capacity = n_kv + 3
    before = normal(rng, n_row, capacity)
    for found in runs(
        ops.SCORE_KEYS, (head_dim, group), out={"scores": before}, step=step_of(1, pos), q=q,
        k_pages=paged(k, table), k_table=table, n_row=n_row, heads_per_kv=heads_per_kv,
        n_head_kv=n_head_kv, capacity=capacity, scale_f=0.3,
    ):  # fmt: skip
        # Float32 sums of at most 80 products.
        np.testing.assert_allclose(found["scores"][:, :n_kv], expected, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(found["scores"][:, n_kv:], before[:, n_kv:])


def best(scores, n_sink, n_recent, n_top):
    """The kept positions of one row, ties to the lower position."""
    n_kv = len(scores)
    if n_sink + n_recent + n_top >= n_kv:
        return list(range(n_kv))
    middle = np.arange(n_sink, n_kv - n_recent)
    top = middle[np.argsort(-scores[middle], kind="stable")[:n_top]]
    return sorted([*range(n_sink), *range(n_kv - n_recent, n_kv), *top.tolist()])


def check_top_k(scores, n_kv, counts):
    """`counts`: sinks, recent and top. Only the first n_kv of each row's scores are there."""
    expected = [best(row[:n_kv], *counts) for row in scores]
    n_sink, n_recent, n_top = counts
    indptr = np.full(len(scores) + 1, -7, np.int32)
    indices = np.full(sum(map(len, expected)), -7, np.int32)
    for found in runs(
        ops.SELECT_TOP_K, out={"indptr": indptr, "indices": indices}, step=step_of(1, n_kv - 1),
        scores=scores, n_row=len(scores), capacity=scores.shape[1], block=1, n_sink=n_sink,
        n_recent=n_recent, n_top=n_top,
    ):  # fmt: skip
        assert rows_of(found) == expected


COUNTS = [
    (0, 1, 0), (4, 8, 0), (0, 1, 1), (4, 8, 16), (3, 0, 5), (1, 2, 96), (1, 2, 97), (4, 8, 5000),
    (200, 1, 1), (0, 200, 0),
]  # fmt: skip


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("n_kv", [1, 13, 100])
@in_child
def test_top_k_is_a_sort(n_kv, counts):
    rng = np.random.default_rng((n_kv, *counts))
    scores = normal(rng, 3, n_kv + 7)
    scores[:, n_kv:] = 1e9  # positions of the future
    check_top_k(scores, n_kv, counts)


@pytest.mark.parametrize("counts", COUNTS)
@in_child
def test_ties_go_to_the_lower_position(counts):
    rng = np.random.default_rng(counts)
    check_top_k(rng.integers(-2, 3, (3, 100)).astype(np.float32), 100, counts)
    check_top_k(np.full((2, 100), -1.5, np.float32), 100, counts)


@pytest.mark.parametrize("pos", [0, 15, 16, 99])
@in_child
def test_the_last_block_is_the_one_that_holds_pos(pos):
    scores = normal(np.random.default_rng(pos), 2, 100 // 16 + 1)
    n_block = pos // 16 + 1
    expected = [best(row[:n_block], 1, 1, 2) for row in scores]
    indptr = np.full(3, -7, np.int32)
    indices = np.full(sum(map(len, expected)), -7, np.int32)
    for found in runs(
        ops.SELECT_TOP_K, out={"indptr": indptr, "indices": indices}, step=step_of(1, pos),
        scores=scores, n_row=2, capacity=scores.shape[1], block=16, n_sink=1, n_recent=1, n_top=2,
    ):  # fmt: skip
        assert rows_of(found) == expected


@in_child
def test_scores_of_every_size_are_ordered():
    rng = np.random.default_rng(5)
    sizes = np.float32(10) ** rng.uniform(-38, 38, (2, 100)).astype(np.float32)
    scores = np.where(rng.random((2, 100)) < 0.5, -sizes, sizes)
    scores[:, [7, 50]] = np.inf
    scores[:, [8, 51]] = -np.inf
    check_top_k(scores, 100, (2, 2, 30))
    check_top_k(scores, 100, (2, 2, 95))


@in_child
def test_minus_zero_ties_with_zero():
    scores = np.array([[0.0, -0.0, 0.0, -0.0, -1.0, 0.0, 5.0]], np.float32)
    check_top_k(scores, 7, (0, 1, 2))
