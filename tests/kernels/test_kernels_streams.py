"""The ops of residual streams against NumPy float64, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from oracle import softmax

from tamis.jit_kernels.contract import ops

KERNELS = [(ops.STREAM_WEIGHTS, ()), (ops.STREAM_MIX, ()), (ops.RESIDUAL_MIX, ())]
KERNELS += [(ops.STREAM_GATE, ())]
EPS = 1e-3  # large enough to be seen


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def unwritten(*shape):
    return np.full(shape, np.nan, np.float32)


def sinkhorn(c, n_turn):
    """Rows are of sources."""
    comb = softmax(c) + EPS
    comb /= comb.sum(axis=-2, keepdims=True) + EPS
    for _ in range(1, n_turn):
        comb /= comb.sum(axis=-1, keepdims=True) + EPS
        comb /= comb.sum(axis=-2, keepdims=True) + EPS
    return comb


@pytest.mark.on_threads
@pytest.mark.parametrize(
    ("n_tok", "n", "n_turn", "parts"), [(1, 2, 1, 1), (3, 4, 2, 2), (5, 4, 3, 3)]
)
@in_child
def test_weights_of_streams_are_made_from_mixes(n_tok, n, n_turn, parts):
    rng = np.random.default_rng((n_tok, n, n_turn))
    n_mix = (n, 2 * n, n * (2 + n))[parts - 1]
    mixes, scale, base = normal(rng, n_tok, n_mix), normal(rng, parts), normal(rng, n_mix)
    each = np.repeat(np.arange(parts), (n, n, n * n)[:parts])
    c = scale.astype(np.float64)[each] * mixes + base
    pre, post = 1 / (1 + np.exp(-c[:, :n])) + EPS, 1.5 / (1 + np.exp(-c[:, n : 2 * n])) + 0.25
    out = {"pre": unwritten(n_tok, n)}
    out |= {"post": unwritten(n_tok, n)} if parts > 1 else {}
    out |= {"comb": unwritten(n_tok, n, n)} if parts > 2 else {}
    for found in runs(
        ops.STREAM_WEIGHTS, out=out, absent={"post", "comb"} - set(out), step=step_of(n_tok),
        mixes=mixes, scale=scale, base=base, n_mix=n_mix, n=n, n_turn=n_turn, eps=EPS,
        magnitude=1.5, post_eps=0.25,
    ):  # fmt: skip
        np.testing.assert_allclose(found["pre"], pre, rtol=2e-6)
        if parts > 1:
            np.testing.assert_allclose(found["post"], post, rtol=2e-6)
        if parts > 2:
            comb = sinkhorn(c[:, 2 * n :].reshape(n_tok, n, n), n_turn)
            np.testing.assert_allclose(found["comb"], comb, rtol=1e-5)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n_stream", "n"), [(1, 2, 1), (3, 4, 33)])
@pytest.mark.parametrize("combined", [False, True])
@in_child
def test_streams_are_mixed_and_a_part_is_added_to_each(n_tok, n_stream, n, combined):
    rng = np.random.default_rng((n_tok, n_stream, n))
    x, b, post = (
        normal(rng, n_tok, n_stream, n),
        normal(rng, n_tok, n),
        normal(rng, n_tok, n_stream),
    )
    comb = normal(rng, n_tok, n_stream, n_stream)
    mixed = np.einsum("tsh,tsi->thi", comb.astype(np.float64), x) if combined else x
    expected = mixed + post[:, :, None].astype(np.float64) * b[:, None]
    for found in runs(
        ops.STREAM_MIX, out={"y": unwritten(*x.shape)}, absent=() if combined else ("comb",),
        step=step_of(n_tok), x=x, b=b, post=post, **({"comb": comb} if combined else {}), n=n,
        n_stream=n_stream,
    ):  # fmt: skip
        np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n_row", "n"), [(1, 1, 5), (3, 2, 32), (2, 4, 37)])
@in_child
def test_residuals_are_weighed_by_the_softmax_of_their_scores(n_tok, n_row, n):
    rng = np.random.default_rng((n_tok, n_row, n))
    x, w = normal(rng, n_tok, n_row + 1, n), normal(rng, n)
    rows = x[:, :n_row].astype(np.float64)
    normed = rows / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + EPS)
    expected = (softmax(normed @ w.astype(np.float64))[:, :, None] * rows).sum(axis=1)
    for found in runs(
        ops.RESIDUAL_MIX, out={"y": unwritten(n_tok, n)}, step=step_of(n_tok), x=x, w=w, n=n,
        n_row=n_row, stride=x[0].size, eps=EPS,
    ):  # fmt: skip
        np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n_stream", "n"), [(1, 1, 3), (2, 4, 32), (3, 2, 37)])
@in_child
def test_a_stream_is_gated_by_the_signed_root_of_its_score(n_tok, n_stream, n):
    rng = np.random.default_rng((n_tok, n))
    key, query = normal(rng, n_tok, n_stream, n), normal(rng, n_tok, n_stream, n)
    query[0, 0] = 0  # a score of 0 has no sign
    scores = 0.5 * (key.astype(np.float64) * query).sum(axis=-1)
    roots = np.sign(scores) * np.sqrt(np.maximum(np.abs(scores), 0.25))
    for found in runs(
        ops.STREAM_GATE, out={"y": unwritten(n_tok, n_stream)}, step=step_of(n_tok), key=key,
        query=query, n=n, n_stream=n_stream, scale=0.5, least=0.25,
    ):  # fmt: skip
        np.testing.assert_allclose(found["y"], 1 / (1 + np.exp(-roots)), rtol=5e-6)
