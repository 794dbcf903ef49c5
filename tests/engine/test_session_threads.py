"""Sessions beside each other: in Python threads, on one engine or two, after an interruption."""

import signal
import threading

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine

N_PROMPT, N_DECODE = 50, 30


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec())


@pytest.fixture
def engine(path):
    engine = Engine.load(path, n_threads=2)
    yield engine
    engine.close()


def tokens(engine, seed, n=N_PROMPT + N_DECODE):
    return np.random.default_rng(seed).integers(0, engine.hp.n_vocab, n).tolist()


def logits_of(session, ids):
    """Logits after a prompt and after each token that follows."""
    found = [session.prefill(ids[:N_PROMPT])]
    return np.array(found + [session.decode(token) for token in ids[N_PROMPT:]])


def in_turns(sessions, sequences):
    """logits_of each, a thread each; they start together."""
    found, start = [None] * len(sessions), threading.Barrier(len(sessions))

    def work(i):
        start.wait()
        found[i] = logits_of(sessions[i], sequences[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("n_engine", [1, 2])
def test_sessions_in_python_threads_do_not_disturb_each_other(path, engine, n_engine):
    other = Engine.load(path, n_threads=2) if n_engine == 2 else engine
    sequences = [tokens(engine, seed) for seed in range(2)]
    expected = [logits_of(engine.session(n_ctx=128), ids) for ids in sequences]
    sessions = [each.session(n_ctx=128) for each in (engine, other)]
    for _ in range(5):
        for found, logits in zip(in_turns(sessions, sequences), expected, strict=True):
            np.testing.assert_array_equal(found, logits)
        for session in sessions:
            session.truncate(0)
    other.close()


@pytest.mark.parametrize("n_layer", [0, 1])
def test_ctrl_c_between_layers_leaves_session_and_team_usable(engine, monkeypatch, n_layer):
    ids, session = tokens(engine, 7), engine.session(n_ctx=128)
    expected = logits_of(session, ids)
    session.truncate(20)
    run, n_run = engine.backend.run, 0

    def interrupted(*arguments):
        nonlocal n_run
        run(*arguments)
        if n_run == n_layer:
            signal.raise_signal(signal.SIGINT)
        n_run += 1

    monkeypatch.setattr(engine.backend, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(ids[20:])
    monkeypatch.undo()
    assert n_run == n_layer
    assert session.tokens == ids[:20]
    session.truncate(0)
    np.testing.assert_array_equal(logits_of(session, ids), expected)
    np.testing.assert_array_equal(logits_of(engine.session(n_ctx=128), ids), expected)
