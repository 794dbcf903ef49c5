"""LOGIT_PARTS and LOGIT_BEST against NumPy, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs

from tamis.jit_kernels.contract import ops

KERNELS = [(ops.LOGIT_PARTS, ()), (ops.LOGIT_BEST, ())]
# n_vocab, n_best, n_part: parts of less than n_best, of none; one part; ties throughout
SHAPES = [(1, 1, 1), (7, 1, 3), (300, 40, 16), (5000, 1, 132), (5000, 40, 7), (9, 5, 16)]


def logits_of(n_vocab, few):
    """Logits, few of which differ, some that are impossible."""
    rng = np.random.default_rng(n_vocab)
    logits = rng.standard_normal(n_vocab) * 9
    if few:
        logits = logits.round() * 0.5
    logits[rng.random(n_vocab) < 0.1] = -np.inf
    logits[n_vocab // 2] = 3.25
    return logits.astype(np.float32)


def best(logits, ids, n):
    """The n best finite ones (id, logit), by falling logit and rising id."""
    order = np.lexsort((ids, -logits))[:n]
    return [(int(ids[i]), float(logits[i])) for i in order if logits[i] > -np.inf]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [3, 299])  # in whole vectors, and behind them
@in_child
def test_a_logit_that_is_no_number_shows_in_the_sum(bad, at):
    logits = logits_of(300, few=False)
    logits[at] = bad
    for found in runs(
        ops.LOGIT_PARTS, out=unwritten(4, 1), logits=logits, n_vocab=300, n_best=4, n_part=1
    ):
        assert not np.isfinite(found["sums"]).all()


def finite(ids, values):
    """What a kernel kept, but for impossible tokens, which it may keep or not."""
    kept = zip(ids.tolist(), values.tolist(), strict=True)
    return sorted([(i, x) for i, x in kept if x > -np.inf], key=lambda e: (-e[1], e[0]))


def unwritten(n_best, n_part):
    return {
        "ids": np.full((n_part, n_best), -7, np.int32),
        "values": np.full((n_part, n_best), np.nan, np.float32),
        "sums": np.full((n_part, 2), np.nan, np.float32),
    }


def log_sum(sums):
    """The logarithm that tops and sums stand for, float64."""
    sums = sums.astype(np.float64).reshape(-1, 2)
    with np.errstate(divide="ignore"):
        return np.logaddexp.reduce(sums[:, 0] + np.log(sums[:, 1]))


@pytest.mark.on_threads
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@in_child
def test_each_part_has_its_best(shape, few):
    n_vocab, n_best, n_part = shape
    logits, size = logits_of(n_vocab, few), -(-n_vocab // n_part)
    for found in runs(
        ops.LOGIT_PARTS, out=unwritten(n_best, n_part), logits=logits,
        n_vocab=n_vocab, n_best=n_best, n_part=n_part,
    ):  # fmt: skip
        for p in range(n_part):
            ids = np.arange(min(p * size, n_vocab), min((p + 1) * size, n_vocab))
            kept = finite(found["ids"][p], found["values"][p])
            assert kept == best(logits[ids], ids, n_best)
        # Float32 sums of up to 5000 terms: 1e-5 of what the logarithm is of.
        expected = np.logaddexp.reduce(logits.astype(np.float64))
        assert abs(log_sum(found["sums"]) - expected) < 1e-5


@pytest.mark.on_threads
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@in_child
def test_the_best_of_all_parts(shape, few):
    n_vocab, n_best, n_part = shape
    logits, parts = logits_of(n_vocab, few), unwritten(n_best, n_part)
    parts["ids"][:], parts["values"][:] = -1, -np.inf
    parts["sums"][:] = -3e38, 0
    for p, ids in enumerate(np.array_split(np.arange(n_vocab), n_part)):
        kept = sorted(best(logits[ids], ids, n_best))
        for i, (id_, value) in enumerate(kept):
            parts["ids"][p, i], parts["values"][p, i] = id_, value
        if kept:
            top = logits[ids].max()
            parts["sums"][p] = top, np.exp(logits[ids].astype(np.float64) - top).sum()
    out = {
        "best_ids": np.full(n_best, -7, np.int32),
        "best_values": np.full(n_best, np.nan, np.float32),
        "total": np.full(2, np.nan, np.float32),
    }
    for found in runs(ops.LOGIT_BEST, out=out, n_best=n_best, n_part=n_part, **parts):
        kept = finite(found["best_ids"], found["best_values"])
        assert kept == best(logits, np.arange(n_vocab), n_best)
        assert abs(log_sum(found["total"]) - np.logaddexp.reduce(logits.astype(np.float64))) < 1e-5
