"""Layers with a window may have other heads than the rest: their KV cache is one of its own."""

import numpy as np
import pytest
from kit_models import token_ids, write_kit_model

from tamis.engine.engine import Engine
from tamis.formats.gguf import GGUFError
from tamis.jit_kernels.contract.types import PAGE
from tamis.select.notation import MethodError

N_PROMPT, N_STEP = 70, 20
NAME = "gemma4-wide-dense"  # 4 KV heads of 16 elements in layers with a window, else 1 of 32


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("kit") / "m.gguf"
    engine = Engine.load(write_kit_model(NAME, path), n_threads=2)
    yield engine
    engine.close()


def answers(session):
    """Logits of a prompt's last token and of the steps after it."""
    ids = token_ids(NAME)
    found = [session.prefill(ids[:N_PROMPT])]
    return np.array(found + [session.decode(i) for i in ids[N_PROMPT : N_PROMPT + N_STEP]])


def test_a_layer_takes_what_its_own_heads_need(engine):
    wide, narrow = engine.hp.kinds
    assert (wide.n_head_kv, wide.head_dim) == (1, 32)
    assert (narrow.n_head_kv, narrow.head_dim) == (4, 16)
    elements = 2 * 1 * 32 + 3 * 4 * 16  # of a token's keys in two full layers and three others
    assert engine.memory_plan(4 * PAGE).kv == 2 * 2 * elements * 4 * PAGE


def test_layers_of_one_kind_must_be_alike(tmp_path):
    changed = {"attention.head_count_kv": [4, 2, 1, 4, 1]}
    path = write_kit_model(NAME, tmp_path / "m.gguf", changed)
    with pytest.raises(GGUFError, match="head_count_kv"):
        Engine.load(path)


@pytest.mark.slow
def test_what_is_on_a_disk_gives_the_same_logits(engine, tmp_path):
    expected = answers(engine.session(n_ctx=2048, n_ubatch=32))
    plan = engine.memory_plan(2048, 32)
    session = engine.session(n_ctx=2048, n_ubatch=32, kv_ram=plan.kv * 9 // 10, kv_dir=tmp_path)
    assert session.kv_ram is not None
    np.testing.assert_array_equal(answers(session), expected)
    assert session.kv_counts is not None


@pytest.mark.slow
def test_a_fork_shares_pages_and_a_shorter_one_goes_on(engine):
    one, two = (engine.session(n_ctx=256, n_ubatch=32) for _ in range(2))
    expected = answers(one)
    two.copy(one, N_PROMPT)
    ids = token_ids(NAME)
    found = [two.decode(i) for i in ids[N_PROMPT : N_PROMPT + N_STEP]]
    np.testing.assert_array_equal(found, expected[1:])
    one.truncate(N_PROMPT)
    np.testing.assert_array_equal(one.decode(ids[N_PROMPT]), expected[1])


@pytest.mark.slow
def test_a_method_chooses_in_the_other_layers(engine):
    session = engine.session(n_ctx=256, n_ubatch=32, attn="topk:k=16,recent=8", audit=1)
    answers(session)
    shares = {found.layer: found.n_kept / found.n_seen for found in session.audit.groups()}
    assert [layer for layer, share in shares.items() if share < 1] == [2, 4]
    assert len(session.selected(0).positions) == 4
    assert len(session.selected(2).positions) in (1, 8)


def test_tokens_cannot_be_frozen(engine):
    with pytest.raises(MethodError, match="heads of other widths"):
        engine.session(n_ctx=256, prefill="cpe")
