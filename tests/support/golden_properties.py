"""What holds of a real model on every device; tests bring the fixture `loaded`."""

import numpy as np
import pytest

MARGIN = 0.5  # llama.cpp's own variants differ by up to this much in a logit


def test_greedy_text_is_llama_cpps_up_to_a_close_call(loaded):
    golden, _, session = loaded
    for i in range(5):
        greedy = golden.greedy(i, "f16")
        session.truncate(0)
        logits = session.prefill(greedy.prompt_ids)
        for token, margin in zip(greedy.gen_ids, greedy.margin, strict=False):
            if margin < MARGIN:
                break
            assert int(logits.argmax()) == token
            logits = session.decode(int(token))


def test_a_failed_call_leaves_the_session_as_it_was(loaded):
    golden, engine, session = loaded
    ids = golden.prompt_ids(64)
    session.truncate(0)
    session.prefill(ids[:32])
    with pytest.raises(ValueError, match=r"prompt is 2000 tokens after 32 held, n_ctx is 1024"):
        session.prefill(np.zeros(2000, int))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        session.decode(engine.hp.n_vocab)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(ids[32:], progress=_interrupt)
    assert session.n_past == 32
    again = session.prefill(ids[32:])
    session.truncate(0)
    session.prefill(ids[:32])
    np.testing.assert_allclose(again, session.prefill(ids[32:]), atol=2e-3)


def _interrupt(done, total):
    raise KeyboardInterrupt


def test_a_saved_session_goes_on_with_the_same_numbers(loaded, tmp_path):
    golden, engine, session = loaded
    ids = golden.prompt_ids(64)
    session.truncate(0)
    session.prefill(ids[:50])
    session.save(tmp_path / "s")
    expected = session.prefill(ids[50:])
    other = engine.session(n_ctx=256)
    other.load(tmp_path / "s")
    assert other.tokens == list(ids[:50])
    np.testing.assert_allclose(other.prefill(ids[50:]), expected, atol=2e-3)
    damaged = bytearray((tmp_path / "s").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "d").write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged"):
        other.load(tmp_path / "d")
    assert other.n_past == 64
