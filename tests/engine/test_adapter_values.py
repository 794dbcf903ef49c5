"""Adapters' names, keys and sums by hand, without files of models."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from tamis.engine import adapters
from tamis.engine.adapters import (
    MOST_SCALE,
    AdapterError,
    Adapters,
    ControlVector,
    Lora,
    Pair,
    _control,
    _digest,
    _joined,
    scales,
)


def pair_of(rank, seed=0, n_in=6, n_out=5):
    rng = np.random.default_rng(seed)
    return Pair(rng.random((rank, n_in), np.float32), rng.random((n_out, rank), np.float32))


def lora_of(path="a.gguf", alpha=0.0, **pairs):
    return Lora(path, "llama", alpha, pairs, {})


def test_session_files_know_adapters_by_their_values():
    """Files of other versions of the program are read again: the name of a set never changes."""
    assert _digest(Adapters()) == "e3b0c44298fc1c14"
    one, other = pair_of(2), pair_of(3, 1)
    row = np.arange(4, dtype=np.float32)
    whole = Adapters(
        ((lora_of("x", b=other, a=one), 0.5),), ((ControlVector("y", {3: row, 1: row + 1}), 2.0),),
        (1, 5),
    )  # fmt: skip
    expected = hashlib.sha256(np.float64(0.5).tobytes())
    for name, pair in (("a", one), ("b", other)):
        expected.update(name.encode() + pair.a.tobytes() + pair.b.tobytes())
    expected.update(b"(2.0, (1, 5))")
    for layer, values in ((1, row + 1), (3, row)):
        expected.update(str(layer).encode() + values.tobytes())
    assert _digest(whole) == expected.hexdigest()[:16]
    again = Adapters(((lora_of("elsewhere", a=one, b=other), 0.5),), whole.control, (1, 5))
    assert _digest(again) == _digest(whole)


def test_sets_that_change_nothing_have_no_key():
    lora, vector = lora_of(a=pair_of(2)), ControlVector("v", {1: np.zeros(4, np.float32)})
    assert Adapters().key == ""
    assert Adapters(((lora, 0.0),), ((vector, 0.0),)).key == ""
    once, twice, added = ((lora, 1.0),), ((lora, 2.0),), ((vector, 1.0),)
    sets = (once,), (twice,), ((), added), ((), added, (1, 2)), (once, added)
    keys = {Adapters(*given).key for given in sets}
    assert len(keys) == 5
    assert "" not in keys
    both = Adapters(((lora, 1.0), (lora, 2.0)), ((vector, 3.0),), (1, 2)).scaled([4, 5])
    assert [scale for _, scale in both.loras] == [4.0, 5.0]
    assert (both.control, both.layers) == (((vector, 3.0),), (1, 2))


@pytest.mark.parametrize(("alpha", "rank", "found"), [(0.0, 8, 3.0), (16.0, 8, 6.0), (4.0, 8, 1.5)])
def test_a_scale_is_alpha_to_the_rank(alpha, rank, found):
    assert lora_of(alpha=alpha).scale(rank, 3.0) == found


def model_of(n_embd=4, n_layer=6):
    return SimpleNamespace(hp=SimpleNamespace(n_embd=n_embd, n_layer=n_layer))


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (None, [1, 3, 5]),
        ((1, 5), [1, 3, 5]),
        ((3, 3), [3]),
        ((2, 4), [3]),
        ((5, 9), [5]),
        ((6, 9), []),
    ],
)
def test_control_vectors_change_the_layers_that_are_named(layers, found):
    """Not those that the model lacks, nor what comes before its first layer."""
    rows = {layer: np.full(4, layer, np.float32) for layer in (1, 3, 5, 6, 9)}
    vectors = ((ControlVector("a", rows), 2.0), (ControlVector("b", {3: rows[1]}), -1.0))
    changed = _control(model_of(), Adapters((), vectors, layers))
    assert sorted(changed) == found
    for layer, row in changed.items():
        np.testing.assert_array_equal(row, np.full((1, 4), 2 * layer - (layer == 3)))
        assert row.dtype == np.float32


def test_a_control_vector_without_a_scale_is_checked_all_the_same():
    vector = ControlVector("v", {1: np.zeros(3, np.float32)})
    with pytest.raises(AdapterError, match="v: directions have 3 elements, the model 4"):
        _control(model_of(), Adapters((), ((vector, 0.0),)))
    fits = ControlVector("v", {1: np.ones(4, np.float32)})
    assert _control(model_of(), Adapters((), ((fits, 0.0),))) == {}
    with pytest.raises(AdapterError, match=r"v: direction\.1 times 1e\+39 has values that are no"):
        _control(model_of(), Adapters((), ((fits, 1e39),)))


@pytest.mark.parametrize("ranks", [(1,), (32,), (33,), (3, 30)])
def test_joined_pairs_are_the_sum_of_all(ranks):
    pairs = [pair_of(rank, i) for i, rank in enumerate(ranks)]
    delta = _joined(iter(pairs))
    n_rank = -(-sum(ranks) // 32) * 32
    assert (delta.a.n_out, delta.a.n_in, delta.b.n_out, delta.b.n_in) == (n_rank, 6, 5, n_rank)
    a = delta.a.data.view(np.float32).reshape(n_rank, 6)
    b = delta.b.data.view(np.float32).reshape(5, n_rank)
    np.testing.assert_allclose(b @ a, sum(pair.b @ pair.a for pair in pairs), rtol=1e-5)
    assert not a[sum(ranks) :].any()
    assert not b[:, sum(ranks) :].any()


def test_scales_of_requests_have_a_bound():
    assert scales([{"id": 0, "scale": MOST_SCALE}], 1) == [1e6]
    assert scales([{"id": 0, "scale": -1e6}], 1) == [-1e6]
    with pytest.raises(ValueError, match=r"lora has scale 1000001, expected a number"):
        scales([{"id": 0, "scale": 1_000_001}], 1)
    with pytest.raises(ValueError, match="lora has id 1, there are 1 adapters, from 0 on"):
        scales([{"id": 1, "scale": 1}], 1)


def test_a_pair_that_is_scaled_beyond_float32_is_refused():
    deltas = adapters._Deltas(SimpleNamespace(weights=None))
    with pytest.raises(AdapterError, match=r"a\.gguf: w times 1e\+39 has values that are no"):
        deltas.add(lora_of(), "w", pair_of(2), 1e39)
