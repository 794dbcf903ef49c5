"""The flat API: llama.h's functions give the engine's numbers, and whatever is wrong is a code."""

import ctypes
import inspect
import math
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tamis.bindings.llama as L
from tamis.bindings.flat.context import Context
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.params import TOKEN_DATA
from tamis.bindings.flat.status import LLAMA_INTERNAL
from tamis.engine.engine import Engine

TEXT = b"the hand over there is of an other"


@pytest.fixture(autouse=True)
def quiet():
    """The log is read where a test asks for it, and goes nowhere else."""
    lines = []
    L.llama_log_set(lambda level, text, data: lines.append((level, text)), None)
    yield lines
    L.llama_log_set(None, None)


@pytest.fixture(scope="module")
def model(path):
    handle = L.llama_model_load_from_file(str(path).encode(), L.llama_model_default_params())
    assert handle
    yield handle
    assert L.llama_model_free(handle) == L.LLAMA_OK


@pytest.fixture
def new_context(model):
    """A function that makes contexts, which are freed after the test."""
    made = []

    def make(**settings):
        params = L.llama_context_default_params()
        for name, value in settings.items():
            setattr(params, name, value)
        made.append(L.llama_init_from_model(model, params))
        return made[-1]

    yield make
    for handle in made:
        L.llama_free(handle)


def tokens_of(model, text=TEXT):
    buffer = np.zeros(64, np.int32)
    vocab = L.llama_model_get_vocab(model)
    n = L.llama_tokenize(vocab, text, len(text), buffer, len(buffer), True, False)
    assert n > 0
    return buffer[:n]


def batch_of(entries):
    """A batch of (token, pos, seqs, wants logits)."""
    batch = L.llama_batch_init(len(entries), 0, 4)
    batch.n_tokens = len(entries)
    for i, (token, pos, seqs, wanted) in enumerate(entries):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, pos, len(seqs)
        batch.seq_id[i, : len(seqs)], batch.logits[i] = seqs, wanted
    return batch


def decode(ctx, ids):
    ids = np.asarray(ids, np.int32)
    return L.llama_decode(ctx, L.llama_batch_get_one(ids, len(ids)))


def pos_max(ctx, seq=0):
    return L.llama_memory_seq_pos_max(L.llama_get_memory(ctx), seq)


@pytest.fixture(scope="module")
def reference(path, model):
    """Logits of the text's tokens, each, and ten greedy tokens after it, from a Session."""
    engine = Engine.load(path)
    session = engine.session(n_ctx=128)
    ids = tokens_of(model)
    rows = np.concatenate(list(session.logits(ids)))
    greedy, row = [], rows[-1]
    for _ in range(10):
        greedy.append(int(row.argmax()))
        row = session.decode(greedy[-1])
    engine.close()
    return rows, greedy


def test_a_program_written_for_llama_h_generates_the_engines_text(model, new_context, reference):
    ctx = new_context(n_ctx=128)
    chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
    assert L.llama_sampler_chain_add(chain, L.llama_sampler_init_top_k(40)) == L.LLAMA_OK
    assert L.llama_sampler_chain_add(chain, L.llama_sampler_init_greedy()) == L.LLAMA_OK
    assert L.llama_sampler_chain_n(chain) == 2
    assert decode(ctx, tokens_of(model)) == L.LLAMA_OK
    found = []
    for _ in range(10):
        found.append(L.llama_sampler_sample(chain, ctx, -1))
        assert decode(ctx, found[-1:]) == L.LLAMA_OK
    assert found == reference[1]
    perf = L.llama_perf_context(ctx)
    assert (perf.n_p_eval, perf.n_eval) == (len(tokens_of(model)), 10)
    assert L.llama_sampler_free(chain) == L.LLAMA_OK


def test_logits_of_any_position_are_the_engines(model, new_context, reference):
    ctx, ids = new_context(n_ctx=128), tokens_of(model)
    wanted = [0, 3, len(ids) - 1]
    batch = batch_of([(t, i, [0], i in wanted) for i, t in enumerate(ids)])
    assert L.llama_decode(ctx, batch) == L.LLAMA_OK
    np.testing.assert_array_equal(L.llama_get_logits(ctx), reference[0][wanted])
    np.testing.assert_array_equal(L.llama_get_logits_ith(ctx, 3), reference[0][3])
    np.testing.assert_array_equal(L.llama_get_logits_ith(ctx, -1), reference[0][-1])
    assert L.llama_get_logits_ith(ctx, 1) is None
    assert L.llama_get_logits_ith(ctx, -4) is None
    assert L.llama_batch_free(batch) == L.LLAMA_OK
    assert L.llama_batch_free(batch) == L.LLAMA_INVALID


def test_sequences_of_one_batch_do_not_see_each_other(model, new_context, reference):
    ctx, ids = new_context(n_ctx=256, n_seq_max=2), tokens_of(model)
    others = ids[::-1]
    entries = [(t, i, [0], True) for i, t in enumerate(ids)]
    entries += [(t, i, [1], True) for i, t in enumerate(others)]
    assert L.llama_decode(ctx, batch_of(entries)) == L.LLAMA_OK
    np.testing.assert_array_equal(L.llama_get_logits(ctx)[: len(ids)], reference[0])
    assert pos_max(ctx, 0) == pos_max(ctx, 1) == len(ids) - 1


def test_a_token_of_two_sequences_is_held_by_both(model, new_context, reference):
    ctx, ids = new_context(n_ctx=256, n_seq_max=2), tokens_of(model)
    assert L.llama_decode(ctx, batch_of([(t, i, [0, 1], 0) for i, t in enumerate(ids[:-1])])) == 0
    last = len(ids) - 1
    for seq in (0, 1):
        assert L.llama_decode(ctx, batch_of([(ids[-1], last, [seq], 1)])) == L.LLAMA_OK
        # One token at a time goes through other kernels than a chunk: near, not the same bits.
        np.testing.assert_allclose(L.llama_get_logits_ith(ctx, 0), reference[0][-1], atol=2e-3)


def test_sequences_with_a_token_each_are_stepped_together(model, new_context, reference):
    ids = tokens_of(model)
    others, last, rows = ids[::-1], len(ids) - 1, []
    for seqs in ([0], [1], [0, 1]):
        ctx = new_context(n_ctx=256, n_seq_max=2)
        first = [(t, i, [s], 0) for s in seqs for i, t in enumerate((ids, others)[s][:-1])]
        assert L.llama_decode(ctx, batch_of(first)) == L.LLAMA_OK
        step = [((ids, others)[s][-1], last, [s], 1) for s in seqs]
        assert L.llama_decode(ctx, batch_of(step)) == L.LLAMA_OK
        rows.append(L.llama_get_logits(ctx))
        assert [pos_max(ctx, seq) for seq in seqs] == [last] * len(seqs)
    np.testing.assert_allclose(rows[2], np.concatenate(rows[:2]), atol=1e-4)


def test_memory_is_cut_copied_and_kept(model, new_context, reference):
    ctx, ids = new_context(n_ctx=256, n_seq_max=2), tokens_of(model)
    mem, n = L.llama_get_memory(ctx), len(ids)
    assert L.llama_memory_seq_pos_min(mem, 0) == pos_max(ctx) == -1
    assert decode(ctx, ids) == L.LLAMA_OK
    assert L.llama_memory_seq_cp(mem, 0, 1, -1, -1) == L.LLAMA_OK
    assert L.llama_memory_seq_rm(mem, 0, 4, -1)
    assert (pos_max(ctx, 0), pos_max(ctx, 1)) == (3, n - 1)
    assert decode(ctx, ids[4:]) == L.LLAMA_OK
    # Chunks of up to 16 tokens are multiplied another way than longer ones.
    np.testing.assert_allclose(L.llama_get_logits_ith(ctx, -1), reference[0][-1], rtol=0, atol=1e-4)
    assert L.tamis_memory_stats(ctx).n_tokens == 2 * n
    assert L.llama_memory_seq_keep(mem, 1) == L.LLAMA_OK
    assert (pos_max(ctx, 0), pos_max(ctx, 1)) == (-1, n - 1)
    assert L.llama_memory_clear(mem, True) == L.LLAMA_OK
    assert pos_max(ctx, 1) == -1


def test_what_memory_cannot_do_is_said_and_changes_nothing(model, new_context):
    ctx = new_context(n_ctx=256, n_seq_max=2)
    mem, ids = L.llama_get_memory(ctx), tokens_of(model)
    assert decode(ctx, ids) == L.LLAMA_OK
    assert L.llama_memory_seq_rm(mem, 1, 0, 3), "a sequence without tokens has nothing to lose"
    for delta in (1, -1):
        assert L.llama_memory_seq_add(mem, 0, 2, -1, delta) == L.LLAMA_UNSUPPORTED
    assert b"it has no gap to close" in L.tamis_last_error()[1]
    assert L.llama_memory_seq_add(mem, 0, 2, -1, 0) == L.LLAMA_OK
    assert L.llama_memory_seq_div(mem, 0, 0, -1, 2) == L.LLAMA_UNSUPPORTED
    assert L.llama_memory_seq_cp(mem, 0, 1, 2, -1) == L.LLAMA_UNSUPPORTED
    assert pos_max(ctx) == len(ids) - 1


def shift(ctx, n_keep, n_discard, n_past):
    """The context shift of programs written for llama.h; how many tokens there are after it."""
    mem = L.llama_get_memory(ctx)
    assert L.llama_memory_can_shift(mem)
    assert L.llama_memory_seq_rm(mem, 0, n_keep, n_keep + n_discard)
    args = (mem, 0, n_keep + n_discard, n_past, -n_discard)
    assert L.llama_memory_seq_add(*args) == L.LLAMA_OK
    return n_past - n_discard


def test_a_context_shift_gives_the_engines_text(path, model, new_context):
    ctx, ids = new_context(n_ctx=128), tokens_of(model)
    assert decode(ctx, ids) == L.LLAMA_OK
    assert shift(ctx, 2, 5, len(ids)) == len(ids) - 5 == pos_max(ctx) + 1
    engine = Engine.load(path)
    session = engine.session(n_ctx=128)
    session.prefill(ids)
    session.remove(2, 7)
    for token in ids:
        assert decode(ctx, [token]) == L.LLAMA_OK
        logits = L.llama_get_logits_ith(ctx, -1)
        np.testing.assert_array_equal(logits, session.decode(int(token)))
    engine.close()


@pytest.mark.parametrize("n_keep", [0, 4])
def test_a_program_that_shifts_generates_without_end(model, new_context, n_keep):
    ctx, ids = new_context(n_ctx=32), tokens_of(model)
    assert decode(ctx, ids) == L.LLAMA_OK
    n_past = len(ids)
    for _ in range(3 * 32):
        if n_past == 32:
            n_past = shift(ctx, n_keep, (n_past - n_keep) // 2, n_past)
        token = L.llama_get_logits_ith(ctx, -1).argmax()
        batch = batch_of([(token, n_past, [0], 1)])
        assert L.llama_decode(ctx, batch) == L.LLAMA_OK
        n_past += 1
        assert pos_max(ctx) == n_past - 1


def test_a_gap_is_closed_or_cut_off_before_a_sequence_goes_on(model, new_context):
    ctx, ids = new_context(n_ctx=256, n_seq_max=2), tokens_of(model)
    mem, n = L.llama_get_memory(ctx), len(ids)
    assert decode(ctx, ids) == L.LLAMA_OK
    assert L.llama_memory_seq_rm(mem, 0, 3, 5)
    assert (L.llama_memory_seq_pos_min(mem, 0), pos_max(ctx)) == (0, n - 1)
    assert L.tamis_memory_stats(ctx).n_tokens == n - 2
    assert decode(ctx, ids[:1]) == L.LLAMA_INVALID
    remedy = f"lacks positions 3 to 4: close the gap with llama_memory_seq_add(mem, 0, 5, {n}, -2)"
    assert remedy.encode() in L.tamis_last_error()[1]
    assert L.llama_memory_seq_cp(mem, 0, 1, 0, -1) == L.LLAMA_INVALID
    assert L.llama_state_get_size(ctx) == 0
    assert not L.llama_memory_seq_rm(mem, 0, 6, 7), "two gaps"
    for args in ((5, n, -1), (5, n, 2), (6, n, -2), (2, n, -2), (5, n - 1, -2)):
        assert L.llama_memory_seq_add(mem, 0, *args) == L.LLAMA_UNSUPPORTED, args
    assert f"only 5 to {n - 1} by -2".encode() in L.tamis_last_error()[1]
    assert L.llama_memory_seq_cp(mem, 0, 1, 0, 3) == L.LLAMA_OK, "what is before the gap"
    assert pos_max(ctx, 1) == 2
    assert L.llama_memory_seq_rm(mem, 0, 0, 3), "a gap that grows"
    assert L.llama_memory_seq_pos_min(mem, 0) == 5
    assert L.llama_memory_seq_rm(mem, 0, 7, -1), "an end after a gap"
    assert L.llama_memory_seq_add(mem, 0, 0, 7, -5) == L.LLAMA_OK
    assert pos_max(ctx) == 1
    assert L.llama_memory_seq_rm(mem, 0, 0, 1)
    assert L.llama_memory_seq_rm(mem, 0, 1, -1)
    assert L.llama_memory_seq_pos_min(mem, 0) == pos_max(ctx) == -1
    assert decode(ctx, ids) == L.LLAMA_OK
    assert L.llama_memory_seq_rm(mem, 0, 1, 2)
    assert L.llama_memory_clear(mem, True) == L.LLAMA_OK
    assert decode(ctx, ids) == L.LLAMA_OK


def test_a_batch_that_is_wrong_leaves_the_context_as_it_was(model, new_context):
    ctx, ids = new_context(n_ctx=32, n_batch=24), tokens_of(model)
    assert decode(ctx, ids) == L.LLAMA_OK
    n = len(ids)
    n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
    wrong = {
        "no tokens": L.llama_batch_get_one(ids, 0),
        "fewer than it says": L.llama_batch_get_one(ids[:2], 3),
        "more than n_batch": L.llama_batch_get_one(np.zeros(25, np.int32), 25),
        "no such token": L.llama_batch_get_one(np.array([n_vocab], np.int32), 1),
        "a negative token": L.llama_batch_get_one(np.array([-1], np.int32), 1),
        "a gap in positions": batch_of([(1, n + 1, [0], 1)]),
        "no such sequence": batch_of([(1, 0, [1], 1)]),
        "no batch": 7,
    }
    for name, batch in wrong.items():
        assert L.llama_decode(ctx, batch) == L.LLAMA_INVALID, name
    full = L.llama_batch_get_one(np.zeros(24, np.int32), 24)
    assert L.llama_decode(ctx, full) == L.LLAMA_NO_KV_SLOT
    assert pos_max(ctx) == n - 1
    code, text = L.tamis_last_error()
    assert code == L.LLAMA_NO_KV_SLOT
    assert b"raise n_ctx" in text


def test_an_aborted_batch_leaves_nothing_of_any_sequence(model, new_context, reference):
    ctx, ids = new_context(n_ctx=256, n_seq_max=2, n_ubatch=6), tokens_of(model)
    calls = []
    L.llama_set_abort_callback(ctx, lambda data: calls.append(data) or len(calls) > 6, "data")
    entries = [(t, i, [s], 0) for s in (0, 1) for i, t in enumerate(ids)]
    assert L.llama_decode(ctx, batch_of(entries)) == L.LLAMA_ABORTED
    assert calls[0] == "data"
    assert pos_max(ctx, 0) == pos_max(ctx, 1) == -1
    assert L.llama_get_logits(ctx) is None
    L.llama_set_abort_callback(ctx, None, None)
    seen = []
    L.tamis_set_progress_callback(ctx, lambda done, total, data: seen.append((done, total)), None)
    assert decode(ctx, ids) == L.LLAMA_OK
    # Chunks of up to 16 tokens are multiplied another way than longer ones.
    np.testing.assert_allclose(L.llama_get_logits_ith(ctx, -1), reference[0][-1], rtol=0, atol=1e-4)
    assert seen[0] == (6, len(ids))
    assert seen[-1] == (len(ids), len(ids))


def test_a_callback_cannot_pull_the_context_from_under_its_call(model, new_context, reference):
    ctx, ids, codes = new_context(n_ctx=256), tokens_of(model), []

    def meddle(data):
        codes.extend((L.llama_free(ctx), decode(ctx, [1])))
        codes.append(L.llama_memory_clear(ctx, True))

    L.llama_set_abort_callback(ctx, meddle, None)
    assert decode(ctx, ids) == L.LLAMA_OK
    assert set(codes) == {L.LLAMA_INVALID}
    np.testing.assert_array_equal(L.llama_get_logits_ith(ctx, -1), reference[0][-1])


def test_handles_that_were_freed_or_are_of_another_kind_are_errors(path):
    model = L.llama_model_load_from_file(str(path), L.llama_model_default_params())
    ctx = L.llama_init_from_model(model, L.llama_context_default_params())
    vocab, mem = L.llama_model_get_vocab(model), L.llama_get_memory(ctx)
    assert L.llama_get_model(ctx) == model
    assert L.llama_n_ctx(model) == 0
    assert L.llama_model_n_embd(ctx) == -1
    assert L.llama_model_free(model) == L.LLAMA_OK
    assert L.llama_model_free(model) == L.LLAMA_INVALID
    assert L.llama_vocab_n_tokens(vocab) == 0
    assert decode(ctx, [1, 2, 3]) == L.LLAMA_OK, "a context keeps what it needs of its model"
    assert L.llama_free(ctx) == L.LLAMA_OK
    assert L.llama_free(ctx) == L.LLAMA_INVALID
    assert L.llama_memory_clear(mem, True) == L.LLAMA_INVALID
    again = L.llama_sampler_init_greedy()
    assert again not in (model, ctx, vocab, mem), "a place that is used again has a new handle"
    assert L.llama_sampler_free(again) == L.LLAMA_OK
    assert L.llama_sampler_free(again) == L.LLAMA_INVALID


def test_a_file_that_is_no_model_gives_no_handle(tmp_path, quiet):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    for name in (str(bad), str(tmp_path / "none.gguf").encode(), b"\0", 7):
        assert L.llama_model_load_from_file(name, L.llama_model_default_params()) == 0
    assert b"bad.gguf" in quiet[0][1]


def test_loading_ends_where_the_progress_callback_says_so(path):
    params = L.llama_model_default_params()
    params.progress_callback = lambda share, data: share < 0.5
    assert L.llama_model_load_from_file(str(path), params) == 0
    assert L.tamis_last_error()[0] == L.LLAMA_ABORTED


def test_states_come_back_and_damaged_ones_change_nothing(model, new_context, reference, tmp_path):
    ids, ctx = tokens_of(model), new_context(n_ctx=256, n_seq_max=2)
    decode(ctx, ids[:-1])
    L.llama_memory_seq_cp(L.llama_get_memory(ctx), 0, 1, -1, -1)
    size = L.llama_state_get_size(ctx)
    data = np.zeros(size, np.uint8)
    assert L.llama_state_get_data(ctx, data, size - 1) == 0
    assert L.llama_state_get_data(ctx, data, size) == size
    file = tmp_path / "state"
    assert L.llama_state_save_file(ctx, str(file), ids, len(ids))
    assert [f.name for f in tmp_path.iterdir()] == ["state"]

    other = new_context(n_ctx=256, n_seq_max=2)
    for place in (0, 12, size // 2, size - 1):
        broken = data.copy()
        broken[place] ^= 1
        assert L.llama_state_set_data(other, broken, size) == 0
    assert L.llama_state_set_data(other, data, size - 1) == 0
    assert pos_max(other) == -1
    assert L.llama_state_set_data(other, data, size) == size
    assert pos_max(other, 0) == pos_max(other, 1) == len(ids) - 2

    found, n = np.zeros(64, np.int32), ctypes.c_size_t()
    assert not L.llama_state_load_file(other, str(file), found, 3, n)
    assert L.llama_state_load_file(other, str(file), found, 64, n)
    assert found[: n.value].tolist() == ids.tolist()
    for seq in (0, 1):
        L.llama_decode(other, batch_of([(ids[-1], len(ids) - 1, [seq], 1)]))
        np.testing.assert_allclose(L.llama_get_logits_ith(other, 0), reference[0][-1], atol=2e-3)


def test_the_state_of_one_sequence_goes_to_another(model, new_context, tmp_path):
    ids, ctx = tokens_of(model), new_context(n_ctx=256, n_seq_max=2)
    decode(ctx, ids)
    data = np.zeros(L.llama_state_seq_get_size(ctx, 0), np.uint8)
    assert L.llama_state_seq_get_data(ctx, data, len(data), 0) == len(data)
    assert L.llama_state_seq_set_data(ctx, data, len(data), 1) == len(data)
    assert pos_max(ctx, 1) == len(ids) - 1
    assert L.llama_state_seq_set_data(ctx, data, len(data), 2) == 0
    file = str(tmp_path / "one")
    assert L.llama_state_seq_save_file(ctx, file, 1, None, 0) > 0
    L.llama_memory_clear(L.llama_get_memory(ctx), True)
    n = np.zeros(1, np.uint64)
    assert L.llama_state_seq_load_file(ctx, file, 0, None, 0, n) > 0
    assert pos_max(ctx) == len(ids) - 1


def test_another_method_resumes_after_the_same_tokens(model, new_context):
    ctx, ids = new_context(n_ctx=512, audit=1), np.arange(250, dtype=np.int32) % 90
    assert L.tamis_attn_stats(ctx, 0) is None
    decode(ctx, ids)
    assert L.tamis_set_attn_policy(ctx, "no such method", "dense") == L.LLAMA_FAILED
    assert L.tamis_set_attn_policy(ctx, "window:sink=4,recent=64", "dense") == L.LLAMA_OK
    assert pos_max(ctx) == len(ids) - 1
    assert decode(ctx, [7]) == L.LLAMA_OK
    stats = L.tamis_attn_stats(ctx, 0)
    assert stats.n_kept < stats.n_seen == len(ids) + 1


def test_the_memory_plan_grows_with_context_and_sequences(model):
    params = L.llama_context_default_params()
    params.n_ctx = 4096
    one = L.tamis_memory_plan(model, params)
    params.n_ctx, params.n_seq_max = 8192, 2
    assert L.tamis_memory_plan(model, params).kv == 2 * one.kv
    params.type_k = 3
    assert L.tamis_memory_plan(model, params) is None


@pytest.mark.parametrize("pooling", [L.LLAMA_POOLING_TYPE_MEAN, L.LLAMA_POOLING_TYPE_LAST])
def test_embeddings_are_what_the_head_reads(model, new_context, path, pooling):
    ids = tokens_of(model)
    ctx = new_context(n_ctx=128, embeddings=True, pooling_type=pooling)
    assert decode(ctx, ids) == L.LLAMA_OK
    rows = L.llama_get_embeddings(ctx)
    assert rows.shape == (len(ids), L.llama_model_n_embd(model))
    pooled = rows.mean(axis=0) if pooling == L.LLAMA_POOLING_TYPE_MEAN else rows[-1]
    np.testing.assert_allclose(L.llama_get_embeddings_seq(ctx, 0), pooled, rtol=1e-5, atol=1e-6)
    assert L.llama_get_logits(ctx) is None
    L.llama_set_embeddings(ctx, False)
    engine = Engine.load(path)
    head = engine.model.weights.output.matrix()
    engine.close()
    logits = rows[-1].astype(np.float64) @ head.data.view("<f4").reshape(head.n_out, -1).T
    L.llama_memory_clear(L.llama_get_memory(ctx), True)
    decode(ctx, ids)
    np.testing.assert_allclose(L.llama_get_logits_ith(ctx, -1), logits, atol=2e-3)


def test_text_and_tokens_through_buffers_of_every_kind(model):
    vocab, ids = L.llama_model_get_vocab(model), tokens_of(model)
    small = np.zeros(2, np.int32)
    assert L.llama_tokenize(vocab, TEXT, -1, small, 2, True, False) == -len(ids)
    by_ctypes = (L.llama_token * 64)()
    n = L.llama_tokenize(vocab, TEXT, ctypes.c_int(len(TEXT)), by_ctypes, 64, True, False)
    assert list(by_ctypes)[:n] == ids.tolist()
    for buffer in (bytearray(64), np.zeros(64, np.uint8), ctypes.create_string_buffer(64)):
        assert L.llama_detokenize(vocab, ids, len(ids), buffer, 64, True, False) == len(TEXT)
        assert bytes(memoryview(buffer).tobytes())[: len(TEXT)] == TEXT
    assert L.llama_detokenize(vocab, ids, len(ids), bytes(64), 64, True, False) == -(1 << 31)
    assert L.llama_detokenize(vocab, ids, len(ids), bytearray(3), 3, True, False) == -len(TEXT)
    pieces = bytearray(16)
    n = L.llama_token_to_piece(vocab, int(ids[1]), pieces, 16, 0, False)
    assert pieces[:n] in TEXT
    assert L.llama_vocab_is_eog(vocab, L.llama_vocab_eos(vocab))
    assert L.llama_vocab_fim_pre(vocab) == L.LLAMA_TOKEN_NULL


def test_the_files_template_makes_the_text_of_a_chat(model):
    template = L.llama_model_chat_template(model, None)
    chat = [L.llama_chat_message(b"user", "hi")]
    buffer = bytearray(64)
    n = L.llama_chat_apply_template(template, chat, 1, True, buffer, 64)
    expected = b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert buffer[:n] == expected
    assert L.llama_chat_apply_template(None, chat, 1, True, None, 0) == len(expected)
    assert L.llama_chat_apply_template(b"{{ ''.__class__ }}", chat, 1, True, None, 0) == -(1 << 31)


def test_metadata_is_read_by_key_and_by_place(model):
    buffer = bytearray(64)
    n = L.llama_model_meta_val_str(model, b"general.architecture", buffer, 64)
    assert buffer[: n + 1] == b"llama\0"
    assert L.llama_model_meta_val_str(model, b"none", buffer, 64) == -1
    count = L.llama_model_meta_count(model)
    keys = []
    for i in range(count):
        n = L.llama_model_meta_key_by_index(model, i, buffer, 64)
        keys.append(bytes(buffer[: min(n, 63)]))
        assert L.llama_model_meta_val_str_by_index(model, i, None, 0) >= 0
    assert b"general.architecture" in keys
    assert L.llama_model_meta_key_by_index(model, count, buffer, 64) == -1
    assert L.llama_model_desc(model, buffer, 64) > 0
    assert L.llama_model_n_params(model) * 4 == L.llama_model_size(model)


def test_samplers_change_candidates_as_their_names_say():
    data = np.zeros(4, TOKEN_DATA)
    data["id"], data["logit"] = range(4), [0.0, 3.0, 1.0, 2.0]
    array = L.llama_token_data_array(data, 4)
    top = L.llama_sampler_init_top_k(2)
    assert L.llama_sampler_apply(top, array) == L.LLAMA_OK
    assert array.data["id"].tolist() == [1, 3]
    assert array.selected == -1
    assert array.data["p"].sum() == pytest.approx(1)
    bias = L.llama_sampler_init_logit_bias(4, 1, [L.llama_logit_bias(3, 10.0)])
    L.llama_sampler_apply(bias, array)
    greedy = L.llama_sampler_init_greedy()
    L.llama_sampler_apply(greedy, array)
    assert array.data["id"][array.selected] == 3
    for handle in (top, bias, greedy):
        L.llama_sampler_free(handle)


def test_a_clone_goes_on_with_the_same_random_numbers(model, new_context):
    ctx = new_context(n_ctx=128)
    decode(ctx, tokens_of(model))
    one = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
    L.llama_sampler_chain_add(one, L.llama_sampler_init_penalties(64, 1.1, 0.1, 0.0))
    L.llama_sampler_chain_add(one, L.llama_sampler_init_temp(2.0))
    L.llama_sampler_chain_add(one, L.llama_sampler_init_dist(7))
    L.llama_sampler_sample(one, ctx, -1)
    two = L.llama_sampler_clone(one)
    drawn = [[L.llama_sampler_sample(s, ctx, -1) for _ in range(8)] for s in (one, two)]
    assert drawn[0] == drawn[1]
    assert L.llama_sampler_get_seed(two) == 7
    L.llama_sampler_reset(one)
    L.llama_sampler_chain_remove(one, 2)
    assert L.llama_sampler_sample(one, ctx, -1) == L.LLAMA_TOKEN_NULL


def test_sampling_parameters_out_of_range_give_no_sampler():
    assert L.llama_sampler_init_top_p(2.0, 1) == 0
    assert L.llama_sampler_init_temp(math.nan) == 0
    assert L.llama_sampler_init_dist(-1) == 0
    assert L.llama_sampler_init_penalties(-2, 1.0, 0.0, 0.0) == 0


def test_threads_may_share_a_context(model, new_context, reference):
    """Each keeps to its sequence; the calls run one after another."""
    ctx, ids = new_context(n_ctx=512, n_seq_max=4), tokens_of(model)
    codes = []

    def work(seq):
        for i, token in enumerate(ids):
            codes.append(L.llama_decode(ctx, batch_of([(token, i, [seq], 0)])))

    threads = [threading.Thread(target=work, args=(seq,)) for seq in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) == {L.LLAMA_OK}
    assert {pos_max(ctx, seq) for seq in range(4)} == {len(ids) - 1}


def test_a_context_may_be_freed_while_another_thread_uses_it(model, new_context):
    ctx, codes = new_context(n_ctx=512), []

    def work():
        while (code := decode(ctx, [1])) == L.LLAMA_OK:
            pass
        codes.append(code)

    thread = threading.Thread(target=work)
    thread.start()
    while pos_max(ctx) < 3:
        pass
    assert L.llama_free(ctx) == L.LLAMA_OK
    thread.join()
    assert codes == [L.LLAMA_INVALID]


# --- anything at all -----------------------------------------------------------------------------

FUNCTIONS = sorted(
    name
    for name in L.__all__
    if inspect.isfunction(getattr(L, name)) and name not in ("llama_log_set", "tamis_last_error")
)
NUMBERS = st.one_of(
    st.integers(-(1 << 65), 1 << 65),
    st.integers(-3, 9),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.5, -1.0, (1 << 31) - 1, -(1 << 31)]),
)


def things(model, ctx):
    """Live handles and every kind of record and buffer, small and wrong ones among them."""
    return [
        *(lambda: model, lambda: ctx, lambda: L.llama_model_get_vocab(model)),
        *(lambda: L.llama_get_memory(ctx), L.llama_sampler_init_greedy),
        lambda: L.llama_sampler_chain_init(L.llama_sampler_chain_default_params()),
        *(L.llama_context_default_params, L.llama_model_default_params),
        *(lambda: L.llama_batch_init(4, 0, 1), lambda: L.llama_batch_get_one([1, 2], 2)),
        *(lambda: np.zeros(8, np.int32), lambda: np.zeros(8, np.float64), lambda: bytearray(8)),
        *(lambda: b"the", lambda: "the", lambda: b"\xff", lambda: None, lambda: True),
        *(lambda: [L.llama_chat_message("user", "x")], lambda: [1, "x"], dict, object),
    ]


# Of parameters that are handles and records: which of the things is right.
KINDS = {"model": 0, "ctx": 1, "vocab": 2, "mem": 3, "smpl": 4, "chain": 5, "batch": 8}
ARGUMENTS = st.lists(st.one_of(NUMBERS, st.integers(0, 19).map(lambda i: ("thing", i))), max_size=8)
CALLS = st.tuples(st.sampled_from(FUNCTIONS), ARGUMENTS, st.booleans())


@settings(
    max_examples=40,  # of at least 25 calls: 1,000
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(calls=st.lists(CALLS, min_size=25))
def test_any_arguments_give_codes_and_later_calls_are_right(
    calls, path, reference, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # some of the arguments are names of files
    model = _FUZZED.setdefault("model", None) or _load(path)
    ctx = L.llama_init_from_model(model, L.llama_context_default_params())
    if not ctx:  # an earlier example has freed the model, as it may
        model = _load(path)
        ctx = L.llama_init_from_model(model, L.llama_context_default_params())
    made = things(model, ctx)
    for name, drawn, right_kinds in calls:
        function = getattr(L, name)
        drawn = [made[a[1]]() if isinstance(a, tuple) else a for a in drawn]
        names = list(inspect.signature(function).parameters)
        arguments = (drawn + [0] * len(names))[: len(names)]
        if right_kinds:
            for i, parameter in enumerate(names):
                arguments[i] = made[KINDS[parameter]]() if parameter in KINDS else arguments[i]
        before = L.tamis_last_error()
        function(*arguments)
        after = L.tamis_last_error()
        assert after is before or after[0] != LLAMA_INTERNAL, (name, arguments, after)
    L.llama_free(ctx)
    check = _FUZZED["check"]
    L.llama_memory_clear(L.llama_get_memory(check), True)
    assert decode(check, _FUZZED["ids"]) == L.LLAMA_OK
    np.testing.assert_array_equal(L.llama_get_logits_ith(check, -1), reference[0][-1])


PLACES = st.integers(-1, 12)
CHANGES = st.one_of(
    st.tuples(st.just("rm"), st.integers(-1, 1), PLACES, PLACES),
    st.tuples(st.just("cp"), st.integers(0, 1), st.integers(-1, 1), PLACES),
    st.tuples(st.just("add"), st.integers(0, 1), PLACES, PLACES, st.integers(-6, 1)),
    st.tuples(st.just("close"), st.integers(0, 1)),
    st.tuples(st.just("shift"), st.integers(0, 1), st.integers(0, 4), st.integers(5, 8)),
    st.tuples(
        st.just("decode"), st.integers(0, 1), st.lists(st.integers(0, 90), min_size=2, max_size=9)
    ),
)


class Positions:
    """What two sequences of up to 16 tokens hold, in lists: None for a position that is missing."""

    def __init__(self):
        self.held = {0: [], 1: []}

    def gap(self, seq):
        return [p for p, token in enumerate(self.held[seq]) if token is None]

    def rm(self, seq, p0, p1):
        new = {}
        for s in (0, 1) if seq < 0 else (seq,):
            end = p1 if p1 >= 0 else len(self.held[s])
            left = [None if p0 <= p < end else token for p, token in enumerate(self.held[s])]
            while left[-1:] == [None]:
                left.pop()
            new[s] = left
        if any(sum(t is None and u is not None for t, u in pairwise(x)) > 1 for x in new.values()):
            return False
        self.held |= new
        return True

    def cp(self, source, p0, p1):
        part = self.held[source][: p1 if p1 >= 0 else None]
        if max(p0, 0) >= len(part):
            return L.LLAMA_OK
        if p0 > 0 or self.held[1 - source]:
            return L.LLAMA_UNSUPPORTED
        if None in part:
            return L.LLAMA_INVALID
        self.held[1 - source] = part
        return L.LLAMA_OK

    def add(self, seq, p0, p1, delta):
        n, gap = len(self.held[seq]), self.gap(seq)
        first, end = max(p0, 0), n if p1 < 0 else min(p1, n)
        if delta == 0 or first >= end:
            return L.LLAMA_OK
        if not gap or end < n or -delta != len(gap) or not gap[0] <= first <= gap[-1] + 1:
            return L.LLAMA_UNSUPPORTED
        self.held[seq] = [token for token in self.held[seq] if token is not None]
        return L.LLAMA_OK

    def decode(self, seq, ids):
        if self.gap(seq):
            return L.LLAMA_INVALID
        if len(self.held[seq]) + len(ids) > 16:
            return L.LLAMA_NO_KV_SLOT
        self.held[seq] += ids
        return L.LLAMA_OK


def changed(ctx, held, kind, seq, *args):
    """What the flat API and the lists say of one change."""
    mem = L.llama_get_memory(ctx)
    if kind == "rm":
        return L.llama_memory_seq_rm(mem, seq, *args), held.rm(seq, *args)
    if kind == "cp":
        return L.llama_memory_seq_cp(mem, seq, 1 - seq, *args), held.cp(seq, *args)
    if kind == "decode":
        batch = batch_of([(t, len(held.held[seq]) + i, [seq], 0) for i, t in enumerate(args[0])])
        return L.llama_decode(ctx, batch), held.decode(seq, *args)
    if kind in ("shift", "close"):
        if kind == "shift" and not held.gap(seq):
            assert L.llama_memory_seq_rm(mem, seq, *args) == held.rm(seq, *args)
        gap = held.gap(seq)
        args = (gap[-1] + 1, -1, -len(gap)) if gap else (0, 0, 0)
    return L.llama_memory_seq_add(mem, seq, *args), held.add(seq, *args)


@pytest.fixture
def two_sequences(new_context):
    """A context of two sequences, and a session of its kind."""
    ctx = new_context(n_ctx=32, n_seq_max=2)
    return ctx, TABLE.get(ctx, Context).new_session()


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(CHANGES, min_size=20))
def test_memory_is_what_lists_of_tokens_are(changes, two_sequences):
    """Keys of the first layer tell of nothing but a token and its position."""
    (ctx, fresh), held = two_sequences, Positions()
    context, mem = TABLE.get(ctx, Context), L.llama_get_memory(ctx)
    assert L.llama_memory_clear(mem, True) == L.LLAMA_OK
    for change in changes:
        found, expected = changed(ctx, held, *change)
        assert found == expected, change
        for seq, tokens in held.held.items():
            first = next((p for p, token in enumerate(tokens) if token is not None), -1)
            assert L.llama_memory_seq_pos_min(mem, seq) == first
            assert pos_max(ctx, seq) == len(tokens) - 1
    for seq, tokens in held.held.items():
        if tokens and not held.gap(seq):
            session = context.sessions[seq]
            assert session.tokens == tokens
            fresh.truncate(0)
            fresh.prefill(tokens)
            rows = (each._kv.read(0, len(tokens)) for each in (session, fresh))
            for mine, own in zip(*rows, strict=True):
                # Keys may have been rounded to float16 a few times, half a step each.
                np.testing.assert_allclose(mine, own, rtol=0, atol=8 * 2**-11 * np.abs(own).max())


_FUZZED: dict = {}


def _load(path):
    _FUZZED["model"] = L.llama_model_load_from_file(str(path), L.llama_model_default_params())
    if "check" not in _FUZZED:
        own = L.llama_model_load_from_file(str(path), L.llama_model_default_params())
        _FUZZED["check"] = L.llama_init_from_model(own, L.llama_context_default_params())
        _FUZZED["ids"] = tokens_of(own)
    return _FUZZED["model"]


def test_freed_objects_are_released():
    before = len(TABLE)
    handles = [L.llama_sampler_init_greedy() for _ in range(50)]
    assert len(TABLE) == before + 50
    for handle in handles:
        L.llama_sampler_free(handle)
    assert len(TABLE) == before
