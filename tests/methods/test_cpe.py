"""The method `cpe` beside its paper: schedules, budgets, sharing step by step, certificates."""

import math

import numpy as np
import pytest
from freezing import ETF
from golden_data import FOLDER
from oracle import Oracle
from replay import Replay
from tiny_models import like_qwen2, write_tiny_model

from tamis.engine.engine import Engine
from tamis.select.base import SelectorShape
from tamis.select.cpe import CPE, beta_th, chosen, dilated, g


def test_deep_layers_see_ever_less():
    """Eq. 15 for a model of 32 layers, at t = 1000: pruning starts above layer 24."""
    method = CPE(phi=0.7, alpha=1)
    starts = [math.floor(method.dropped(layer - 1, 32) * 1000) for layer in (1, 24, 25, 28, 32)]
    # 1 - 0.7^(1/8) = 0.0436, 1 - 0.7^(4/8) = 0.1633, 1 - 0.7 = 0.3.
    assert starts == [0, 0, 43, 163, 300]


def test_deep_layers_update_ever_less_of_a_prompt():
    """Eq. 16 for a model of 32 layers and a prompt of 1,000 tokens, 16 sinks among them."""
    method = CPE(psi=0.5, gamma=1)
    ends = [math.floor(method.frozen(layer - 1, 32) * 1000) for layer in (24, 25, 28, 32)]
    # 1 - 0.5^(1/8) = 0.0830, 1 - 0.5^(4/8) = 0.2929, 1 - 0.5 = 0.5.
    assert ends == [0, 82, 292, 500]
    state = method.open(SelectorShape(32, 2, 1, 16, n_ctx=1024, n_ubatch=64, window=(0,) * 32))
    assert state.frozen(31, 1000) == range(16, 500)
    assert len(state.frozen(31, 20)) == len(state.frozen(23, 1000)) == 0


def test_numbers_out_of_range_are_refused():
    sizes = ({"s": -1}, {"k": 0}, {"phi": 0}, {"phi": 1.1}, {"psi": 0}, {"tau": 2})
    for wrong in (*sizes, {"rows": "token"}, {"kv": "no"}):
        with pytest.raises(ValueError, match="expected"):
            CPE(**wrong)


def turned(degrees):
    """A query of 16 dimensions at an angle to the first axis."""
    q = np.zeros(16)
    q[:2] = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return 8 * q


def test_steps_retrieve_share_and_retrieve_again():
    """One head, blocks of 4, tau = 0.8 (36.9 degrees): who retrieves, and what the others read."""
    angles = [0, 30, 90, 60, 30, 0]
    # Step 1 is near step 0. Step 2 is near none. Step 3 is near step 2 (30 degrees), not near 0.
    # Step 4 begins a block, so it retrieves; step 5 is near it.
    retrieves = [1, 0, 1, 0, 1, 0]
    n_kv, first = 64, 64 - len(angles)
    k = np.zeros((1, 1, n_kv, 16))
    k[0, 0, [10, 20, 30], 0] = 3, 2, 1  # what a query at 0 degrees looks for, best first
    k[0, 0, [40, 44, 48], 1] = 3, 2, 1  # and one at 90 degrees
    k[0, 0, 31, :2] = 1.1, 0.5  # fourth at 0 degrees, and third at 30
    q = np.array([turned(a) for a in angles])[None, None]
    method = CPE(s=4, k=3, sink=2, local=3, phi=1)  # floor(3 / 3) = 1 position is dilated
    replay = Replay(method, q, k, k, n_prefill=0)
    sets, ratios = [], []
    for i in range(len(angles)):
        assert replay.decode() == first + i
        row = replay.rows(0)[0].tolist()
        assert row[:2] == [0, 1]
        assert row[-3:] == [first + i - 2, first + i - 1, first + i]
        sets.append(row[2:-3])
        ratios.append(replay.state.retrieval_ratio * (i + 1))
    assert np.diff([0, *ratios]) == pytest.approx(retrieves)
    assert sets[0] == [10, 20, 31]
    assert sets[1] == [9, 10, 11, 20, 31]
    assert sets[2] == [40, 44, 48]
    assert sets[3] == [39, 40, 41, 44, 48]
    assert sets[5] == sorted({*sets[4], 9, 10, 11})
    assert replay.state.retrievals.tolist() == [[3]]


def test_the_reference_in_numpy_keeps_the_same_of_these_steps():
    """Steps as above; then two steps that keep everything, and one that does not."""
    k = np.zeros((64, 16))
    k[[10, 20, 30], 0] = 3, 2, 1
    k[[40, 44, 48], 1] = 3, 2, 1
    k[31, :2] = 1.1, 0.5
    q = np.array([turned(a) for a in (0, 30, 90, 60, 30, 0)])[:, None, None]
    steps = chosen(CPE(s=4, k=3, sink=2, local=3, phi=1), q, k)
    middles = [
        [10, 20, 31], [9, 10, 11, 20, 31], [40, 44, 48], [39, 40, 41, 44, 48], None, None
    ]  # fmt: skip
    for i, ((row,), expected) in enumerate(zip(steps, middles, strict=True)):
        assert row[:2].tolist() == [0, 1]
        assert row[-3:].tolist() == [56 + i, 57 + i, 58 + i]
        assert expected is None or row[2:-3].tolist() == expected
    few = chosen(CPE(s=4, k=3, sink=2, local=3, phi=1), q[:3], k[:9])
    assert [row.tolist() for (row,) in few[:2]] == [list(range(7)), list(range(8))]
    assert len(few[2][0]) == 2 + 3 + 3


def test_a_set_is_joined_by_neighbours_that_come_after_it():
    """Eq. 13 joins the best one, 60, by 57 to 63; when it is retrieved, 61 is the last position."""
    k = np.zeros((1, 1, 64, 16))
    k[0, 0, [60, 20, 30], 0] = 3, 2, 1
    method, q = CPE(s=4, k=3, r=3, sink=0, local=1, phi=1), np.array([[[turned(0)] * 3]])
    replay = Replay(method, q, k, k, n_prefill=0)
    sets = []
    for _ in range(3):
        replay.decode()
        sets.append(replay.rows(0)[0].tolist())
    assert sets[0] == [20, 30, 60, 61]
    assert sets[1] == [20, 30, 57, 58, 59, 60, 61, 62]
    assert sets[2] == [20, 30, 57, 58, 59, 60, 61, 62, 63]


def test_a_third_of_a_set_is_dilated():
    """Eq. 13: floor(k / 3) of the best, 2 of 8. The second query is the first one again."""
    k, best = np.zeros((1, 1, 64, 16)), list(range(10, 42, 4))
    k[0, 0, best, 0] = np.arange(8, 0, -1)  # best first
    method = CPE(s=4, k=8, sink=2, local=3, phi=1)
    replay = Replay(method, np.array([turned(0)] * 2)[None, None], k, k, n_prefill=0)
    sets = []
    for _ in range(2):
        replay.decode()
        sets.append(replay.rows(0)[0].tolist()[2:-3])
    assert sets == [best, sorted({*best, 9, 11, 13, 15})]


def test_the_reference_dilates_a_third_of_a_set():
    """As above; of 8, also for the best in another order than their positions."""
    best = np.arange(40, 8, -4)
    found = dilated(CPE(s=4, k=8, sink=2, local=3, phi=1), best)
    assert found.tolist() == sorted({*best.tolist(), 39, 41, 35, 37})


def test_a_block_ends_where_its_tokens_are_dropped():
    """The step after truncate() retrieves, though it follows the last one's position."""
    k = np.zeros((1, 1, 64, 16))
    k[0, 0, [10, 20, 30], 0] = 3, 2, 1
    method, q = CPE(s=9, k=3, sink=2, local=3, phi=1), np.array([turned(0)] * 4)[None, None]
    replay = Replay(method, q, k, k, n_prefill=0)
    retrievals = []
    for i in range(4):
        if i == 2:
            replay.state.truncate(40)
        replay.decode()
        retrievals.append(int(replay.state.retrievals.sum()))
    assert retrievals == [1, 1, 2, 2]


def test_a_rows_decision_is_its_groups():
    """Two heads of one KV head: one turns away. Alone the other shares, together they retrieve."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((1, 1, 128, 16))
    q = np.array([[turned(0), turned(5)], [turned(0), turned(90)]])[None]
    for rows, expected in (("head", [[1, 2]]), ("group", [[2]])):
        replay = Replay(CPE(s=4, k=5, rows=rows), q, k, k, n_prefill=0)
        replay.decode()
        replay.decode()
        assert replay.state.retrievals.tolist() == expected


def test_heads_that_share_keys_attend_to_the_union_of_their_sets():
    """Each head decides alone: the same retrievals as with rows=head, and one row for both."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((1, 1, 128, 16))
    q = np.array([[turned(0), turned(5), turned(8)], [turned(0), turned(90), turned(95)]])[None]
    alone, together = (
        Replay(CPE(s=4, k=5, sink=2, local=3, rows=rows), q, k, k, n_prefill=0)
        for rows in ("head", "union")
    )
    for _ in range(3):
        alone.decode()
        together.decode()
        first, second = (set(row.tolist()) for row in alone.rows(0))
        assert together.rows(0)[0].tolist() == sorted(first | second)
    np.testing.assert_array_equal(together.state.retrievals, alone.state.retrievals)


# --- early token freezing, in the engine ---------------------------------------------------------

N_PROMPT = 150


class FreezingOracle(Oracle):
    """The float64 forward in which deep layers leave early positions as they are."""

    def block(self, x, layer):
        y = super().block(x, layer)
        end = math.floor(CPE(psi=0.3).frozen(layer, self.p.n_layer) * len(x))
        y[4:end] = x[4:end]
        return y


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def engine(request, tmp_path_factory):
    """Eight layers, of which the last two freeze, or seven with sliding windows among them."""
    path = tmp_path_factory.mktemp(request.param) / "m.gguf"
    write_tiny_model(path, like_qwen2(request.param, layers=0 if request.param == "gemma3" else 8))
    engine = Engine.load(path, n_threads=2)
    yield engine
    engine.close()


def prompt(engine):
    return np.random.default_rng(0).integers(0, engine.hp.n_vocab, N_PROMPT).tolist()


def logits_of(session, ids):
    return np.concatenate(list(session.logits(ids)))


def test_frozen_tokens_keep_their_state_and_give_the_layers_own_k_and_v(engine):
    found = logits_of(engine.session(n_ctx=256, n_ubatch=32, prefill=ETF), prompt(engine))
    oracle = FreezingOracle.from_gguf(engine.path, kv_f16=True)
    expected = oracle.logits(prompt(engine))
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    dense = logits_of(engine.session(n_ctx=256, n_ubatch=32), prompt(engine))
    assert np.abs(found - dense).max() > 1e-2 * np.abs(expected).max()


def test_reused_k_and_v_are_those_of_the_layer_before(engine):
    session = engine.session(n_ctx=256, n_ubatch=32, prefill=f"{ETF},kv=reuse")
    session.prefill(prompt(engine))
    kept = [session._kv.read(layer, N_PROMPT) for layer in range(engine.hp.n_layer)]
    for layer in range(1, engine.hp.n_layer):
        frozen = session._stages[0].state.frozen(layer, N_PROMPT)
        for own, before in zip(kept[layer], kept[layer - 1], strict=True):
            rows = slice(frozen.start, frozen.stop)
            np.testing.assert_array_equal(own[rows], before[rows])
            assert (own[frozen.stop :] != before[frozen.stop :]).any()


@pytest.mark.parametrize("kv", ["project", "reuse"])
def test_chunks_that_are_left_out_change_nothing(engine, kv):
    """In one chunk all rows are computed and restored; in chunks of 16 most are never computed."""
    method = f"{ETF},kv={kv}"
    whole, pieces = (
        logits_of(engine.session(n_ctx=256, n_ubatch=n, prefill=method), prompt(engine))
        for n in (256, 16)
    )
    # The same sums; the matrix products of other numbers of rows may round otherwise.
    np.testing.assert_allclose(whole, pieces, rtol=0, atol=1e-4 * np.abs(whole).max())


@pytest.mark.parametrize("kv", ["project", "reuse"])
def test_frozen_chunks_cost_nothing_but_their_k_and_v(engine, kv):
    session = engine.session(n_ctx=256, n_ubatch=16, prefill=f"{ETF},kv={kv}")
    session.forward.start_costs()
    session.prefill(prompt(engine))
    calls = {}
    for cost in session.forward.take_costs():
        calls[cost.label] = calls.get(cost.label, 0) + cost.n_call
    n_layer, starts = engine.hp.n_layer, range(0, N_PROMPT, 16)
    left_out = sum(
        frozen.start <= pos and min(pos + 16, N_PROMPT) <= frozen.stop
        for frozen in (session._stages[0].state.frozen(layer, N_PROMPT) for layer in range(n_layer))
        for pos in starts
    )
    assert left_out >= 5
    (down,) = (n for label, n in calls.items() if label.endswith("ffn_down"))
    assert calls["attend"] == down == n_layer * len(starts) - left_out
    own_keys = n_layer * len(starts) - (left_out if kv == "reuse" else 0)
    assert calls["rope_append"] == own_keys


# --- what the paper proves -----------------------------------------------------------------------


def attention(q, k):
    logits = q @ k.T / math.sqrt(k.shape[1])
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_the_centroid_of_attention_drifts_at_most_in_proportion():
    """Theorem 1: at most diam P * max |k| / sqrt(d) * |q' - q| positions."""
    rng = np.random.default_rng(1)
    k, q = rng.standard_normal((300, 32)), 3 * rng.standard_normal((200, 32))
    for size in (1e-3, 1e-2, 0.1):
        moved = q + size * rng.standard_normal(q.shape)
        drift = np.abs((attention(moved, k) - attention(q, k)) @ np.arange(300))
        bound = 299 * np.linalg.norm(k, axis=1).max() / math.sqrt(32)
        assert (drift <= bound * np.linalg.norm(moved - q, axis=1)).all()


def information(kernel):
    """I(X; Y) in nats of equally likely x and the kernel's rows p(y | x)."""
    joint, of_y = kernel / len(kernel), kernel.mean(axis=0)
    here = kernel > 0
    ratio = kernel[here] / np.broadcast_to(of_y, kernel.shape)[here]
    return (joint[here] * np.log(ratio)).sum()


def test_the_bound_of_dropped_mass_has_its_closed_form():
    """Eq. 4: half of the mass has a coin's entropy, log 2; none of it and all of it have none."""
    assert g(0.5, 8) == pytest.approx(5 * math.log(2))
    assert g(0.25, 16) == pytest.approx(2 * 0.562335 + 2 * math.log(2), abs=1e-5)
    assert (g(0.0, 9), g(1.0, 9)) == (0, 2 * math.log(9))


@pytest.mark.parametrize("n_kept", [2, 10, 50, 150, 199])
def test_dropped_mass_bounds_the_information_lost(n_kept):
    """Eq. 4, with the largest dropped mass of all queries."""
    rng = np.random.default_rng(2)
    for sharpness in (0.5, 2, 8):
        full = attention(sharpness * rng.standard_normal((100, 32)), rng.standard_normal((200, 32)))
        kept = np.where(full >= np.sort(full, axis=1)[:, [-n_kept]], full, 0)
        mass = kept.sum(axis=1, keepdims=True)
        lost = information(full) - information(kept / mass)
        assert lost <= g(1 - mass.min(), 200)


def test_sharing_gives_up_at_most_beta():
    """Eq. 14 for queries of unit length: kept mass of the shared set against the best set's."""
    rng = np.random.default_rng(3)
    k = 0.5 * rng.standard_normal((200, 16))
    q = rng.standard_normal((200, 16))
    moved = q + 0.2 * rng.standard_normal(q.shape)
    q, moved = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, moved))
    before, after = attention(q, k), attention(moved, k)
    shared = np.take_along_axis(after, np.argsort(-before, axis=1)[:, :20], axis=1).sum(axis=1)
    best = np.sort(after, axis=1)[:, -20:].sum(axis=1)
    tau = (q * moved).sum(axis=1).min()
    assert (shared >= best - beta_th(tau, np.linalg.norm(k, axis=1).max(), 16**-0.5)).all()
    assert beta_th(0.8, 10, 64**-0.5) > 1, "for real keys the bound says nothing"


# --- recorded attention --------------------------------------------------------------------------


def test_recorded_attention_keeps_nearly_the_mass_of_exact_retrieval():
    """Three heads, 160 steps: a fifth to a half of them retrieve, and 4 % of the mass is lost.

    Over four layers of the 16,384 tokens: 0.844 of the mass where exact sets of the same size
    keep 0.895, with a retrieval ratio of 0.22.
    """
    data = np.load(FOLDER / "attention_slice.npz")
    replay = Replay(CPE(s=16, phi=1, rows="head"), data["q"], data["k"], data["k"], n_prefill=32)
    kept, best = [], []
    for _ in range(160):
        pos = replay.decode()
        for head, row in enumerate(replay.rows(0)):
            weights = replay.weights(0, head)
            kept.append(weights[row].sum())
            middle = np.sort(weights[16 : pos - 63])[-(len(row) - 80) :]
            best.append(middle.sum() + weights[:16].sum() + weights[pos - 63 :].sum())
    assert 1 / 16 <= replay.state.retrieval_ratio < 0.5
    assert np.mean(kept) > np.mean(best) - 0.06
    # Steps that retrieve are exact: the rest pays for what is not read.
    assert np.mean(kept) > 0.8
