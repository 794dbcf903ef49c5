"""Sessions of models with recurrent layers: the same logits however a sequence came to be."""

import json

import numpy as np
import pytest
from recurrent_models import LAYERS, N_VOCAB, write_recurrent_model

from tamis.engine.batch import Batch
from tamis.engine.engine import Engine
from tamis.select.notation import MethodError

IDS = np.random.default_rng(5).integers(2, N_VOCAB, 90).tolist()
# Products of one row and of many differ by rounding, which tips some float16 keys to the next one.
# Logits are about 5; those of a state that is one token off differ by 1 and more.
CLOSE = {"rtol": 2e-3, "atol": 5e-3}


@pytest.fixture(scope="module", params=sorted(LAYERS))
def engine(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    found = Engine.load(write_recurrent_model(path, request.param), n_threads=2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def truth(engine):
    """The logits of all positions, from one chunk."""
    return logits(engine.session(n_ctx=128), IDS)


def logits(session, ids):
    return np.concatenate(list(session.logits(ids)))


def test_a_prompt_in_chunks_and_token_by_token(engine, truth):
    np.testing.assert_allclose(logits(engine.session(n_ctx=128, n_ubatch=17), IDS), truth, **CLOSE)
    session = engine.session(n_ctx=128)
    np.testing.assert_allclose([session.decode(token) for token in IDS], truth, **CLOSE)


def test_each_state_is_after_other_tokens_and_the_live_one_comes_last(engine):
    session = engine.session(n_ctx=128, n_ubatch=16)
    session.prefill(IDS[:64])  # a snapshot may be after as many tokens as the live state
    found = [n for n, _ in session.states()]
    assert found == sorted(set(found))
    assert found[-1] == 64
    session.close()


@pytest.mark.parametrize("n", [0, 1, 31, 32, 50, 90])
def test_a_truncated_sequence_goes_on_as_if_it_had_ended_there(engine, truth, n):
    session = engine.session(n_ctx=128, n_ubatch=16)
    logits(session, IDS[:64])
    for token in IDS[64:]:
        session.decode(token)
    session.truncate(n)
    assert session.n_past == n
    if n < len(IDS):
        np.testing.assert_allclose(logits(session, IDS[n:]), truth[n:], **CLOSE)


def test_drafts_that_are_dropped_leave_nothing(engine, truth):
    session = engine.session(n_ctx=128)
    session.prefill(IDS[:40])
    for first in range(40, 60, 5):
        logits(session, [7, 8, 9, 10])
        session.truncate(first)
        np.testing.assert_allclose(
            logits(session, IDS[first : first + 5])[-1], truth[first + 4], **CLOSE
        )


@pytest.mark.parametrize("n", [0, 13, 50])
def test_a_copy_resumes_from_a_prefix_and_the_other_stays(engine, truth, n):
    one, other = engine.session(n_ctx=128, n_ubatch=16), engine.session(n_ctx=128)
    logits(one, IDS[:50])
    other.prefill([9, 9, 9])
    other.copy(one, n)
    np.testing.assert_allclose(logits(other, IDS[n:]), truth[n:], **CLOSE)
    np.testing.assert_allclose(logits(one, IDS[50:]), truth[50:], **CLOSE)


def test_what_is_computed_again_is_not_written_to_what_others_hold(engine, tmp_path):
    """A copy shares pages, where the same tokens have the same keys: here others are said."""
    one, other = (engine.session(n_ctx=128, n_ubatch=16) for _ in range(2))
    logits(one, IDS[:50])
    one._tokens[32:50] = IDS[14:32]
    one.save(tmp_path / "before")
    other.copy(one, 50)
    other.truncate(45)
    one.save(tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()


def test_a_saved_sequence_goes_on_in_another_session(engine, truth, tmp_path):
    session, other = engine.session(n_ctx=128), engine.session(n_ctx=128)
    session.prefill(IDS[:40])
    session.save(tmp_path / "saved")
    other.prefill([9, 9])
    other.load(tmp_path / "saved")
    assert other.tokens == IDS[:40]
    np.testing.assert_allclose(logits(other, IDS[40:60]), truth[40:60], **CLOSE)
    other.truncate(35)  # there are no snapshots: all of it is computed again
    np.testing.assert_allclose(logits(other, IDS[35:]), truth[35:], **CLOSE)


def test_a_batch_steps_each_sequence_by_itself(engine, truth):
    sessions, batch = [engine.session(n_ctx=128) for _ in range(3)], Batch(engine)
    for i, session in enumerate(sessions):
        session.prefill(IDS[: 5 + i])
    for j in range(20):
        found = batch.step({session: IDS[5 + i + j] for i, session in enumerate(sessions)})
        for i, session in enumerate(sessions):
            np.testing.assert_allclose(found[session], truth[5 + i + j], **CLOSE)


@pytest.mark.parametrize("held", [0, 20])
def test_a_cancelled_prompt_leaves_the_session_as_it_was(engine, truth, held):
    session = engine.session(n_ctx=128, n_ubatch=8)
    if held:
        logits(session, IDS[:held])

    def stop(done, total):
        if done > 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill([11] * 40, stop)
    assert session.tokens == IDS[:held]
    np.testing.assert_allclose(logits(session, IDS[held:]), truth[held:], **CLOSE)


def test_a_decode_step_that_fails_leaves_the_session_as_it_was(engine, truth, monkeypatch):
    session = engine.session(n_ctx=128)
    logits(session, IDS[:30])

    def fail(*args, **kwargs):
        session._states.live[...] = np.nan  # what a step that was cut short may leave
        raise RuntimeError("cut short")

    with monkeypatch.context() as patch:
        patch.setattr(session._forward, "decode", fail)
        with pytest.raises(RuntimeError):
            session.decode(5)
    assert session.tokens == IDS[:30]
    np.testing.assert_allclose(logits(session, IDS[30:]), truth[30:], **CLOSE)


def test_tokens_in_the_middle_of_a_state_cannot_be_removed(engine):
    session = engine.session(n_ctx=128)
    session.prefill(IDS[:20])
    with pytest.raises(ValueError, match="tokens 3 to 8 of 20 are part of the states"):
        session.remove(3, 8)
    assert session.tokens == IDS[:20]
    session.remove(12, 20)
    assert session.tokens == IDS[:12]


def test_the_memory_plan_counts_states_and_snapshots(engine):
    held = engine.session(n_ctx=64)._states.live.nbytes
    plan = engine.memory_plan(64)
    assert held > 0
    assert plan.workspace >= 9 * held
    json.dumps(plan._asdict())


def test_a_prompt_whose_tokens_would_be_frozen_is_refused(engine):
    with pytest.raises(MethodError, match="prefill freezes tokens, but this model has recurrent"):
        engine.session(n_ctx=128, prefill="cpe")
