"""The bounds of CPE's appendices E to H, and the tool that fits their constants to a model."""

import math

import numpy as np
import pytest
from tiny_models import like_qwen2, write_tiny_model

from tamis.engine.engine import Engine
from tamis.select.cpe import CPE
from tamis.tools.fit_cpe import (
    beta_etf,
    decay_of,
    delta_psaw,
    envelope,
    layer_of,
    least_depth,
    least_window,
    read,
    tails,
)


def test_psaw_drops_what_the_bound_says_of_geometric_attention():
    """Eq. 44 with equality: behind the sinks' 0.4, a series that falls by 0.99 a token."""
    n, sink, rho = 5000, 4, 0.99
    by_distance = 0.6 * (1 - rho) * rho ** np.arange(n - sink)
    weights = np.concatenate([np.full(sink, 0.1), by_distance[::-1]])[None, None]
    tail = tails(weights, sink)[0, 0]
    assert decay_of(tail) == pytest.approx(-math.log(rho), rel=1e-6)
    for distance in (1, 10, 300):
        assert tail[distance] == pytest.approx(delta_psaw(0.4, -math.log(rho), distance), rel=1e-6)


def test_a_fitted_decay_bounds_every_tail():
    rng = np.random.default_rng(3)
    weights = rng.dirichlet(np.full(200, 0.1), size=(5, 3))
    for query in range(5):  # as if the queries were the last five
        weights[query, :, 196 + query :] = 0
    tail = tails(weights, 7).mean(axis=(0, 1))
    decay = decay_of(tail)
    assert decay > 0
    distances = np.arange(len(tail))
    bound = tail[0] * np.exp(-decay * distances)
    assert (tail <= bound * (1 + 1e-12)).all()
    assert (tail[1:] / bound[1:]).max() == pytest.approx(1)


def test_frozen_keys_move_at_most_what_the_bound_says():
    """Eq. 47 with theorem 8, for random queries and changes of a part of the keys."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        q, k = rng.standard_normal(16), rng.standard_normal((50, 16))
        change = 0.1 * rng.standard_normal((50, 16)) * (rng.random((50, 1)) < 0.5)
        before, after = (np.exp(0.25 * keys @ q) for keys in (k, k + change))
        moved = np.abs(before / before.sum() - after / after.sum()).sum() / 2
        most = np.linalg.norm(change, axis=1).max()
        assert moved <= beta_etf(float(np.linalg.norm(q)), float(most), 0.25)


def test_the_rule_of_appendix_h_turns_the_bounds_round():
    window = least_window(0.05, 0.4, 1e-3)
    assert delta_psaw(0.4, 1e-3, window) == pytest.approx(0.05)
    assert least_window(0.6, 0.4, 1e-3) == 0
    assert least_window(0.05, 0.4, 0) == math.inf
    layers = least_depth(0.05, 10, 2, 0.3, 0.125)
    assert beta_etf(10, 2 * math.exp(-0.3 * layers), 0.125) == pytest.approx(0.05)
    assert least_depth(0.05, 10, 0.01, 0.3, 0.125) == 0
    assert least_depth(0.05, 10, 2, -0.1, 0.125) == math.inf


def test_an_envelope_is_above_all_changes():
    changes = [3.0, 1.0, 1.2, 0.4]
    change, fall = envelope(changes)
    bounds = [change * math.exp(-fall * i) for i in range(4)]
    assert all(b >= c - 1e-12 for b, c in zip(bounds, changes, strict=True))
    assert min(b / c for b, c in zip(bounds, changes, strict=True)) == pytest.approx(1)
    assert envelope([0.0, *changes]) == pytest.approx((change * math.exp(fall), fall))
    assert envelope([2.0]) == (2.0, 0.0)
    assert envelope([]) == (0.0, 0.0)


def test_a_model_is_measured_as_dense_attention_has_it(tmp_path):
    """Weights of the last queries against those of NumPy from the cache's keys; ETF moves some."""
    write_tiny_model(tmp_path / "m.gguf", like_qwen2("qwen2"))
    engine = Engine.load(tmp_path / "m.gguf", n_threads=2)
    ids = np.random.default_rng(1).integers(0, engine.hp.n_vocab, 100).tolist()
    method = CPE(sink=4, local=8, psi=0.3, phi=0.5, kv="reuse")
    found = read(engine, ids, method, 9)
    last = engine.hp.n_layer - 1
    weights = found.weights(last, found.keys[last])
    assert weights.shape == (9, engine.hp.n_head, 100)
    np.testing.assert_allclose(weights.sum(axis=-1), 1)
    group = engine.hp.n_head // engine.hp.n_head_kv
    for t, h in ((0, 0), (8, 1), (4, engine.hp.n_head - 1)):
        scores = found.scale * found.keys[last][: 92 + t, h // group] @ found.queries[last][t, h]
        np.testing.assert_allclose(
            weights[t, h, : 92 + t], np.exp(scores) / np.exp(scores).sum(), rtol=1e-6
        )
    layer = layer_of(found, method, last)
    assert found.frozen[last] == range(4, 70)
    assert layer.distance == 100 - 49  # of 99 tokens before the newest half are hidden
    assert layer.key_change > 0
    assert (
        0
        < layer.moved
        <= beta_etf(
            max(np.linalg.norm(q) for q in found.queries[last].reshape(-1, engine.hp.head_dim)),
            layer.key_change,
            found.scale,
        )
    )
    dropped = weights[8, :, 4:49].sum(axis=-1).mean()
    assert tails(weights, 4)[8, :, layer.distance].mean() == pytest.approx(dropped)
    engine.close()
