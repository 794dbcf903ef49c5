"""Twilight: top-p of what another method chose, by each head, shared by the heads of a row."""

import numpy as np
import pytest
from stage import Stage
from tiny_models import like_qwen2, write_tiny_model

from tamis.engine.engine import Engine
from tamis.select.notation import parse_method
from tamis.select.twilight import kept, threshold

HEADS, GROUP, HEAD_DIM, N_KV = 6, 3, 16, 300  # two KV heads
N_PROMPT, N_STEP = 400, 6
INNER = [
    "topk:k=60,sink=3,recent=9",
    "topk:k=60,sink=3,recent=9,rows=head",
    "quest:budget=96,page=8,dense=0,sink=4,recent=8",
    "dense",
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("twilight") / "m.gguf"
    engine = Engine.load(write_tiny_model(path, like_qwen2("qwen2")), n_threads=2)
    yield engine
    engine.close()


def decoded(engine, attn, **options):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, engine.hp.n_vocab, N_PROMPT + N_STEP).tolist()
    session = engine.session(n_ctx=512, attn=attn, **options)
    session.prefill(ids[:N_PROMPT])
    return session, np.array([session.decode(token) for token in ids[N_PROMPT:]])


def test_all_of_the_mass_is_every_key():
    weights = np.array([1.0, 0.5, 1e-30, 0.0])
    assert threshold(weights, 1.0) == 0
    assert 0 < threshold(weights, 0.999) <= 0.5


@pytest.mark.parametrize("p", [0.5, 0.95])
@pytest.mark.parametrize("inner", INNER)
def test_a_row_keeps_what_any_of_its_heads_needs(inner, p):
    rng = np.random.default_rng(5)
    k = rng.standard_normal((2, N_KV, HEAD_DIM)).astype(np.float16)
    q = 2 * rng.standard_normal((HEADS, HEAD_DIM)).astype(np.float32)
    both = [Stage(text, k, k, n_head=HEADS).decode(q, N_KV - 1).kept
            for text in (inner, f"twilight({inner}):p={p}")]  # fmt: skip
    size = 1 if getattr(parse_method(inner), "rows", "group") == "head" else GROUP
    for first in range(0, HEADS, size):
        at = np.flatnonzero(both[0][first])
        heads = slice(first, first + size)
        logits = q[heads].astype(float) @ k[first // GROUP, at].astype(float).T / HEAD_DIM**0.5
        for row in both[1][heads]:
            np.testing.assert_array_equal(np.flatnonzero(row), at[kept(logits, p)])


def test_fewer_positions_are_read_and_the_output_stays_near(engine):
    counts, logits = [], []
    for attn in ("quest:budget=256,dense=0", "twilight(quest:budget=256,dense=0):p=0.9"):
        session, found = decoded(engine, attn)
        counts.append([len(row) for i in range(engine.hp.n_layer)
                       for row in session.selected(i).positions])  # fmt: skip
        logits.append(found)
    assert (np.array(counts[1]) <= counts[0]).all()
    assert np.mean(counts[1]) < 0.95 * np.mean(counts[0])
    assert np.abs(logits[1] - logits[0]).max() < 0.2 * np.abs(logits[0]).max()


@pytest.mark.parametrize("inner", ["window:recent=32", "magicpig:K=3,L=6,dense=0,recent=8"])
def test_with_all_of_the_weight_nothing_changes(engine, inner):
    found = [decoded(engine, attn)[1] for attn in (inner, f"twilight({inner}):p=1")]
    np.testing.assert_allclose(*found, rtol=0, atol=2e-5)


def test_layers_that_are_dense_stay_so(engine):
    attn = "twilight(quest:budget=96,dense_layers=1):p=0.5"
    session, _ = decoded(engine, attn)
    sizes = [[len(row) for row in session.selected(i).positions] for i in (0, 1)]
    assert set(sizes[0]) == {session.n_past}
    assert max(sizes[1]) <= 96


def test_a_run_repeats_to_the_bit_in_memory_and_on_disk(engine, tmp_path):
    attn = "twilight(topk:k=24,rows=head):p=0.8"
    _, first = decoded(engine, attn)
    _, from_file = decoded(engine, attn, kv_ram=1 << 20, kv_dir=tmp_path)
    np.testing.assert_array_equal(first, from_file)
