"""Metered attention: what was left out is estimated without bias, and read where it is too much."""

import numpy as np
import pytest
from tiny_models import like_qwen2, write_tiny_model

from tamis.engine.batch import Batch
from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.ops import AUDIT, METER
from tamis.select.base import SelectorShape
from tamis.select.metered import Metered
from tamis.select.notation import MethodError, parse_method, parse_methods

N_PROMPT, N_STEP = 400, 6
BAD = "window:recent=32"
METHODS = [
    BAD, "topk:k=24,rows=head", "lfps", "hip:k=32,r_m=4,l_d=0,local=8", "tactic:P=0.3,c=4,local=8",
    "magicpig:K=3,L=6,dense=0,recent=8", "cpe:k=24,local=8", "window:recent=32@1+topk:k=24@0",
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("metered") / "m.gguf"
    engine = Engine.load(write_tiny_model(path, like_qwen2("qwen2")), n_threads=2)
    yield engine
    engine.close()


def ids_of(engine):
    rng = np.random.default_rng(3)
    return rng.integers(0, engine.hp.n_vocab, N_PROMPT + N_STEP).tolist()


def decoded(engine, attn, **options):
    session = engine.session(n_ctx=512, attn=attn, **options)
    ids = ids_of(engine)
    session.prefill(ids[:N_PROMPT])
    return session, np.array([session.decode(token) for token in ids[N_PROMPT:]])


def reports(session):
    """What the last step's heads hold, by the estimate: f64 [n_layer, n_head]."""
    (stage,) = session._stages
    return stage.state.meter.last[..., METER.mass].astype(np.float64)


def test_the_estimate_of_what_was_left_out_has_no_bias(engine):
    """Over 24 seeds the mean of a head is within 5 standard errors, that of all within 3."""
    base = engine.session(n_ctx=512)
    base.prefill(ids_of(engine)[:N_PROMPT])
    found = []
    for seed in range(24):
        session = engine.session(n_ctx=512, attn=Metered(parse_method(BAD), mass=0, seed=seed))
        session.copy(base)
        session.decode(7)
        found.append(1 / reports(session) - 1)
    audited = engine.session(n_ctx=512, attn=BAD, audit=1)
    audited.copy(base)
    audited.decode(7)
    exact = 1 / audited.audit.samples[0, ..., AUDIT.mass] - 1
    error = np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    z = (np.mean(found, axis=0) - exact) / error
    assert (error > 0).all()
    assert np.abs(z).max() < 5
    assert abs(z.mean()) < 3 / np.sqrt(z.size)
    assert (error / exact).mean() < 0.05  # or the above would say nothing


@pytest.mark.parametrize("attn", METHODS)
def test_where_nothing_may_be_missed_any_method_is_dense(engine, attn):
    _, dense = decoded(engine, "dense")
    _, plain = decoded(engine, attn)
    session, logits = decoded(engine, attn, min_mass=1)
    assert np.abs(plain - dense).max() > 1e-3
    np.testing.assert_allclose(logits, dense, rtol=0, atol=1e-4)  # of a head that has nothing left
    assert session.mass.mass == 1
    assert session.mass.dense > 0.5


def test_a_floor_reads_more_and_says_how_much(engine):
    _, dense = decoded(engine, "dense")
    found = []
    for floor in (0, 0.6, 0.9):
        session, logits = decoded(engine, "topk:k=24,rows=head", min_mass=floor)
        found.append((np.abs(logits - dense).mean(), session.mass))
    errors, masses = zip(*found, strict=True)
    assert errors[0] > errors[1] > errors[2]
    assert masses[0].escalated == 0
    assert masses[0].mass == masses[0].chosen
    for floor, mass in zip((0.6, 0.9), masses[1:], strict=True):
        assert mass.mass_p5 >= floor
        assert mass.n_step == N_STEP
        assert 0 < mass.escalated <= 1


def test_measuring_changes_nothing_and_repeats_to_the_bit(engine, tmp_path):
    _, plain = decoded(engine, BAD)
    first, logits = decoded(engine, BAD, min_mass=0)
    second, _ = decoded(engine, BAD, min_mass=0)
    tier, from_file = decoded(engine, BAD, min_mass=0, kv_ram=1 << 20, kv_dir=tmp_path)
    np.testing.assert_array_equal(logits, plain)
    np.testing.assert_array_equal(from_file, plain)
    assert (reports(first) == reports(second)).all()
    assert (reports(first) == reports(tier)).all()
    assert first.mass == second.mass == tier.mass


def test_the_audit_has_the_exact_mass_beside_the_estimate(engine):
    session, _ = decoded(engine, BAD, min_mass=0, audit=2)
    found = session.audit.estimate()
    exact = session.audit.samples[..., AUDIT.mass]
    assert found.n == exact.size
    assert found.exact == pytest.approx(exact.mean(), abs=1e-9)
    assert found.error < 0.02
    assert (found.low, found.caught) == (1, 1)


def test_a_prompt_begins_a_new_count(engine):
    session, _ = decoded(engine, BAD, min_mass=0)
    assert session.mass.n_step == N_STEP
    session.prefill([3, 4])
    assert session.mass is None
    session.truncate(100)
    session.decode(5)
    assert session.mass.n_step == 1


@pytest.mark.parametrize(("n_ctx", "unit"), [(1024, 16), (16 * 1024, 16), (16 * 1024 + 64, 32)])
def test_means_of_units_that_lose_a_token_are_made_again(n_ctx, unit):
    """A long context has fewer and larger units: positions become units by their own size."""
    shape = SelectorShape(2, 2, 1, 16, n_ctx=n_ctx, n_ubatch=64, window=(0, 0))
    state = parse_method("metered(window:recent=64)").open(shape)
    (filled, *_) = state.counters
    for n_tokens in (6 * unit, 6 * unit - 1, 5 * unit + 1, 5 * unit):
        filled[:] = 9
        state.truncate(n_tokens)
        assert (filled == n_tokens // unit).all(), n_tokens
    filled[:] = 2
    state.truncate(6 * unit)
    assert (filled == 2).all(), "what was not made stays so"


def test_sessions_of_a_batch_have_their_own(engine):
    alone, _ = decoded(engine, BAD, min_mass=0)
    sessions = [engine.session(n_ctx=512, attn=BAD, min_mass=m) for m in (0, 0.9)]
    ids, batch = ids_of(engine), Batch(engine)
    for session in sessions:
        session.prefill(ids[:N_PROMPT])
    for token in ids[N_PROMPT:]:
        batch.step(dict.fromkeys(sessions, token))
    assert sessions[0].mass.mass == pytest.approx(alone.mass.mass, abs=1e-3)
    assert sessions[1].mass.mass > 0.9 > sessions[0].mass.mass


def test_auto_is_dense_to_the_bit_up_to_a_length_and_metered_beyond(engine):
    _, dense = decoded(engine, "dense")
    short, logits = decoded(engine, "auto")
    np.testing.assert_array_equal(logits, dense)
    assert short.mass is None
    session, logits = decoded(engine, f"auto:least={N_PROMPT + 3},mass=0.2")
    np.testing.assert_array_equal(logits[:3], dense[:3])
    assert np.abs(logits[3:] - dense[3:]).max() > 1e-3
    assert session.mass.n_step == N_STEP - 3


def test_a_floor_goes_round_a_method_whatever_it_is():
    assert parse_methods("metered(topk):mass=0.8", "dense") == parse_methods("topk", "dense", 0.8)
    assert parse_methods("auto", "dense", 0.8) == parse_methods("auto:mass=0.8", "dense")
    assert parse_methods("dense", "dense", 0.8) == parse_methods("dense", "dense")
    assert parse_method("metered(topk@0+lfps@1-3)").inner == parse_method("topk@0+lfps@1-3")
    with pytest.raises(MethodError, match=r"min_mass is 1\.5, expected a number from 0 to 1"):
        parse_methods("topk", "dense", 1.5)
    with pytest.raises(MethodError, match="serve all layers"):
        parse_method("auto@0-3")
    with pytest.raises(MethodError, match="multiple of 16"):
        parse_method("metered(topk):samples=20")
