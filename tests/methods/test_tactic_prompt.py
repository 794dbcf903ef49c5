"""Tactic's clusters are made while a prompt is read, and are those of the first decode step."""

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.select import tactic

ATTN = "tactic:segment=64,c=8,local=16,sink=4,period=1"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("tactic") / "tiny.gguf"
    write_tiny_model(path, TinySpec())
    return Engine.load(path, n_threads=1)


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, 60, n).tolist()


@pytest.fixture
def planned(monkeypatch):
    """What chunks were clustered to: (first, end) of each clustering in a prompt."""
    found = []
    plan = tactic._State.prepare_due

    def noted(state, end):
        due = plan(state, end)
        if due:
            found.append(tuple(state._extent[:2].tolist()))
        return due

    monkeypatch.setattr(tactic._State, "prepare_due", noted)
    return found


def steps(session, n=3):
    return np.array([session.decode(3 + i).copy() for i in range(n)])


def at_first_step(engine, monkeypatch, run, **options):
    """What `run` gives where nothing is clustered before a decode step."""
    with monkeypatch.context() as patch:
        patch.setattr(tactic._State, "prepare_due", lambda state, end: False)
        return run(engine.session(n_ctx=512, attn=ATTN, **options))


@pytest.mark.parametrize("n_ubatch", [32, 50, 512])
@pytest.mark.parametrize("prefill", ["dense", "window", "cpe"])
def test_steps_are_those_of_clusters_made_at_the_first(
    engine, planned, monkeypatch, n_ubatch, prefill
):
    def run(session):
        session.prefill(tokens(300))
        return steps(session)

    options = {"n_ubatch": n_ubatch, "prefill": prefill}
    found = run(engine.session(n_ctx=512, attn=ATTN, **options))
    assert planned[-1][1] == 4 + 4 * 64  # 300 - 16 - 4: four segments are whole
    assert planned[0][0] == 4
    assert [first for first, _ in planned[1:]] == [end for _, end in planned[:-1]]
    assert (found == at_first_step(engine, monkeypatch, run, **options)).all()


def test_a_second_prompt_and_one_after_a_truncation_go_on_from_there(engine, planned, monkeypatch):
    def run(session):
        session.prefill(tokens(150))
        first = steps(session)
        session.prefill(tokens(90, 1))
        second = steps(session)
        session.truncate(120)
        session.prefill(tokens(200, 2))
        return np.concatenate([first, second, steps(session)])

    found = run(engine.session(n_ctx=512, attn=ATTN, n_ubatch=32))
    expected = [(4, 68), (68, 132), (132, 196), (68, 132), (132, 196), (196, 260)]
    assert planned == expected
    assert (found == at_first_step(engine, monkeypatch, run, n_ubatch=32)).all()


def test_what_a_step_clustered_of_a_segment_is_made_anew_when_the_segment_is_whole(engine, planned):
    # P = 1 reads every position: one that clusters have lost, or have twice, would show.
    texts = ATTN.replace("period=1", "period=400,P=1"), "dense"
    sessions = [engine.session(n_ctx=512, attn=text, n_ubatch=32) for text in texts]
    answers = []
    for session in sessions:
        session.prefill(tokens(110))
        first = steps(session)  # 4 .. 91 are clustered, a part of the second segment
        session.prefill(tokens(60, 1))
        answers.append(np.concatenate([first, steps(session)]))
    assert planned == [(4, 68), (68, 132)]
    np.testing.assert_allclose(*answers, atol=1e-4)


def test_layers_of_their_own_methods_are_clustered_too(engine, planned, monkeypatch):
    def run(session):
        session.prefill(tokens(300))
        return steps(session)

    found = run(engine.session(n_ctx=512, attn=f"topk:k=8@0+{ATTN}@1", n_ubatch=64))
    assert planned
    with monkeypatch.context() as patch:
        patch.setattr(tactic._State, "prepare_due", lambda state, end: False)
        other = engine.session(n_ctx=512, attn=f"topk:k=8@0+{ATTN}@1", n_ubatch=64)
        assert (found == run(other)).all()


@pytest.mark.parametrize("way", ["load", "copy", "remove"])
def test_a_prompt_after_tokens_that_came_otherwise_is_clustered_from_their_beginning(
    engine, planned, monkeypatch, tmp_path, way
):
    def run(session):
        source = engine.session(n_ctx=512, n_ubatch=32)
        source.prefill(tokens(150))
        if way == "load":
            source.save(tmp_path / "s")
            session.load(tmp_path / "s")
        elif way == "copy":
            session.copy(source)
        else:
            session.prefill(tokens(190))
            steps(session)  # 4 .. 171 are clustered
            session.remove(40, 83)
            planned.clear()
        first = steps(session)
        session.prefill(tokens(150, 1))
        return np.concatenate([first, steps(session)])

    found = run(engine.session(n_ctx=512, attn=ATTN, n_ubatch=32))
    assert planned == [(132, 196), (196, 260)]  # two segments were clustered by the first steps
    assert (found == at_first_step(engine, monkeypatch, run, n_ubatch=32)).all()


@pytest.mark.parametrize("way", ["load", "copy"])
def test_keys_of_tokens_that_run_again_for_another_method_are_not_clustered(
    engine, planned, monkeypatch, tmp_path, way
):
    # snapkv runs the last 64 tokens again, and what a window's prefill has left is then put back.
    attn = f"snapkv:window=64@0+{ATTN}@1"

    def run(session):
        source = engine.session(n_ctx=512, n_ubatch=32, prefill="window:sink=4,recent=16")
        source.prefill(tokens(150))
        if way == "load":
            source.save(tmp_path / "s")
            session.load(tmp_path / "s")
        else:
            session.copy(source)
        return steps(session)

    found = run(engine.session(n_ctx=512, attn=attn, n_ubatch=32))
    assert planned == []
    with monkeypatch.context() as patch:
        patch.setattr(tactic._State, "prepare_due", lambda state, end: False)
        assert (found == run(engine.session(n_ctx=512, attn=attn, n_ubatch=32))).all()
