"""The baselines: worked examples of their papers, and what they keep of real attention."""

import numpy as np
import pytest
from stage import Stage, kernels, real_attention, weights_of

from tamis.select.hshare import n_own
from tamis.select.magicpig import sampling_probability
from tamis.select.snapkv import pyramid

KERNELS = [
    *kernels(["h2o", "snapkv", "magicpig:K=4,L=12,dense=0", "bigbird"], (16, 1, 1)),
    *kernels(["double_sparsity:label=0.125", "topk"], (32, 1, 2)),
    *kernels(["hshare", "topk:rows=head", "double_sparsity", "magicpig:dense=0"], (64, 2, 14)),
]
N_SEEN = 33  # queries that methods see before the step


def last_kept(text, *, pos, k, q, v=None):
    """What a method keeps at `pos` after it has seen the queries before; q [pos + 1, ..]."""
    stage = Stage(text, k, k if v is None else v, n_head=q.shape[1])
    stage.see(q[pos - min(pos, N_SEEN) : pos], pos - min(pos, N_SEEN))
    return stage, stage.decode(q[pos], pos)


def test_h2o_evicts_the_smallest_sum_when_the_window_moves_on():
    """Two heavy hitters, a window of two. The prompt's last query looks at 1, 2 and a little at 3.

    The next step looks at 5, in the window: when 5 leaves it, it has a whole step's weight, and 2,
    which had less than half of one, goes. 6, which no one looks at, does not come in after it.
    """
    k = np.zeros((1, 12, 16), np.float16)
    for j in range(12):
        k[0, j, j] = 8
    q = np.zeros((12, 1, 16), np.float32)
    q[5, 0, 1:4] = 6, 5.9, 5
    q[6, 0, 5] = q[7, 0, 5] = 10
    stage = Stage("h2o:budget=4,recent=0.5,sink=0,s=1", k, k, n_head=1)
    stage.see(q[5:6], 5)
    for pos, kept in ((6, [1, 2, 5, 6]), (7, [1, 5, 6, 7]), (8, [1, 5, 7, 8])):
        assert np.flatnonzero(stage.decode(q[pos], pos).kept[0]).tolist() == kept


def test_snapkv_keeps_whole_clusters():
    """One position stands out; pooling over five neighbours keeps those beside it (Listing 1)."""
    rng = np.random.default_rng(0)
    k = (0.01 * rng.standard_normal((1, 200, 16))).astype(np.float16)
    k[0, 90] = 4
    q = np.ones((200, 1, 16), np.float32)
    for kernel, kept in ((1, {90}), (5, {88, 89, 90, 91, 92})):
        text = f"snapkv:budget=13,window=8,sink=0,kernel={kernel}"
        found = set(np.flatnonzero(last_kept(text, pos=150, k=k, q=q)[1].kept[0]).tolist())
        assert kept <= found
        assert len(found) == 13 + 1  # and the query's own position


def test_pyramid_budgets_lie_on_a_line_and_sum_to_the_mean():
    """PyramidKV's beta: the last layer has 1 / beta of the mean."""
    budgets = pyramid(1000, 20, 5)
    assert budgets == [1950, 1475, 1000, 525, 50]
    assert pyramid(1000, 1, 3) == [1000, 1000, 1000]
    assert pyramid(77, 20, 1) == [77]


def test_label_channels_find_what_few_channels_tell():
    """Keys and queries that live in 4 of 32 channels: an eighth of them chooses as all do."""
    rng = np.random.default_rng(1)
    k, q = np.zeros((1, 400, 32), np.float16), np.zeros((400, 2, 32), np.float32)
    for c in (3, 8, 9, 30):
        k[0, :, c], q[:, :, c] = rng.standard_normal(400), rng.standard_normal((400, 2))
    texts = "double_sparsity:budget=50,label=0.125,sink=4,recent=8", "topk:k=38,sink=4,recent=8"
    few, exact = (last_kept(text, pos=300, k=k, q=q)[1].kept for text in texts)
    np.testing.assert_array_equal(few, exact)


def test_hshare_that_shares_nothing_is_exact_top_k():
    k, q, at = real_attention()
    rows = Stage("hshare:budget=500,layers=1,heads=1,period=1,sink=16", k, k, n_head=14)
    exact = Stage("topk:k=420,sink=16,recent=64,rows=head", k, k, n_head=14)
    for i in (3, 9):
        found, expected = rows.decode(q[i], int(at[i])), exact.decode(q[i], int(at[i]))
        np.testing.assert_array_equal(found.kept, expected.kept)


def test_hshare_retrieves_the_share_that_it_says():
    """HShare(3/4-3/4-1/2): 0.28 of the head-steps (paper, Table 2)."""
    assert [n_own(0.75, n) for n in (4, 14, 24, 1)] == [3, 11, 18, 1]
    k, q, at = real_attention()
    pos = int(at[5])
    stage = Stage("hshare:budget=500,heads=0.5,period=2", k, k, n_head=14)
    stage.decode(q[4], pos)
    assert len(np.unique(stage.decode(q[5], pos + 1).kept, axis=0)) == 7
    before = stage.decode(q[5], pos + 2).kept
    after = stage.decode(q[6], pos + 3).kept  # between two retrievals sets stay
    np.testing.assert_array_equal(after[:, : pos + 2], before[:, : pos + 2])


def test_sampling_probability():
    """Orthogonal vectors share a bit in half of the cases; with K = 1 and L = 2 both in a quarter.

    Alike ones always; with K = 10 and L = 150 orthogonal ones in 0.9 %.
    """
    np.testing.assert_allclose(sampling_probability(np.array([0.0, 1.0]), 1, 2), [0.25, 1])
    np.testing.assert_allclose(sampling_probability(np.array([0.0]), 10, 150), [0.0097], rtol=0.02)


def test_magicpigs_samples_are_as_likely_as_it_says_and_weighed_by_that():
    """Over 30 sets of planes: how often a position is sampled, and the mean of the outputs."""
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 1, 300, 16)).astype(np.float16)
    q = rng.standard_normal((1, 16)).astype(np.float32)
    text = "magicpig:K=4,L=12,dense=0,sink=0,recent=1"
    stages = [Stage(f"{text},seed={seed}", k, v, n_head=1) for seed in range(30)]
    runs = [stage.decode(q, 299) for stage in stages]
    centred = k[0, :299].astype(float) - k[0, :299].astype(float).mean(axis=0)
    cosine = centred @ q[0] / np.linalg.norm(centred, axis=1) / np.linalg.norm(q)
    expected = sampling_probability(cosine, 4, 12)
    often = np.mean([run.kept[0, :299] for run in runs], axis=0)
    # Tables of one run share nothing: a mean of 30 draws, over 299 positions.
    assert abs((often - expected).mean()) < 0.02
    assert np.abs(often - expected).max() < 0.4
    weights = weights_of(q, k)
    dense = weights[0] @ v[0].astype(float)
    unweighted = []
    for run in runs:
        kept = weights[0] * run.kept[0]
        unweighted.append(kept @ v[0].astype(float) / kept.sum())
    weighted = [run.out[0] for run in runs]
    error, without = (
        np.linalg.norm(np.mean(outs, axis=0) - dense) for outs in (weighted, unweighted)
    )
    assert error < 0.7 * without


def test_bigbird_draws_anew_for_each_block_and_seed():
    k = np.zeros((1, 2048, 16), np.float16)
    q = np.zeros((1, 16), np.float32)
    kept = {}
    for seed in (0, 1):
        stage = Stage(f"bigbird:seed={seed}", k, k, n_head=1)
        for pos in (1900, 1901, 2000):
            found = stage.decode(q, pos).kept[0]
            low = (pos + 1 - 192) // 64 * 64  # the window in whole blocks
            assert found[:128].all()
            assert found[low:].all()
            kept[seed, pos] = np.flatnonzero(found[128:low]).tolist()
            assert len(kept[seed, pos]) == 192
    assert kept[0, 1900] == kept[0, 1901]
    assert kept[0, 1900] != kept[1, 1900]
    assert kept[0, 1900] != kept[0, 2000]


@pytest.mark.parametrize(
    ("text", "share"),
    [("double_sparsity:budget=512", 0.85), ("magicpig:dense=0", 0.6), ("bigbird", 0.6)],
)
def test_real_attention(text, share):
    """Weight that is kept of 3,000 positions, beside that of as many of the best."""
    k, q, at = real_attention()
    stage = Stage(text, k, k, n_head=14)
    mass, best = [], []
    for queries, pos in zip(q[::4], at[::4].tolist(), strict=True):
        kept, weights = stage.decode(queries, pos).kept, weights_of(queries, k[:, : pos + 1])
        n_best = kept.sum(axis=1)
        mass.append((weights * kept).sum(axis=1))
        best.append([np.sort(w)[-n:].sum() for w, n in zip(weights, n_best, strict=True)])
    print(text, np.mean(n_best), np.mean(mass), np.mean(best))
    assert np.mean(mass) > share * np.mean(best)
