"""KVzip: the scores, what is kept, and a session that goes on after it."""

import itertools

import numpy as np
import pytest
from recurrent_models import write_recurrent_model
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.engine.reuse import compressing
from tamis.engine.reuse.compressing import compress, stand_ins
from tamis.select.base import ParameterError
from tamis.select.in_numpy import NumpySelector
from tamis.select.kvzip import KVzip, LastPrompt, chosen, importance

TEXT = [3 + (7 * i) % 90 for i in range(96)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("m") / "m.gguf", TinySpec())
    engine = Engine.load(path, n_threads=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose heads have the 32 elements that quantised keys need."""
    path = write_tiny_model(tmp_path_factory.mktemp("m") / "m.gguf", TinySpec(embd=128))
    engine = Engine.load(path, n_threads=1)
    yield engine
    engine.close()


def held(engine, tokens=TEXT, n_ctx=192, **how):
    session = engine.session(n_ctx=n_ctx, n_ubatch=32, **how)
    session.prefill(tokens)
    return session


# --- scores ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("n_sink", [0, 3])
def test_a_key_counts_as_its_largest_weight_among_chunk_sinks_and_earlier_own_keys(n_sink):
    rng = np.random.default_rng(0)
    n_in, m, n_head, n_head_kv, dim = 5, 7, 4, 2, 8
    q = rng.standard_normal((n_in, n_head, dim)).astype(np.float32)
    keys, own, sinks = (
        rng.standard_normal((n, n_head_kv, dim)).astype(np.float32) for n in (m, n_in, n_sink)
    )
    expected = np.zeros((n_head_kv, m))
    for i in range(n_in):
        for head in range(n_head):
            parts = (keys, own[: i + 1], sinks)
            seen = np.concatenate([of[:, head // 2] for of in parts]).astype(float)
            weights = np.exp(0.5 * seen @ q[i, head])
            kv = head // 2
            expected[kv] = np.maximum(expected[kv], (weights / weights.sum())[:m])
    np.testing.assert_allclose(np.exp(importance(q, keys, own, sinks, 0.5)), expected, rtol=1e-5)


def test_heads_keep_their_best_and_the_sinks():
    scores = np.array([[9, 0, 1, 5, 2, 5], [0, 0, 7, 1, 8, 2]], np.float32)
    found = chosen(KVzip(sink=1), scores, 3)
    assert found.tolist() == [[0, 3, 5], [0, 2, 4]]


def test_each_part_is_asked_for_by_the_end_of_the_one_before(engine, monkeypatch):
    seen, request = [], compressing._request

    def noted(engine, before, end):
        seen.append(list(before))
        return request(engine, before, end)

    monkeypatch.setattr(compressing, "_request", noted)
    with held(engine) as session:
        compress(engine, session, KVzip(chunk=40, hint=40))
    assert seen == [[], TEXT[:40], TEXT[40:80]]


@pytest.mark.parametrize(("n", "kept"), [(96, 32), (3, 3), (9, 4), (100, 33)])
def test_a_third_stays_and_never_less_than_the_sinks(n, kept):
    assert KVzip().n_kept(n) == kept


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.25", KVzip(keep=0.25)),
        ("kvzip", KVzip()),
        ("kvzip:keep=0.5,chunk=64,sink=0", KVzip(keep=0.5, chunk=64, sink=0)),
    ],
)
def test_what_a_text_says(text, found):
    assert KVzip.parse(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none", "keep is 'none', expected a number"),
        ("0", "keep is 0.0, expected 0 < keep <= 1"),
        ("kvzip:keep=2", "keep is 2.0"),
        ("kvzip:share=2", "expected one of keep, chunk, hint, sink"),
        ("kvzip:chunk=1.5", "chunk is '1.5'"),
    ],
)
def test_a_text_that_says_nothing_is_refused(text, message):
    with pytest.raises((ValueError, ParameterError), match=message):
        KVzip.parse(text)


# --- sessions -------------------------------------------------------------------------------------
@pytest.mark.parametrize("type", ["f16", "q8_0"])
def test_the_last_positions_of_all_heads_are_what_a_context_shift_leaves(wide, type):
    engine, found = wide, []
    for shift in (True, False):
        session = held(engine, type_k=type, type_v=type)
        if shift:
            session.remove(0, 56)
        else:
            session.compact([None] * len(engine.model.kv_layers), 40)
        assert session.n_past == 40
        found.append(session.decode(3))
    np.testing.assert_array_equal(*found)


def test_later_tokens_see_what_is_kept_at_its_distance(engine):
    kept = np.array([0, 1, 5, 17, 18, 40, 63, 64, 70, 95])
    sparse = engine.session(
        n_ctx=192,
        n_ubatch=32,
        attn=NumpySelector(lambda q, k: np.concatenate([kept, np.arange(96, len(k))])),
    )
    sparse.prefill(TEXT)
    session, heads = held(engine), engine.hp.n_head_kv
    session.compact([np.tile(kept, (heads, 1))] * len(engine.model.kv_layers), len(kept))
    for token in (9, 4, 11):
        # Re-rotated keys are rounded to float16 once more.
        np.testing.assert_allclose(session.decode(token), sparse.decode(token), atol=0.02)


def test_heads_may_keep_different_positions(engine):
    """Heads that keep other keys than one set give other logits, and each its own."""
    n_head, layers = engine.hp.n_head_kv, len(engine.model.kv_layers)
    sets = [np.arange(0, 40), np.arange(50, 90)]
    found = []
    for order in ([sets[0]] * n_head, [sets[1]] * n_head, [sets[i % 2] for i in range(n_head)]):
        session = held(engine)
        session.compact([np.stack(order)] * layers, 40)
        found.append(session.decode(3))
    assert all(np.abs(a - b).max() > 1e-3 for a, b in itertools.pairwise(found))


def test_queries_are_noted_in_the_order_of_positions(engine):
    session = engine.session(n_ctx=192, n_ubatch=32, prefill=LastPrompt(50))
    session.prefill(TEXT)
    q = session.noted_queries(0, 50, 96)
    other = engine.session(n_ctx=192, n_ubatch=8, prefill=LastPrompt(96))
    other.prefill(TEXT)
    np.testing.assert_allclose(q, other.noted_queries(0, 50, 96), atol=1e-4)


def test_queries_of_every_chunk_share_their_weight_with_the_sinks(engine, monkeypatch):
    seen = []

    def noted(q, keys, own, sinks, scale):
        seen.append(sinks)
        return importance(q, keys, own, sinks, scale)

    monkeypatch.setattr(compressing, "importance", noted)
    session, n_layer = held(engine), len(engine.model.kv_layers)
    first = session.keys(0, 0, 4)
    compress(engine, session, KVzip(chunk=32, sink=4))
    assert [len(sinks) for sinks in seen[::n_layer]] == [0, 4, 4], "the first chunk holds them"
    np.testing.assert_array_equal(seen[n_layer], first)


def test_a_compressed_session_answers_is_saved_and_copied(engine, tmp_path):
    session = held(engine)
    assert compress(engine, session, KVzip(chunk=40, sink=2)) == 32
    assert session.tokens == stand_ins(TEXT, KVzip(chunk=40, sink=2))
    assert max(session.tokens) < 0
    session.save(tmp_path / "s")
    loaded, copied = (engine.session(n_ctx=64, n_ubatch=32) for _ in range(2))
    loaded.load(tmp_path / "s")
    copied.copy(session)
    logits = session.prefill([5, 6])
    np.testing.assert_array_equal(loaded.prefill([5, 6]), logits)
    np.testing.assert_array_equal(copied.prefill([5, 6]), logits)
    assert list(session.generate([7], max_tokens=3))


def test_all_is_kept_exactly(engine):
    session, other = held(engine), held(engine)
    assert compress(engine, session, KVzip(keep=1)) == 96
    assert session.tokens == TEXT
    np.testing.assert_array_equal(session.decode(3), other.decode(3))


def test_stand_ins_are_of_one_text_and_one_way():
    found = [stand_ins(TEXT, KVzip()), stand_ins([*TEXT[:-1], 2], KVzip())]
    found.append(stand_ins(TEXT, KVzip(hint=4)))
    assert all(max(each) < 0 for each in found)
    assert len({tuple(each) for each in found}) == 3


def test_an_interruption_leaves_the_session_as_it_was(engine):
    session, other = held(engine), held(engine)

    def told(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(engine, session, KVzip(chunk=16), told)
    assert session.tokens == TEXT
    np.testing.assert_array_equal(session.decode(3), other.decode(3))


@pytest.mark.parametrize(
    ("how", "why"), [({"attn": "snapkv:budget=64"}, "last queries"), ({"kv_ram": 3 << 20}, "file")]
)
def test_what_cannot_be_compressed_is_refused(engine, tmp_path, how, why):
    session = held(
        engine, **how, **({"kv_dir": tmp_path, "n_ctx": 16384} if "kv_ram" in how else {})
    )
    with pytest.raises(ValueError, match=why):
        compress(engine, session, KVzip())
    assert session.tokens == TEXT


def test_a_method_of_last_queries_refuses_a_compressed_text(engine):
    session = held(engine)
    compress(engine, session, KVzip())
    other = engine.session(n_ctx=192, n_ubatch=32, attn="snapkv:budget=64")
    with pytest.raises(ValueError, match="compressed"):
        other.copy(session)


def test_recurrent_layers_cannot_be_compressed(tmp_path):
    with Engine.load(write_recurrent_model(tmp_path / "m.gguf", "qwen35"), n_threads=1) as engine:
        session = engine.session(n_ctx=192, n_ubatch=32)
        session.prefill(TEXT[:50])
        with pytest.raises(ValueError, match="recurrent"):
            compress(engine, session, KVzip())
