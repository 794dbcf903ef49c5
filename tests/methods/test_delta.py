"""The method `delta` beside its paper: Eq. 5-7, appendix C, Lemma 1, prompts in chunks."""

import numpy as np
import pytest
from golden_data import FOLDER
from replay import Replay
from tiny_models import like_qwen2, write_tiny_model

from tamis.engine.engine import Engine
from tamis.select.delta import Delta, corrected
from tamis.select.dense import Dense
from tamis.select.notation import MethodError, parse_method, parse_methods
from tamis.select.window import Window

N = 192  # queries, the last positions of 3,584
WINDOW = Window(sink=4, recent=256)


@pytest.fixture(scope="module")
def real():
    """Recorded queries and keys of one layer; the keys stand for values too."""
    with np.load(FOLDER / "attention_slice.npz") as data:
        return data["q"], data["k"], data["k"]


def outputs(real, method):
    """f32 [N, n_head, head_dim] of the queries as one prompt chunk, and the method's state."""
    replay = Replay(method, *real, n_prefill=N)
    return replay.prefilled[0], replay.state


@pytest.mark.parametrize(("gamma", "mode"), [(64, "delta"), (10, "delta"), (64, "recompute")])
def test_rows_are_eq_7_or_5_and_the_last_are_dense(real, gamma, mode):
    found, _ = outputs(real, Delta(WINDOW, gamma, mode))
    sparse, dense = outputs(real, WINDOW)[0], outputs(real, Dense())[0]
    expected = corrected(Delta(WINDOW, gamma, mode), sparse, dense)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["delta", "recompute"])
def test_with_a_gamma_of_1_all_rows_are_dense(real, mode):
    found, _ = outputs(real, Delta(WINDOW, 1, mode))
    np.testing.assert_allclose(found, outputs(real, Dense())[0], rtol=0, atol=1e-5)


def cosine(a, b):
    product = (a * b).sum(axis=-1)
    return product / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def test_where_neighbouring_queries_are_alike_the_corrected_rows_are_nearer_to_the_dense_ones():
    """The assumption of section 3: what is dropped changes slowly from row to row.

    Three heads' queries drift; the window holds a small part of what they look at.
    """
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 1, 512, 64))
    q = rng.standard_normal((1, 3, 1, 64)) + np.cumsum(
        0.05 * rng.standard_normal((1, 3, N, 64)), axis=2
    )
    q *= 16 / np.linalg.norm(q, axis=-1, keepdims=True)
    window, dense = Window(sink=4, recent=64), outputs((q, k, v), Dense())[0]
    rows = [i for i in range(N - 64) if i % 64]  # the others are exact
    alone, corrected, nearer, replaced = (
        cosine(outputs((q, k, v), method)[0], dense)[rows].mean()
        for method in (window, Delta(window), Delta(window, 16), Delta(window, 64, "recompute"))
    )
    # When written: 0.50, 0.64, 0.95.
    assert nearer > corrected + 0.1 > alone + 0.2
    assert replaced == pytest.approx(alone)


def test_lemma_1_bounds_what_the_difference_is_not(real):
    """|Delta - sum of dropped a_i v_i| <= H / (H + T) * max |v_i| of the kept, each component."""
    q, k, v = real
    _, state = outputs(real, Delta(WINDOW))
    last = N - 128  # the last row with a difference: those after 128 are dense
    pos = k.shape[2] - N + last
    assert (state._delta_pos == pos).all()
    keys, values = k[0, 0, : pos + 1].astype(float), v[0, 0, : pos + 1].astype(float)
    # What the window keeps for this row's block of queries: whole blocks of 16 positions.
    kept = (np.arange(pos + 1) < 16) | (np.arange(pos + 1) >= (pos - 255) // 16 * 16)
    for head in range(q.shape[1]):
        logits = keys @ q[0, head, last].astype(float) / 8
        weights = np.exp(logits - logits.max())
        dropped, held = weights[~kept].sum(), weights[kept].sum()
        missing = weights[~kept] @ values[~kept] / weights.sum()
        bound = dropped / (dropped + held) * np.abs(values[kept]).max(axis=0)
        assert (np.abs(state._delta[0, head] - missing) <= bound + 1e-5).all()
        # It says something: the bound is small beside the values.
        assert bound.max() < np.abs(values).max()


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def engine(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "m.gguf"
    write_tiny_model(path, like_qwen2(request.param))
    engine = Engine.load(path, n_threads=2)
    yield engine
    engine.close()


@pytest.mark.parametrize("gamma", [1, 16, 21, 64, 500])
def test_how_a_prompt_is_cut_into_chunks_changes_nothing(engine, gamma):
    """Chunks of a multiple of 16 rows, so that the blocks of queries are the same, and not few."""
    ids = np.random.default_rng(gamma).integers(0, engine.hp.n_vocab, 192)
    prefill = f"delta(window:sink=4,recent=20,block=1):gamma={gamma}"
    found = [
        np.concatenate(
            list(engine.session(n_ctx=256, n_ubatch=n, prefill=prefill).logits(ids.tolist()))
        )
        for n in (256, 32, 48)
    ]
    for other in found[1:]:
        # The same sums; the matrix products of other numbers of rows may round otherwise.
        np.testing.assert_allclose(other, found[0], rtol=0, atol=1e-4 * np.abs(found[0]).max())


def test_it_needs_a_method_that_prefills():
    for wrong in ("delta", "delta:gamma=4", "delta(quest)", "delta(window):gamma=0"):
        with pytest.raises(MethodError):
            parse_method(wrong, "prefill")
    with pytest.raises(MethodError, match="goes with prefill"):
        parse_methods("delta(window)", "dense")
    nested = parse_method("delta(delta(window:recent=9):gamma=8):mode=recompute", "prefill")
    assert nested == Delta(Delta(Window(recent=9), 8), mode="recompute")
