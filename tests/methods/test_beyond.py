"""`beyond`: dense attention up to a position, another method of prompts from there on."""

import numpy as np
import pytest
from tiny_models import like_qwen2, write_tiny_model

from tamis.engine.engine import Engine
from tamis.select.notation import ANY_PREFILL, MethodError, parse_method

INNER = "window:sink=4,recent=16,block=1"
N_CTX, N_UBATCH, LEAST = 384, 32, 128


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A tiny model."""
    path = tmp_path_factory.mktemp("beyond") / "m.gguf"
    write_tiny_model(path, like_qwen2("qwen2"))
    with Engine.load(path, n_threads=2) as engine:
        yield engine


def ids_of(engine, n):
    return np.random.default_rng(7).integers(0, engine.hp.n_vocab, n).tolist()


def rows_of(engine, ids, prefill):
    session = engine.session(N_CTX, N_UBATCH, prefill=prefill)
    return np.concatenate(list(session.logits(ids)))


def test_chunks_before_the_bound_are_dense_and_later_ones_are_not(engine):
    ids = ids_of(engine, 256)
    dense, inner = (rows_of(engine, ids, text) for text in ("dense", INNER))
    both = rows_of(engine, ids, f"beyond({INNER}):least={LEAST}")
    np.testing.assert_array_equal(both[:LEAST], dense[:LEAST])
    assert np.abs(both[LEAST:] - dense[LEAST:]).max() > 1e-3
    # Later chunks read what dense attention has made of the earlier ones.
    assert np.abs(both[LEAST:] - inner[LEAST:]).max() > 1e-3


def test_a_prefix_is_the_same_in_a_prompt_of_any_length(engine):
    """Delta's rows too: so that prompts which begin alike can share their pages."""
    text = f"beyond(delta({INNER}):gamma=16):least={LEAST}"
    ids = ids_of(engine, 320)
    whole = rows_of(engine, ids, text)
    for n in (96, 192, 256):
        # But for the last gamma rows of a prompt, which Delta reads densely.
        np.testing.assert_array_equal(rows_of(engine, ids[:n], text)[: n - 16], whole[: n - 16])


def test_a_sequence_that_is_cut_off_is_read_as_a_fresh_one(engine):
    text, ids = f"beyond(delta({INNER}):gamma=16):least={LEAST}", ids_of(engine, 320)
    session = engine.session(N_CTX, N_UBATCH, prefill=text)
    session.prefill(ids)
    session.truncate(0)
    np.testing.assert_array_equal(session.prefill(ids[:96]), rows_of(engine, ids[:96], text)[-1])
    fresh = engine.session(N_CTX, N_UBATCH, prefill=text)
    fresh.prefill(ids[:96])
    np.testing.assert_array_equal(session.prefill(ids[96:]), fresh.prefill(ids[96:]))


def test_a_context_that_cannot_be_long_is_dense(engine):
    """So no Program of the other method is recorded."""
    session = engine.session(N_CTX, N_UBATCH, prefill=ANY_PREFILL)
    (stage,) = session._stages
    assert len(stage._prefills) == 1
    ids = ids_of(engine, 70)
    np.testing.assert_array_equal(session.prefill(ids), rows_of(engine, ids, "dense")[-1])


def test_it_is_of_prompts_and_over_another_method():
    for text, role in (("beyond(window)", "decode"), ("beyond", "prefill")):
        with pytest.raises(MethodError):
            parse_method(text, role)
    with pytest.raises(MethodError, match="least"):
        parse_method("beyond(window):least=-1", "prefill")
