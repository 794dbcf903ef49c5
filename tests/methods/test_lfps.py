"""The method `lfps` beside its paper: patterns it must follow, and recorded attention."""

import numpy as np
import pytest
from golden_data import FOLDER
from lfps_repeats import check_repeats
from replay import Replay
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.select.lfps import LFPS


def test_numbers_out_of_range_are_refused():
    for wrong in (
        {"a": -1},
        {"r": 1},
        {"budget": 0},
        {"s": 0},
        {"local": 0},
        {"bypass": "sink"},
        {"rows": "union"},
        {"renew": 0},
    ):
        with pytest.raises(ValueError, match="expected"):
            LFPS(**wrong)


def patterned(n_kv, n_q):
    """Queries that look at position 100 and at the position 200 before their own; q, k."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.standard_normal((64, 64)))[0]
    # Every position has a code of its own; codes are only nearly orthogonal.
    codes = rng.standard_normal((n_kv, 48)) / np.sqrt(48)
    k = np.zeros((n_kv, 64))
    k[:, :48] = codes
    k[100, 50] = 1
    q = np.zeros((n_q, 64))
    q[:, :48] = codes[n_kv - n_q - 200 : n_kv - 200]
    q[:, 50] = 1
    return 80 * (q @ axes)[None, None], (k @ axes)[None, None]


def test_fixed_positions_and_fixed_distances_are_found_without_reading_the_keys():
    q, k = patterned(1024, 132)
    replay = Replay(LFPS(bypass="none"), q, k, k)
    for _ in range(100):
        pos = replay.decode()
        row = replay.rows(0)[0]
        assert 100 in row, "a vertical line"
        assert pos - 200 in row, "a slash"
    assert replay.state.scanned_share < 0.05


def test_a_head_that_looks_at_its_sinks_is_bypassed_and_keeps_its_output():
    """Sinks with a hundred times the weight of all others: the mean value stands for the rest."""
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((1, 1, 1024, 16)) for _ in range(2))
    q = 0.5 * rng.standard_normal((1, 1, 64, 16))
    q[..., 0], k[..., 0], k[0, 0, :4, 0] = 4, 0, 10
    replay = Replay(LFPS(), q, k, v)
    dense = v[0, 0].astype(np.float16).astype(float)
    for _ in range(32):
        pos = replay.decode()
        assert replay.rows(0)[0].tolist() == [*range(4), *range(pos - 63, pos + 1)]
        weights = replay.weights(0, 0)
        assert weights[:4].sum() > 0.85
        # What is left out weighs less than 0.15, and its mean is right to a few per cent of it.
        np.testing.assert_allclose(replay.out[0, 0, 0], weights @ dense[: pos + 1], atol=0.02)
    assert replay.state.bypass_ratio == 1


def test_recorded_attention_is_predicted_from_the_past():
    """Three heads, 160 steps. Over four layers of the 16,384 tokens the method keeps 0.70 of the
    mass (0.85 for exact sets of the same size), reading 2.8 % of the keys."""
    data = np.load(FOLDER / "attention_slice.npz")
    kept, best = [], []
    replay = Replay(LFPS(rows="head"), data["q"], data["k"], data["k"])
    for _ in range(160):
        pos = replay.decode()
        for head, row in enumerate(replay.rows(0)):
            weights = replay.weights(0, head)
            kept.append(weights[row].sum())
            middle = np.sort(weights[4 : pos - 63])[::-1][: len(row) - 68]
            best.append(middle.sum() + weights[:4].sum() + weights[pos - 63 :].sum())
    assert replay.state.scanned_share < 0.12
    assert np.mean(kept) > np.mean(best) - 0.2
    assert np.mean(kept) > 0.6


def test_heads_that_share_keys_share_tables():
    """One set for three heads: it keeps less of each one's mass, and reads each key once."""
    data = np.load(FOLDER / "attention_slice.npz")
    replay, kept = Replay(LFPS(rows="group"), data["q"], data["k"], data["k"]), []
    for _ in range(160):
        replay.decode()
        (row,) = replay.rows(0)
        kept += [replay.weights(0, head)[row].sum() for head in range(replay.n_head)]
    assert replay.state.scanned_share < 0.12
    assert np.mean(kept) > 0.5


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("lfps") / "m.gguf"
    write_tiny_model(path, TinySpec("qwen2"))
    engine = Engine.load(path, n_threads=1)
    yield engine
    engine.close()


@pytest.mark.parametrize("method", ["lfps:local=8,budget=0.1", "cpe:k=24,sink=4,local=8"])
def test_a_loaded_session_starts_anew_and_repeats_itself(engine, tmp_path, method):
    """What the selector knew is not in the file: the first step after makes it again."""
    ids = np.random.default_rng(0).integers(0, engine.hp.n_vocab, 120).tolist()
    check_repeats(engine, method, ids, tmp_path / "s")
