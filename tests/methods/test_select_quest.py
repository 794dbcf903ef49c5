"""Quest: a worked example, and real attention."""

import numpy as np
from stage import Stage, kernels, real_attention, weights_of

KERNELS = kernels(["quest:dense=0"], (16, 1, 1), (16, 2, 4), (64, 2, 14))


def test_pages_are_chosen_by_their_bounds_not_by_their_best_keys():
    """Section 3.3's bound on three pages of two keys, q = (1, -1, 0, ..).

    Page 0: (3, 0) and (0, -3): M = (3, 0), m = (0, -3), bound 3 + 3 = 6, best key 3.
    Page 1: (2, -2) twice: M = m, bound 4, best key 4.
    Page 2: (1, 0) and (1, 1): M = (1, 1), m = (1, 0), bound 1 + 0 = 1, best key 1.
    Page 3 is the query's own.
    """
    k = np.zeros((1, 7, 16), np.float16)
    k[0, :6, :2] = [(3, 0), (0, -3), (2, -2), (2, -2), (1, 0), (1, 1)]
    q = np.zeros((1, 16), np.float32)
    q[0, :2] = 1, -1
    for budget, pages in ((2, [3]), (4, [0, 3]), (6, [0, 1, 3]), (8, [0, 1, 2, 3])):
        text = f"quest:budget={budget},page=2,dense=0,sink=0,recent=1"
        kept = Stage(text, k, k, n_head=1).decode(q, 6).kept[0]
        assert sorted(set(np.flatnonzero(kept) // 2)) == pages


def test_bounds_follow_what_is_appended_and_truncated():
    rng = np.random.default_rng(0)
    k = rng.standard_normal((2, 300, 16)).astype(np.float16)
    q = rng.standard_normal((300, 4, 16)).astype(np.float32)
    text = "quest:budget=64,page=8,dense=0,sink=4,recent=8"
    stage, fresh = Stage(text, k, k, n_head=4), Stage(text, k, k, n_head=4)
    for pos in [*range(100, 140), 250, 299]:
        stage.decode(q[pos], pos)
    stage.state.truncate(130)
    for pos in (130, 131, 200):
        found, expected = stage.decode(q[pos], pos), fresh.decode(q[pos], pos)
        np.testing.assert_array_equal(found.kept, expected.kept)


def test_real_attention():
    """512 of 3,000 positions have 0.826 (when written) of the weight of the best 512."""
    k, q, at = real_attention()
    stage = Stage("quest:budget=512,dense=0", k, k, n_head=14)
    mass, best = [], []
    for queries, pos in zip(q, at.tolist(), strict=True):
        kept, weights = stage.decode(queries, pos).kept, weights_of(queries, k[:, : pos + 1])
        assert (kept.sum(axis=1) <= 512).all()
        mass.append((weights * kept).sum(axis=1))
        best.append(np.sort(weights, axis=1)[:, -512:].sum(axis=1))
    assert np.mean(mass) > 0.81 * np.mean(best)
