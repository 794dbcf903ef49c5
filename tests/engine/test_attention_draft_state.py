"""A draft that was dropped leaves a method's own state as it would be without the draft."""

import draft_cases
import numpy as np
import pytest
from recurrent_models import write_recurrent_model
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.compat import Llama, LlamaAttentionDrafting
from tamis.engine.drafting import AttentionDraft
from tamis.engine.engine import Engine

TEXT = "the hand " * 20
PROMPT = [(i * 7 + i * i // 3 + 1) % 90 + 5 for i in range(90)]
HIP_AGAIN = "hip:k=16,b_k=2,l_d=0,local=16,sink=2,r_m=4"  # a mask serves several steps
METHODS = [*draft_cases.METHODS, HIP_AGAIN, "hshare"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("drafts") / "m.gguf", TinySpec(n_ctx=512))


@pytest.fixture(scope="module")
def engine(path):
    with Engine.load(path, n_threads=1) as engine:
        yield engine


@pytest.mark.parametrize("method", METHODS)
def test_a_method_decodes_on_as_without_drafts(engine, monkeypatch, method):
    """Two drafts and their checks, one refused after a token, lie between the same tokens."""
    monkeypatch.setattr("tamis.engine.drafting.LEAST", 0.0)  # random weights are never sure
    with (
        engine.session(n_ctx=256, attn=method) as plain,
        engine.session(n_ctx=256, attn=method) as session,
    ):
        draft = AttentionDraft(session)
        for each in (plain, session):
            each.prefill(PROMPT)
        for token in (9, 30):
            drafted = draft.propose([*session.tokens, token], 4)
            assert drafted
            list(session.logits([token, *drafted]))
            session.truncate(session.n_past - len(drafted) + 1)
            list(plain.logits([token, drafted[0]]))
        assert session.tokens == plain.tokens
        for token in (11, 40, 8):
            np.testing.assert_array_equal(session.decode(token), plain.decode(token))


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_is_never_checked_leaves_no_trace(engine, monkeypatch, method):
    """The method's next steps follow the roll-back, with no chunk between."""
    monkeypatch.setattr("tamis.engine.drafting.LEAST", 0.0)
    with (
        engine.session(n_ctx=256, attn=method) as plain,
        engine.session(n_ctx=256, attn=method) as session,
    ):
        for each in (plain, session):
            each.prefill(PROMPT)
        assert len(AttentionDraft(session).propose([*PROMPT, 50], 4)) == 4
        for token in (11, 40, 8, 21, 33, 17):
            np.testing.assert_array_equal(session.decode(token), plain.decode(token))


def test_a_failed_draft_leaves_the_session(engine, monkeypatch):
    monkeypatch.setattr("tamis.engine.drafting.LEAST", 0.0)
    with (
        engine.session(n_ctx=256, attn=METHODS[0]) as plain,
        engine.session(n_ctx=256, attn=METHODS[0]) as session,
    ):
        for each in (plain, session):
            each.prefill(PROMPT)
        draft, decode, steps = AttentionDraft(session), session.decode_best, []

        def failing(token, n):
            steps.append(token)
            if len(steps) == 3:
                raise KeyboardInterrupt
            return decode(token, n)

        monkeypatch.setattr(session, "decode_best", failing)
        with pytest.raises(KeyboardInterrupt):
            draft.propose([*PROMPT, 9], 4)
        assert session.tokens == PROMPT
        np.testing.assert_array_equal(session.prefill([9]), plain.prefill([9]))
        np.testing.assert_array_equal(session.decode(11), plain.decode(11))


def test_a_model_that_attends_to_nothing_is_refused(tmp_path):
    path = write_recurrent_model(tmp_path / "m.gguf", "mamba2")
    with (
        Engine.load(path, n_threads=1) as engine,
        engine.session(n_ctx=256, n_ubatch=32, attn="window:recent=16") as session,
        pytest.raises(ValueError, match=r"no layer of mamba2 attends .* expected one at least"),
    ):
        AttentionDraft(session)


def test_a_stream_of_llama_that_is_cancelled_can_be_asked_again(path, monkeypatch):
    monkeypatch.setattr("tamis.engine.drafting.LEAST", 0.0)
    how = {"n_ctx": 256, "n_threads": 1, "verbose": False}
    asked = {"max_tokens": 24, "temperature": 0}
    with Llama(str(path), **how) as plain:
        expected = plain(TEXT, **asked)["choices"][0]["text"]
    draft = LlamaAttentionDrafting(HIP_AGAIN, num_pred_tokens=4)
    with Llama(str(path), **how, draft_model=draft) as llm:
        chunks = llm(TEXT, **asked, stream=True)
        for _ in range(3):
            next(chunks)
        chunks.close()
        assert llm(TEXT, **asked)["choices"][0]["text"] == expected
