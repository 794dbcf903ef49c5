"""Pages: their bookkeeping, and sessions that share them until one of them writes."""

import gc

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.page_store import PageStore
from tamis.kv.pages import OutOfPagesError, PagePool
from tamis.kv.types import KVTypes


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "m.gguf"
    write_tiny_model(path, TinySpec("llama", "F32"))
    engine = Engine.load(path, n_threads=1)
    yield engine
    engine.close()


def pool_of(session):
    return session._kv._store.pool


def ids_of(n, seed=0):
    return np.random.default_rng(seed).integers(3, 60, n)


def test_a_slot_is_free_when_nobody_holds_it():
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    assert (first, second, pool.n_free) == (0, 1, 0)
    with pytest.raises(OutOfPagesError, match="all 2 pages are in use"):
        pool.take()
    pool.share(first)
    assert not pool.release(first)
    assert (pool.n_holder(first), pool.n_free) == (1, 0)
    assert pool.release(first)
    assert (pool.take(), pool.n_free) == (first, 0)


def test_memory_of_slots_that_nobody_holds_goes_back(engine):
    store = PageStore(engine.hp, KVTypes(), 64)
    slots = [store.pool.take() for _ in range(64)]
    store.k[...] = 1
    store.pool.share(slots[40])
    store.give_back(slots)
    assert (store.slots[0][40] == 1).all()
    # The system takes whole pages of memory back, which then are zero.
    assert (store.slots[0][2:38] == 0).all()
    assert store.pool.n_free == 63


def test_a_fork_shares_pages_and_each_writes_to_its_own(engine):
    ids, n = ids_of(200), 2 * PAGE + 9  # two whole pages, and one that both go on writing to
    base, alone = (engine.session(n_ctx=256, n_ubatch=32) for _ in range(2))
    for session in (base, alone):
        session.prefill(ids[:n])
    n_free = pool_of(base).n_free
    fork = engine.session(n_ctx=256, n_ubatch=32)
    fork.copy(base)
    assert pool_of(base).n_free == n_free
    kept = [base._kv.read(layer, n) for layer in range(engine.hp.n_layer)]
    expected = alone.decode(int(ids[n]))
    np.testing.assert_array_equal(fork.decode(int(ids[n])), expected)
    fork.prefill(ids_of(90, seed=1))
    assert pool_of(base).n_free == n_free - 2  # the page that was begun, and one more
    for layer, rows in enumerate(kept):
        for before, now in zip(rows, base._kv.read(layer, n), strict=True):
            np.testing.assert_array_equal(before, now)
    np.testing.assert_array_equal(base.decode(int(ids[n])), expected)


def test_pages_of_a_session_that_ended_are_others(engine):
    base = engine.session(n_ctx=256, n_ubatch=32)
    base.prefill(ids_of(100))
    n_free = pool_of(base).n_free
    fork = engine.session(n_ctx=256, n_ubatch=32)
    fork.copy(base)
    fork.prefill(ids_of(100, seed=1))
    assert pool_of(base).n_free < n_free
    del fork
    gc.collect()
    assert pool_of(base).n_free == n_free
    base.truncate(0)
    assert pool_of(base).n_free == n_free + 2


def test_a_fork_of_a_fork_truncates_alone(engine):
    base, fork = (engine.session(n_ctx=256, n_ubatch=32) for _ in range(2))
    ids = ids_of(150)
    base.prefill(ids)
    expected = base.decode(5)
    base.truncate(150)
    fork.copy(base)
    fork.truncate(70)
    fork.prefill(ids_of(60, seed=2))
    np.testing.assert_array_equal(base.decode(5), expected)
    base.truncate(150)
    fork.copy(base)
    np.testing.assert_array_equal(fork.decode(5), expected)
