"""Tokens removed from the middle: later keys are re-rotated, to what float64 makes of them."""

from dataclasses import replace

import numpy as np
import pytest
from method_roles import in_its_roles
from oracle import Oracle, RopeParams, attention, rope
from tier_cases import METHODS, OTHERS, session_of
from tiny_models import TinySpec, write_tiny_model

import tamis.engine.session
from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.types import KV_TYPES, PAGE
from tamis.kv.convert import as_float32, as_rows
from tamis.kv.disk_tier import DiskTier
from tamis.kv.page_store import PageStore
from tamis.kv.paged import PagedKV
from tamis.kv.rerotate import Pairs, close_up
from tamis.kv.types import KVTypes, Tier
from tamis.model.rope import rope_frequencies

N, GONE = 200, range(30, 101)  # of 200 tokens; the page of the first and the second one have both


class Shifting(Oracle):
    """The float64 forward that goes on after a context shift: it keeps keys before RoPE."""

    past: dict

    def attention(self, x, layer):
        """As Oracle's; the kept rows come first, at positions 0 on."""
        p, name = self.p, f"blk.{layer}."
        q, k, v = (
            self.linear(f"{name}attn_{kind}", x).reshape(len(x), n, p.head_dim)
            for kind, n in (("q", p.n_head), ("k", p.n_head_kv), ("v", p.n_head_kv))
        )
        q = self.optional_norm(name + "attn_q_norm", q)
        k = self.optional_norm(name + "attn_k_norm", k)
        if layer in self.past:
            k, v = (np.concatenate(pair) for pair in zip(self.past[layer], (k, v), strict=True))
        self.past[layer] = k, v
        kind, pos = (p.rope_local if p.is_local(layer) else p.rope), np.arange(len(k))
        q, k = rope(q, pos[len(k) - len(q) :], kind), rope(k, pos, kind)
        window = p.n_swa if p.is_local(layer) else 0
        out = attention(q, k, v, scale=p.attn_scale, window=window)
        return self.linear(name + "attn_output", out.reshape(len(x), -1))

    def keys(self, layer):
        """Keys of all tokens that are kept, at their positions."""
        k, _ = self.past[layer]
        return rope(
            k, np.arange(len(k)), self.p.rope_local if self.p.is_local(layer) else self.p.rope
        )

    def remove(self, gone):
        """Drop rows."""
        for layer, pair in self.past.items():
            self.past[layer] = tuple(np.delete(rows, gone, axis=0) for rows in pair)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function that loads a tiny model; all are closed at the end."""
    folder, engines = tmp_path_factory.mktemp("shift"), {}

    def load(spec):
        if spec not in engines:
            path = write_tiny_model(folder / f"{len(engines)}.gguf", spec)
            engines[spec] = Engine.load(path, n_threads=2)
        return engines[spec]

    yield load
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine(load):
    """With the kernels of test_kv_tier."""
    return load(TinySpec("llama", layers=6, n_ctx=64 * PAGE))


def ids_of(n, seed=0):
    return np.random.default_rng(seed).integers(3, 60, n)


def rows_of(session):
    return [session._kv.read(layer, session.n_past) for layer in range(session._loaded.hp.n_layer)]


def check_equal(found, expected):
    for pair, other in zip(found, expected, strict=True):
        for rows, others in zip(pair, other, strict=True):
            np.testing.assert_array_equal(rows, others)


SPECS = [TinySpec(arch) for arch in ("llama", "qwen2", "gemma3")]
SPECS += [TinySpec("llama", rope_scaling=kind) for kind in ("yarn", "llama3")]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.arch}-{spec.rope_scaling}")
def test_after_a_shift_keys_and_logits_are_float64s(load, spec):
    engine, ids = load(spec), ids_of(N)
    oracle = Shifting.from_gguf(engine.path)
    oracle.past = {}
    oracle.logits(ids)
    oracle.remove(GONE)
    session = engine.session(n_ctx=256)
    session.prefill(ids)
    session.remove(GONE.start, GONE.stop)
    assert session.tokens == np.delete(ids, GONE).tolist()
    for layer, (k, _) in enumerate(rows_of(session)):
        expected = oracle.keys(layer)
        # Rounded to float16 before and after the rotation, each half a step of at most 2^-10; pairs
        # of numbers rotate, so a step is one of the longer of the two. The rest is float32's sums.
        assert np.abs(k - expected).max() < 2e-3 * np.abs(expected).max()
    more = ids_of(9, seed=1)
    expected = oracle.logits(more)
    found = np.concatenate(list(session.logits(more[:5])) + [[session.decode(i)] for i in more[5:]])
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("type", KV_TYPES)
def test_keys_of_every_type_turn_and_values_move(engine, type, tiered, neox, tmp_path):
    # The last quarter of a head is not rotated, as in models that state fewer rotary dimensions.
    hp, types = replace(engine.hp, head_dim=64, n_rot=48), KVTypes(type, "f16")
    if tiered:
        kv = DiskTier(hp, 256, types, Tier(1 << 22, tmp_path, 16), 64)
    else:
        kv = PagedKV(hp, 256, PageStore(hp, types, 4))
    x = np.random.default_rng(0).standard_normal((2, N, hp.n_head_kv, 64)).astype(np.float32)
    kv.write(1, as_rows(x[0], type), x[1].astype(np.float16))
    (k, v), n_left = kv.read(1, N), N - len(GONE)
    inv_freq = rope_frequencies(hp, base=1e4, scaling=hp.rope_scaling).inv_freq
    close_up(kv, 1, N, GONE, Pairs(inv_freq, neox))
    new_k, new_v = kv.read(1, n_left)
    np.testing.assert_array_equal(new_v, np.delete(v, GONE, axis=0))
    np.testing.assert_array_equal(new_k[: GONE.start], k[: GONE.start])
    moved = as_float32(k[GONE.stop :]).astype(np.float64)
    params = RopeParams(n_rot=48, base=1e4, neox=neox)
    expected = rope(moved, np.full(len(moved), -len(GONE)), params)
    # Half a step of float16 or q8_0, a whole one of q4_0 (it has -8 and not 8), and the rounding of
    # the scales to float16.
    largest = np.repeat(np.abs(expected.reshape(*expected.shape[:2], 2, 32)).max(-1), 32, axis=-1)
    step = {"f16": 2**-11, "q8_0": 0.5 / 127, "q4_0": 1 / 8}[type] + 2**-11
    assert (np.abs(as_float32(new_k[GONE.start :]) - expected) <= step * largest).all()


def interrupt(patch, owner, name, at):
    """Let a function of a module or an object raise Ctrl-C when it is called the `at`th time."""
    whole, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("at", ["close_up", "recall"])
def test_what_is_interrupted_leaves_the_session_as_it_was(engine, at, monkeypatch):
    ids = ids_of(N)
    session, other = (engine.session(n_ctx=256) for _ in range(2))
    for each in (session, other):
        each.prefill(ids)
    with monkeypatch.context() as patch:
        if at == "close_up":
            interrupt(patch, tamis.engine.session, at, engine.hp.n_layer)
        else:
            interrupt(patch, session, at, 1)
        with pytest.raises(KeyboardInterrupt):
            session.remove(GONE.start, GONE.stop)
    assert session.tokens == ids.tolist()
    check_equal(rows_of(session), rows_of(other))
    np.testing.assert_array_equal(session.decode(7), other.decode(7))


def test_with_a_file_it_is_the_same_but_what_is_interrupted_leaves_whole_pages_before(
    engine, tmp_path, monkeypatch
):
    ids, first = ids_of(900), 2 * PAGE + 9
    tiered, whole = session_of(engine, tmp_path, 72), engine.session(n_ctx=1024, n_ubatch=128)
    for session in (tiered, whole):
        session.prefill(ids)
        session.remove(first, 500)
    np.testing.assert_array_equal(tiered.prefill(ids[:70]), whole.prefill(ids[:70]))
    check_equal(rows_of(tiered), rows_of(whole))
    with monkeypatch.context() as patch:
        interrupt(patch, tamis.engine.session, "close_up", 2)
        with pytest.raises(KeyboardInterrupt) as caught:
            tiered.remove(first, first + 1)
    assert caught.value.__notes__ == [f"the session holds its first {2 * PAGE} tokens only"]
    assert tiered.tokens == whole.tokens[: 2 * PAGE]
    whole.truncate(2 * PAGE)
    np.testing.assert_array_equal(tiered.prefill(ids[:70]), whole.prefill(ids[:70]))


def test_copies_that_share_pages_are_unchanged(engine):
    base, fork = (engine.session(n_ctx=256) for _ in range(2))
    pool = base._kv._store.pool
    base.prefill(ids_of(N))
    rows, n_free = rows_of(base), pool.n_free
    fork.copy(base)
    fork.remove(GONE.start, GONE.stop)
    check_equal(rows_of(base), rows)
    assert pool.n_free == n_free - 3, "129 tokens, in pages of its own"
    base.remove(PAGE, 2 * PAGE)
    fork.copy(base)
    base.remove(PAGE + 3, PAGE + 4)
    assert fork.tokens == np.delete(ids_of(N), range(PAGE, 2 * PAGE)).tolist()
    assert pool.n_free == n_free - 1, "one page that both hold, and two of each"


@pytest.mark.parametrize(("first", "end"), [(-1, 3), (5, 4), (0, 21), (21, 21)])
def test_tokens_that_are_not_there_are_not_removed(engine, first, end):
    session = engine.session(n_ctx=256)
    session.prefill(ids_of(20))
    with pytest.raises(ValueError, match=f"cannot remove tokens {first} to {end} of 20"):
        session.remove(first, end)
    assert session.tokens == ids_of(20).tolist()


def test_an_end_is_cut_off_and_nothing_stays_as_it_is(engine):
    session, other = (engine.session(n_ctx=256) for _ in range(2))
    for each in (session, other):
        each.prefill(ids_of(20))
    session.remove(7, 7)
    check_equal(rows_of(session), rows_of(other))
    session.remove(12, 20)
    other.truncate(12)
    np.testing.assert_array_equal(session.decode(3), other.decode(3))
    session.remove(0, 13)
    assert session.tokens == []


@pytest.mark.parametrize("attn", [*METHODS, *OTHERS])
def test_methods_go_on_as_after_a_reload(engine, tmp_path, attn):
    """Whatever they knew of re-rotated keys is gone."""
    sizes = {"n_ctx": 16 * PAGE, "n_ubatch": 128} | in_its_roles(attn)
    shifted, loaded = (engine.session(**sizes) for _ in range(2))
    ids = ids_of(409)
    shifted.prefill(ids[:397])
    for token in ids[397:400].tolist():
        shifted.decode(token)
    shifted.remove(10, 90)
    shifted.save(tmp_path / "s")
    loaded.load(tmp_path / "s")
    for token in ids[400:].tolist():
        np.testing.assert_array_equal(shifted.decode(token), loaded.decode(token))
    np.testing.assert_array_equal(shifted.prefill(ids[:90]), loaded.prefill(ids[:90]))
