"""INDEX_SCORE and INDEX_CHOOSE against NumPy float64, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE

HEAD_DIM, N_KEY = 96, 32
KERNELS = [(ops.INDEX_SCORE, (HEAD_DIM, N_KEY, "f16")), (ops.INDEX_CHOOSE, ())]
KERNELS += [(ops.HEAD_SCORE, (HEAD_DIM, N_KEY, "f16")), (ops.HEAD_CHOOSE, ())]
KERNELS += [(ops.ENTRY_CHOOSE, ())]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos", "n_head"), [(1, 0, 1), (1, 130, 3), (5, 62, 4)])
@pytest.mark.parametrize(("block", "n_head_kv"), [(1, 1), (4, 3)])
@in_child
def test_scores_are_weighed_products_above_0(n_tok, pos, n_head, block, n_head_kv):
    rng = np.random.default_rng((n_tok, pos))
    n_page = -(-(pos + n_tok) // PAGE)
    table = rng.permutation(n_page + 2)[:n_page].astype(np.int32)
    pages = normal(rng, n_page + 2, n_head_kv, PAGE, HEAD_DIM).astype(np.float16)
    rows = pages[table, -1].reshape(-1, HEAD_DIM)[block - 1 :: block]
    keys = rows[:, -N_KEY:].astype(np.float64)
    q, weights = normal(rng, n_tok, n_head, N_KEY), normal(rng, n_tok, n_head)
    products = np.maximum(np.einsum("thd,jd->thj", q.astype(np.float64), keys), 0)
    expected = np.einsum("th,thj->tj", weights.astype(np.float64), products)
    capacity = n_page * PAGE
    before = np.full((n_tok, capacity), np.nan, np.float32)
    for found in runs(
        ops.INDEX_SCORE, (HEAD_DIM, N_KEY, "f16"), out={"scores": before}, scratch=4 * N_KEY,
        step=step_of(n_tok, pos), q=q, weights=weights, k_pages=pages, k_table=table,
        n_head=n_head, n_head_kv=n_head_kv, block=block, capacity=capacity,
    ):  # fmt: skip
        for t in range(n_tok):
            n = (pos + t + 1) // block
            # Sums of 32 products of numbers below about 4, times four weights.
            np.testing.assert_allclose(found["scores"][t, :n], expected[t, :n], rtol=0, atol=1e-4)
            assert np.isnan(found["scores"][t, n:]).all()


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (1, 40), (6, 5), (9, 30)])
@pytest.mark.parametrize("top_k", [1, 8, 33])
@pytest.mark.parametrize(("block", "n_row"), [(1, 1), (4, 2)])
@in_child
def test_each_token_gets_its_best_blocks_and_its_own(n_tok, pos, top_k, block, n_row):
    rng = np.random.default_rng((n_tok, pos, top_k))
    scores = rng.integers(-9, 9, (n_tok, 64)).astype(np.float32)
    rows = []
    for t in range(n_tok):
        n, tail = divmod(pos + t + 1, block)
        best = np.sort(np.argsort(-scores[t, :n], kind="stable")[:top_k])
        rows += [np.append(best, n) if tail else best] * n_row
    out = {
        "indptr": np.full(n_tok * n_row + 1, -7, np.int32),
        "indices": np.full(sum(map(len, rows)), -7, np.int32),
    }
    for found in runs(
        ops.INDEX_CHOOSE, out=out, step=step_of(n_tok, pos), scores=scores, capacity=64,
        top_k=top_k, block=block, n_row=n_row,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["indptr"], np.cumsum([0, *map(len, rows)]))
        np.testing.assert_array_equal(found["indices"], np.concatenate(rows))


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos", "block"), [(1, 0, 4), (1, 130, 3), (5, 62, 4)])
@in_child
def test_each_head_scores_blocks_by_their_best_position(n_tok, pos, block):
    rng = np.random.default_rng((n_tok, pos))
    n_head, n_page, n_local = 2, -(-(pos + n_tok) // PAGE), 2
    table = rng.permutation(n_page + 2)[:n_page].astype(np.int32)
    pages = normal(rng, n_page + 2, 3, PAGE, HEAD_DIM).astype(np.float16)
    keys = pages[table, -1].reshape(-1, HEAD_DIM)[:, -N_KEY:].astype(np.float64)
    q = normal(rng, n_tok, n_head, N_KEY)
    products = np.einsum("thd,jd->thj", q.astype(np.float64), keys)
    capacity = n_page * PAGE // block
    before = np.full((n_tok, n_head, capacity), np.nan, np.float32)
    for found in runs(
        ops.HEAD_SCORE, (HEAD_DIM, N_KEY, "f16"), out={"scores": before}, scratch=4 * N_KEY,
        step=step_of(n_tok, pos), q=q, k_pages=pages, k_table=table, n_head=n_head, n_head_kv=3,
        block=block, n_local=n_local, capacity=capacity,
    ):  # fmt: skip
        for t in range(n_tok):
            p = pos + t
            n = p // block + 1
            expected = [products[t, :, b * block : min(b * block + block, p + 1)] for b in range(n)]
            expected = np.stack([each.max(axis=1) for each in expected], axis=1)
            expected[:, max(0, n - n_local) :] = ops.FORCED
            np.testing.assert_allclose(found["scores"][t, :, :n], expected, rtol=1e-6, atol=1e-4)
            assert np.isnan(found["scores"][t, :, n:]).all()


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (1, 40), (6, 5)])
@pytest.mark.parametrize("top_k", [1, 8])
@in_child
def test_each_head_gets_its_best_blocks_and_other_rows_none(n_tok, pos, top_k):
    rng = np.random.default_rng((n_tok, pos, top_k))
    scores, block, n_head, n_row = rng.integers(-9, 9, (n_tok, 2, 64)), 3, 2, 3
    scores, rows = scores.astype(np.float32), []
    for t in range(n_tok):
        n = (pos + t) // block + 1
        rows += [np.sort(np.argsort(-s[:n], kind="stable")[:top_k]) for s in scores[t]]
        rows.append(np.zeros(0, np.int64))
    out = {
        "indptr": np.full(n_tok * n_row + 1, -7, np.int32),
        "indices": np.full(sum(map(len, rows)), -7, np.int32),
    }
    for found in runs(
        ops.HEAD_CHOOSE, out=out, step=step_of(n_tok, pos), scores=scores, block=block,
        n_head=n_head, n_row=n_row, capacity=64, top_k=top_k,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["indptr"], np.cumsum([0, *map(len, rows)]))
        np.testing.assert_array_equal(found["indices"], np.concatenate(rows))


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (1, 40), (6, 5), (9, 30)])
@pytest.mark.parametrize("top_k", [1, 8, 33])
@pytest.mark.parametrize("every", [0, 4])
@in_child
def test_each_token_gets_its_window_and_the_ends_of_its_best_blocks(n_tok, pos, top_k, every):
    rng = np.random.default_rng((n_tok, pos, top_k))
    scores = rng.integers(-9, 9, (n_tok, 64)).astype(np.float32)
    rows = []
    for t in range(n_tok):
        n = (pos + t + 1) // every if every else 0
        best = np.sort(np.argsort(-scores[t, :n], kind="stable")[:top_k])
        rows += [np.arange(max(0, pos + t - 6), pos + t + 1), every * (best + 1) - 1]
    out = {
        "indptr": np.full(2 * n_tok + 1, -7, np.int32),
        "indices": np.full(sum(map(len, rows)), -7, np.int32),
    }
    for found in runs(
        ops.ENTRY_CHOOSE, out=out, step=step_of(n_tok, pos), scores=scores, n_window=7,
        every=every, capacity=64, top_k=top_k,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["indptr"], np.cumsum([0, *map(len, rows)]))
        np.testing.assert_array_equal(found["indices"], np.concatenate(rows))
