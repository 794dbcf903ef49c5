"""A Batch gives every session what it would get alone."""

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.batch import Batch
from tamis.engine import Engine

# Products of one row and of several are summed in another order.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec("gemma3"))
    engine = Engine.load(path, n_threads=2)
    yield engine
    engine.close()


def tokens(engine, seed, n):
    return np.random.default_rng(seed).integers(0, engine.hp.n_vocab, n).tolist()


def alone(engine, ids, n_prompt, **how):
    session = engine.session(n_ctx=256, **how)
    session.prefill(ids[:n_prompt])
    return [session.decode(token) for token in ids[n_prompt:]]


def together(batch, sessions, ids, n_prompts, n_step, active):
    """Logits of each session's steps; in step i those of active(i) take part."""
    found = [[] for _ in sessions]
    for session, own, n in zip(sessions, ids, n_prompts, strict=True):
        session.prefill(own[:n])
    for step in range(n_step):
        now = [i for i in active(step) if sessions[i].n_past < len(ids[i])]
        logits = batch.step({sessions[i]: ids[i][sessions[i].n_past] for i in now})
        for i in now:
            found[i].append(logits[sessions[i]])
    return found


# Its first step is another Program (h2o); its choices are shared by steps (hshare).
METHODS = (
    "dense",
    "quest:budget=64,page=8,dense=0,sink=4,recent=8",
    "topk:k=24,sink=4,recent=8",
    "dense",
)


def test_sessions_of_any_methods_get_their_own_answers(engine):
    n_prompts = [3, 40, 17, 70]
    ids = [tokens(engine, i, n + 20) for i, n in enumerate(n_prompts)]
    how = [{"attn": attn} for attn in METHODS]
    expected = [
        alone(engine, *each[:2], **each[2]) for each in zip(ids, n_prompts, how, strict=True)
    ]
    sessions = [engine.session(n_ctx=256, **each) for each in how]

    def active(step):  # they come and go, and one is alone for some steps
        return [i for i in range(4) if (step + i) % 5 and (step // 8 != 1 or i == 2)]

    found = together(Batch(engine), sessions, ids, n_prompts, 60, active)
    for own, rows in zip(expected, found, strict=True):
        np.testing.assert_allclose(rows, own, atol=ROUNDING)
