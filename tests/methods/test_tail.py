"""The tail counted: samples of what was left out join the softmax; their error is as promised."""

import numpy as np
import pytest
from tiny_models import like_qwen2, write_tiny_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import AUDIT
from tamis.select.base import PROMISES, promise_of
from tamis.select.dense import Dense
from tamis.select.metered import drawn
from tamis.select.notation import methods, parse_method, parse_methods
from tamis.select.tail import BOUNDS, Tail, chances, need_of, sample_size, sampled

N_PROMPT, N_STEP, N, DIM, UNIT = 400, 6, 4096, 16, 16
BAD = "window:recent=32"
INNER = [
    BAD, "topk:k=24,rows=head", "lfps", "hip:k=32,r_m=4,l_d=0,local=8", "quest:budget=96,dense=0",
    "tactic:P=0.3,c=4,local=8", "magicpig:K=3,L=6,dense=0,recent=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("tail") / "m.gguf"
    engine = Engine.load(write_tiny_model(path, like_qwen2("qwen2")), n_threads=2)
    yield engine
    engine.close()


def decoded(engine, attn, **options):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, engine.hp.n_vocab, N_PROMPT + N_STEP).tolist()
    session = engine.session(n_ctx=512, attn=attn, **options)
    session.prefill(ids[:N_PROMPT])
    return session, np.array([session.decode(token) for token in ids[N_PROMPT:]])


def attention(rng):
    """Weights of one head's positions, heavy ones among them, its values, and which are kept."""
    logits = rng.gumbel(size=N) * rng.uniform(0.3, 1)
    logits += np.repeat(rng.standard_normal(N // 64), 64)  # neighbours are alike
    weights = np.exp(logits - logits.max())
    values = rng.standard_normal((N, DIM)) + rng.standard_normal(DIM)
    kept = np.zeros(N, bool)
    kept[:4] = kept[-64:] = True
    kept[np.argsort(-logits)[:200]] = True
    return weights, values, kept


def answered(p, rng, weights, values, kept):
    """Whether the error of what p bounds is above its epsilon, and the sampled positions."""
    total, own = weights.sum(), weights[kept].sum()
    n_unit = N // UNIT
    scores, left = np.zeros(n_unit), (~kept).reshape(n_unit, UNIT).sum(axis=1)
    at, factors = drawn(~kept, scores, UNIT, rng.random(p.samples), p.even)
    w = weights[at] * factors / own
    size = sample_size(p, w, values[at], weights[kept] @ values[kept] / own)
    need = need_of(p, np.array([size]), int(left.sum()))
    chance = chances(p, need, left, scores)
    more, log_weights = sampled(~kept, chance, UNIT, rng.random(), rng.random(n_unit))
    w = weights[more] * np.exp(log_weights)
    below = own + w.sum()
    if p.bound == "denominator":
        return abs(below / total - 1) > p.epsilon, len(more)
    exact = weights @ values / total
    error = (weights[kept] @ values[kept] + w @ values[more]) / below - exact
    return np.linalg.norm(error) > p.epsilon * np.linalg.norm(exact), len(more)


@pytest.mark.parametrize("epsilon", [0.05, 0.15])
@pytest.mark.parametrize("bound", BOUNDS)
def test_no_more_than_delta_of_the_heads_err_by_more_than_epsilon(bound, epsilon):
    """400 heads: were the rate delta = 0.1, 52 or more would happen once in 40 times."""
    rng = np.random.default_rng(11)
    p = Tail(Dense(), epsilon=epsilon, delta=0.1, bound=bound)
    found = np.array([answered(p, rng, *attention(rng)) for _ in range(400)])
    assert found[:, 0].mean() <= p.delta
    assert p.samples - 1 <= found[:, 1].min() < N - 268  # it samples: not all heads read all


def test_the_outputs_own_bound_takes_fewer_samples_than_its_parts():
    rng = np.random.default_rng(4)
    heads = [attention(rng) for _ in range(40)]
    n = {
        bound: np.mean([answered(Tail(Dense(), bound=bound), rng, *head)[1] for head in heads])
        for bound in BOUNDS
    }
    assert n["denominator"] < n["output"] < 0.5 * n["parts"]


@pytest.mark.parametrize("even", [1.0, 0.3])
def test_sums_over_samples_have_no_bias(even):
    """Over 600 draws the mean of numerator and denominator is within 4 standard errors."""
    rng = np.random.default_rng(2)
    weights, values, kept = attention(rng)
    left = (~kept).reshape(-1, UNIT).sum(axis=1)
    scores = weights.reshape(-1, UNIT).mean(axis=1)
    chance = chances(Tail(Dense(), even=even), 300, left, scores)
    terms = np.concatenate([weights[:, None], weights[:, None] * values], axis=1)
    found = []
    for _ in range(600):
        at, log_weights = sampled(~kept, chance, UNIT, rng.random(), rng.random(N // UNIT))
        assert (np.diff(at) > 0).all()
        found.append(np.exp(log_weights) @ terms[at])
    error = np.std(found, axis=0) / np.sqrt(len(found))
    assert (np.abs(np.mean(found, axis=0) - terms[~kept].sum(axis=0)) < 4 * error).all()


def test_where_samples_do_not_help_the_answer_is_dense(engine):
    _, dense = decoded(engine, "dense")
    for attn in (f"tail({BAD}):epsilon=0.0001", f"tail({BAD}):most=0"):
        session, logits = decoded(engine, attn)
        np.testing.assert_allclose(logits, dense, rtol=0, atol=1e-4)
        assert session.mass.dense == 1


@pytest.mark.parametrize("inner", INNER)
def test_over_any_method_the_output_is_nearer_to_dense_attention(engine, inner):
    """The error of the heads that a method serves badly; the audit has it exactly."""
    errors = []
    for attn in (inner, f"tail({inner}):samples=64,epsilon=0.05,most=1"):
        session, _ = decoded(engine, attn, audit=1)
        samples = session.audit.samples
        errors.append(samples[..., AUDIT.error] / samples[..., AUDIT.norm])
    plain, tail = errors
    assert plain.mean() > 0.02
    assert tail.mean() < 0.4 * plain.mean()
    assert (tail > 0.05).mean() < 0.1


def test_a_run_repeats_to_the_bit_in_memory_and_on_disk(engine, tmp_path):
    attn = "tail(topk:k=24,rows=head):samples=16,epsilon=0.5"
    session, first = decoded(engine, attn)
    _, again = decoded(engine, attn)
    _, from_file = decoded(engine, attn, kv_ram=1 << 20, kv_dir=tmp_path)
    _, other = decoded(engine, f"{attn},seed=1")
    assert session.mass.dense < 1
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, from_file)
    assert (first != other).any()


def test_what_bounds_ask_for():
    """Verified-D needs (z s / epsilon)^2; parts have half of delta, and about half of epsilon."""
    rng = np.random.default_rng(0)
    weights, values = rng.uniform(0, 0.02, 64), rng.standard_normal((64, 8))
    share = 64 * weights / (1 + weights.sum())
    whole = Tail(Dense(), epsilon=0.1, delta=0.1, bound="denominator")
    expected = (1.6448536 / 0.1) ** 2 * share.var(ddof=1)
    assert sample_size(whole, weights, values, np.ones(8)) == pytest.approx(expected, rel=1e-6)
    epsilon, z = Tail(Dense(), epsilon=0.1, delta=0.1, bound="parts").asked
    assert 2 * epsilon / (1 - epsilon) == pytest.approx(0.1)
    assert z == pytest.approx(1.959964, rel=1e-6)
    assert need_of(whole, np.array([np.nan]), 4000) == ops.READ_ALL
    assert need_of(whole, np.array([5.0, 700.2]), 4000) == 701
    assert parse_method("tail(window)") == Tail(parse_method("window"))


def test_a_method_says_what_it_promises_of_decode_steps():
    found = promise_of(parse_methods("tail(hip):epsilon=0.05", "delta(window)"))
    assert found == {"kind": "epsilon-delta", "epsilon": 0.05, "delta": 0.1, "bound": "output"}
    assert promise_of(parse_methods("hip", "dense", min_mass=0.9)) == {
        "kind": "estimate",
        "mass": 0.9,
    }
    assert promise_of(parse_method("topk@0-1+lfps@2")) == {"kind": "none"}
    assert promise_of(parse_methods("dense", "dense")) == {"kind": "exact"}
    assert {getattr(m, "promise", ("none",))[0] for m in methods().values()} == {*PROMISES}
