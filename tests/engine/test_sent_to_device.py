"""What Python changes is sent to a device that has memory of its own, in every such call.

The device is a CPU whose kernels see copies of arrays, as a GPU's do: a session on it is compared
with one whose kernels see the arrays themselves.
"""

import numpy as np
import pytest
from recurrent_models import N_VOCAB, write_recurrent_model
from tiny_models import TinySpec, write_tiny_model
from two_devices import Apart, loaded

from tamis.engine import engine as engine_module
from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.types import PAGE

SIZES = {"n_ctx": 256, "n_ubatch": 64}
KINDS = ("full", "recurrent")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """By kind, an engine on the host and one on the device."""
    folder, found = tmp_path_factory.mktemp("sent"), {}
    paths = {
        "full": write_tiny_model(folder / "full.gguf", TinySpec("llama")),
        "recurrent": write_recurrent_model(folder / "recurrent.gguf", "lfm2"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "open_gpu", Apart)
        for kind, path in paths.items():
            found[kind] = Engine.load(path, n_threads=2), loaded(path, -1)
    yield found
    for pair in found.values():
        for engine in pair:
            engine.close()


def ids_of(n, seed=0):
    return np.random.default_rng(seed).integers(3, N_VOCAB, n).tolist()


def both(engines, kind, do, **options):
    """What a function of a session gives on the host and on the device, which is the same."""
    found = []
    for engine in engines[kind]:
        with engine.session(**SIZES, **options) as session:
            found.append(list(do(session)))
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_kept", [0, 60, 71])
def test_after_a_truncation(engines, kind, n_kept):
    def do(session):
        session.prefill(ids_of(70))
        session.decode(5)
        session.decode(7)
        session.truncate(n_kept)
        yield session.prefill(ids_of(9, 1))
        yield session.decode(6).copy()

    both(engines, kind, do)


@pytest.mark.parametrize("kind", KINDS)
def test_after_another_sequence_was_copied_or_loaded(engines, kind, tmp_path):
    others = iter([engine.session(**SIZES) for engine in engines[kind]])

    def do(session):
        session.prefill(ids_of(70))
        session.save(tmp_path / "s")
        with next(others) as other:
            other.prefill(ids_of(9, 1))
            yield other.decode(6).copy()
            other.copy(session)
            yield other.decode(6).copy()
            other.load(tmp_path / "s")
            yield other.decode(6).copy()
        yield session.decode(6).copy()

    other, again, restored, own = both(engines, kind, do)
    np.testing.assert_array_equal(again, own)
    np.testing.assert_array_equal(restored, own)
    assert np.abs(other - own).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [64, 100])
def test_after_pages_of_another_session_were_appended(engines, kind, n):
    def do(session):
        session.prefill(ids_of(n))
        pages, states = session.pages(0, -(-n // PAGE)), session.states()
        assert [at for at, _ in states] == sorted({at for at, _ in states})  # each once
        state = states[-1][1] if session.has_states else None
        yield session.decode(6).copy()
        session.truncate(0)
        session.prefill(ids_of(3, 2))
        session.truncate(0)
        session.append_pages(ids_of(n), list(pages), state)
        yield session.decode(6).copy()

    first, again = both(engines, kind, do)
    np.testing.assert_array_equal(first, again)


def test_a_state_is_listed_once_and_not_as_of_what_is_to_come(engines):
    engine, _ = engines["recurrent"]
    with engine.session(**SIZES) as session:
        session.prefill(ids_of(70))
        ends = [n for n, _ in session.states()]
        assert ends[-1] == 70
        assert len(set(ends)) == len(ends)
        session.decode(5)
        assert [n for n, _ in session.states()] == [*ends, 71]
    engine, _ = engines["full"]
    with engine.session(**SIZES) as session:
        session.prefill(ids_of(70))
        assert session.states() == []


@pytest.mark.parametrize("attn", ["h2o:budget=40,sink=4,s=8", "snapkv:budget=40,window=8,sink=4"])
def test_queries_are_seen_again_and_keys_stay_as_they_were(engines, attn, tmp_path):
    """A session that is loaded runs its last tokens again, by its own method."""

    def do(session):
        session.prefill(ids_of(100))
        before = session.pages(0, 2)
        session.save(tmp_path / "s")
        session.truncate(0)
        session.load(tmp_path / "s")
        np.testing.assert_array_equal(session.pages(0, 2), before)
        yield session.decode(6).copy()
        yield session.pages(0, 2)

    both(engines, "full", do, attn=attn)


def test_pages_come_from_another_method_and_stay(engines):
    """Pages of a prompt that was read sparsely are not read anew, though its last tokens are."""
    engine, _ = engines["full"]
    sparse = engine.session(**SIZES, prefill="window:recent=8,block=1")
    sparse.prefill(ids_of(100))
    pages = sparse.pages(0, 2)

    def do(session):
        session.append_pages(ids_of(100), list(pages))
        yield session.pages(0, 2)
        yield session.decode(6).copy()

    found, _ = both(engines, "full", do, attn="h2o:budget=60,s=8")
    np.testing.assert_array_equal(found, pages)
    sparse.close()


def test_after_tokens_were_removed(engines):
    def do(session):
        session.prefill(ids_of(100))
        session.remove(10, 30)
        yield session.decode(6).copy()
        yield session.pages(0, 2)

    both(engines, "full", do)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_load_that_failed_in_the_middle(engines, kind, tmp_path, monkeypatch):
    def do(session):
        session.prefill(ids_of(100, 3))
        session.save(tmp_path / "s")
        session.truncate(0)
        session.prefill(ids_of(70))
        with monkeypatch.context() as patch:
            patch.setattr(session, "recall", lambda: fail(session, patch))
            with pytest.raises(MemoryError):
                session.load(tmp_path / "s")
        yield session.decode(6).copy()

    def fail(session, patch):
        patch.undo()  # what was there comes back by it
        raise MemoryError

    whole = both(engines, kind, lambda session: [session.prefill(ids_of(70)), session.decode(6)])
    (found,) = both(engines, kind, do)
    if kind == "full":  # a state that is computed again in other chunks is only near
        np.testing.assert_array_equal(found, whole[1])
