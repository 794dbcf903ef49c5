"""QUEST_BOUNDS and QUEST_SCORE against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import kept_as, normal, numbers, page_table, paged
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops

KINDS = [(16, "f16"), (80, "f16"), (64, "q8_0"), (96, "q4_0")]  # head_dim, type of keys
SHAPES = [(16, 1, 1), (16, 2, 2), (64, 7, 1), (80, 7, 7), (64, 40, 4)]
KERNELS = [
    *((ops.QUEST_BOUNDS, kind) for kind in KINDS),
    *((ops.QUEST_SCORE, shape) for shape in SHAPES),  # head_dim, heads of a KV head, group
]


def pages_of(k, page):
    """The keys [n_kv, n_head_kv, head_dim] cut into pages."""
    return [k[i : i + page] for i in range(0, len(k), page)]


@pytest.mark.on_threads
@pytest.mark.parametrize(("pos", "filled"), [(0, 0), (150, 0), (150, 150), (150, 97), (64, 151)])
@pytest.mark.parametrize("page", [5, 16, 100])
@pytest.mark.parametrize(("head_dim", "type_k"), KINDS)
@in_child
def test_bounds_are_those_of_the_pages_from_the_first_unfilled_position(
    head_dim, type_k, page, pos, filled
):
    rng = np.random.default_rng((head_dim, page, pos))
    k = kept_as(normal(rng, pos + 1, 2, head_dim), type_k)
    table = page_table(rng, pos + 1, 4)
    pages = pages_of(numbers(k), page)
    n_page = len(pages) + 2
    before = normal(rng, 2, n_page, 2, head_dim).astype(np.float16)
    expected = before.copy()
    for i, keys in enumerate(pages):
        if (i + 1) * page > min(filled, pos):
            expected[:, i, 0], expected[:, i, 1] = keys.max(axis=0), keys.min(axis=0)
    q = normal(rng, 3, head_dim)
    parts = np.stack([np.maximum(q, 0), np.minimum(q, 0)], axis=1)
    for found in runs(
        ops.QUEST_BOUNDS, (head_dim, type_k), out={"bounds": before, "parts": np.ones_like(parts)},
        step=step_of(1, pos), q=q, n_head=3, k_pages=paged(k, table), k_table=table,
        filled=np.array([filled]), n_head_kv=2, n_page=n_page, page=page,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["bounds"], expected)
        np.testing.assert_array_equal(found["parts"], parts)


@pytest.mark.parametrize("pos", [0, 62, 150, 700])
@pytest.mark.parametrize(("head_dim", "heads", "group"), SHAPES)
@in_child
def test_scores_are_upper_bounds(head_dim, heads, group, pos):
    rng = np.random.default_rng((head_dim, pos, heads))
    n_head_kv, page = 2, 16
    n_row = n_head_kv * heads // group
    q = normal(rng, 1, n_head_kv * heads, head_dim)
    k = normal(rng, pos + 1, n_head_kv, head_dim).astype(np.float16)
    pages = pages_of(k.astype(float), page)
    n_page = len(pages) + 1
    bounds = np.zeros((n_head_kv, n_page, 2, head_dim), np.float16)
    expected, exact = np.zeros((2, n_row, len(pages)))
    for i, keys in enumerate(pages):
        bounds[:, i, 0], bounds[:, i, 1] = keys.max(axis=0), keys.min(axis=0)
        by_row = np.repeat(bounds[:, i].astype(float), heads, axis=0)
        top = np.maximum(q[0] * by_row[:, 0], q[0] * by_row[:, 1]).sum(axis=1)
        expected[:, i] = top.reshape(n_row, group).max(axis=1)
        dots = np.einsum("hd,jhd->hj", q[0], np.repeat(keys, heads, axis=1))
        exact[:, i] = dots.max(axis=1).reshape(n_row, group).max(axis=1)
    before = normal(rng, n_head_kv * heads, n_page)
    for found in runs(
        ops.QUEST_SCORE, (head_dim, heads, group),
        out={"scores": before, "filled": np.array([-7])}, step=step_of(1, pos),
        parts=np.stack([np.maximum(q[0], 0), np.minimum(q[0], 0)], axis=1), bounds=bounds,
        n_head_kv=n_head_kv, n_page=n_page, page=page,
    ):  # fmt: skip
        assert found["filled"] == pos + 1
        # Float32 sums of at most 160 products.
        scores = found["scores"][::group, : len(pages)]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4)
        assert (scores >= exact - 1e-4).all()
        np.testing.assert_array_equal(found["scores"][:, len(pages) :], before[:, len(pages) :])
