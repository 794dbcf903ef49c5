"""KV caches of q8_0 and q4_0, K and V separately."""

import math

import golden_data
import numpy as np
import pytest
from method_roles import in_its_roles
from tiny_models import TinySpec, write_tiny_model

from tamis.cli.options.common import CACHE_TYPES
from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.types import KV_TYPES
from tamis.kv.convert import as_float32, as_type, quantised
from tamis.select.notation import MethodError

Q8_0 = {"type_k": "q8_0", "type_v": "q8_0"}
Q4_0 = {"type_k": "q4_0", "type_v": "q4_0"}
READERS = [  # of float16 keys
    "lfps", "tactic", "hip:rep=centre", "vertical_slash", "h2o", "snapkv", "double_sparsity",
    "magicpig", "hyperattention",
]  # fmt: skip
OTHERS = [
    "window:recent=16,block=1", "bigbird", "delta(window:recent=16,block=1)", "cpe:s=0", "cpe",
    "topk:k=20,sink=2,recent=6", "quest:budget=24,page=4,dense=0,sink=2,recent=4",
    "hshare:budget=90", "hip:k=8,b_k=2,l_d=0,sink=2,local=6",
]  # fmt: skip
MODEL = next(name for name in golden_data.MODELS if "smol" in name.lower())


@pytest.fixture(scope="module")
def engine(model_path):
    engine = Engine.load(model_path(golden_data.MODELS[MODEL]))
    yield engine
    engine.close()


@pytest.fixture
def exact(model_path):
    """One that reads a prompt with the activations that it decodes with: by default those of many
    rows have 8 bits, those of one row 14."""
    engine = Engine.load(model_path(golden_data.MODELS[MODEL]), precision="exact")
    yield engine
    engine.close()


def ids_of(engine, n):
    return np.random.default_rng(n).integers(3, engine.hp.n_vocab, n)


def perplexity(session, chunks):
    losses = []
    for chunk in chunks:
        session.truncate(0)
        rows = np.concatenate(list(session.logits(chunk)))[:-1].astype(np.float64)
        rows -= rows.max(-1, keepdims=True)
        log_sum = np.log(np.exp(rows).sum(-1))
        losses.append(log_sum - rows[np.arange(len(rows)), chunk[1:]])
    return math.exp(np.concatenate(losses).mean())


def test_the_command_line_has_the_types_of_the_cache():
    assert CACHE_TYPES == KV_TYPES


# Of q8_0 half a step; of q4_0 a whole one, for it has -8 and not 8: both times the rounding of the
# scale to float16.
@pytest.mark.parametrize(("type", "n", "off"), [("q8_0", 127, 0.5), ("q4_0", 8, 1.0)])
def test_rows_are_converted_to_the_nearest(type, n, off):
    x = np.random.default_rng(0).standard_normal((5, 2, 64)).astype(np.float32)
    x[0, 0] = 0
    rows = quantised(x, type)
    step = np.repeat(np.abs(x.reshape(5, 2, 2, 32)).max(-1) / n, 32, axis=-1)
    assert (np.abs(as_float32(rows) - x) <= step * (off + n * 2**-11)).all()
    assert as_type(rows, type) is rows
    np.testing.assert_array_equal(as_type(rows, "f16"), as_float32(rows).astype(np.float16))


@pytest.mark.model
@pytest.mark.parametrize("n", golden_data.PROMPTS)
# The rounding of q8_0 alone moves them by 1 to 2 % of their spread, that of q4_0 by 18 to 27 %, and
# all of them together by more, which no token's probability knows of.
@pytest.mark.parametrize(("types", "share"), [(Q8_0, 0.05), (Q4_0, 0.35)], ids=["q8_0", "q4_0"])
def test_logits_stay_near_the_true_ones(engine, n, types, share):
    golden = golden_data.load(MODEL)
    logits = engine.session(n_ctx=1024, **types).prefill(golden.prompt_ids(n))
    true = golden.float64_logits(n)
    assert (logits - true).std() < share * true.std()


@pytest.mark.model
def test_greedy_text_is_float16s_but_for_close_calls(engine):
    golden = golden_data.load(MODEL)
    f16, q8_0 = (engine.session(n_ctx=1024, **types) for types in ({}, Q8_0))
    logits, found = (session.prefill(golden.prompt_ids(256)) for session in (f16, q8_0))
    n = 0
    for _ in range(60):
        second, first = np.sort(logits)[-2:]
        token = int(logits.argmax())
        if first - second > 1:
            n += 1
            assert int(found.argmax()) == token
        logits, found = f16.decode(token), q8_0.decode(token)
    assert n >= 10


@pytest.mark.model
def test_perplexity_stays(engine):
    chunks = golden_data.load(MODEL).ppl_chunks()[:2]
    f16, q8_0 = (perplexity(engine.session(n_ctx=1024, **types), chunks) for types in ({}, Q8_0))
    assert abs(q8_0 / f16 - 1) < 0.005


@pytest.mark.model
@pytest.mark.parametrize("types", [("q8_0", "f16"), ("f16", "q8_0"), ("q4_0", "q4_0")], ids=str)
def test_a_session_is_saved_truncated_and_loaded(engine, types, tmp_path):
    ids = ids_of(engine, 90)
    session = engine.session(n_ctx=256, type_k=types[0], type_v=types[1])
    session.prefill(ids[:70])
    session.save(tmp_path / "s")
    expected = session.decode(int(ids[70]))
    session.prefill(ids[71:])
    session.truncate(70)
    np.testing.assert_array_equal(session.decode(int(ids[70])), expected)
    session.truncate(70)
    other = engine.session(n_ctx=128, type_k=types[0], type_v=types[1])
    other.load(tmp_path / "s")
    np.testing.assert_array_equal(other.decode(int(ids[70])), expected)
    copy = engine.session(n_ctx=128, type_k=types[0], type_v=types[1])
    other.truncate(70)
    copy.copy(other)
    np.testing.assert_array_equal(copy.decode(int(ids[70])), expected)
    # Into another type: converted, and nearly the same; the new token's own are not rounded. Of
    # random text some token in twenty is far off with 4 bits.
    wide = engine.session(n_ctx=128)
    wide.load(tmp_path / "s")
    errors = []
    for token in map(int, ids[70:]):
        expected = session.decode(token)
        errors.append(golden_data.rms(wide.decode(token) - expected) / expected.std())
        for each in (session, wide):
            each.truncate(70)
    assert np.median(errors) < (0.2 if "q4_0" in types else 0.02)


@pytest.mark.model
def test_decoding_is_reading(exact):
    ids = ids_of(exact, 100)
    whole, single = (exact.session(n_ctx=128, **Q8_0) for _ in range(2))
    expected = whole.prefill(ids)
    for token in ids:
        found = single.decode(int(token))
    # Weights are met in other steps, which may tip a rounding of q8_0.
    assert golden_data.rms(found - expected) < 0.05 * expected.std()


@pytest.mark.model
@pytest.mark.parametrize("options", [{}, {"n_ubatch": 32}])
def test_the_plan_has_the_scratch_that_a_session_takes(engine, options):
    session, plan = engine.session(n_ctx=256, **options), engine.memory_plan(256, **options)
    assert plan.workspace == session.forward._ws.n_bytes


@pytest.mark.model
def test_the_plan_counts_the_bytes_of_each_type(engine):
    hp = engine.hp
    n = hp.n_layer * hp.n_head_kv * 1024
    row = {"f16": 2 * hp.head_dim, "q8_0": hp.head_dim + hp.head_dim // 16}
    row["q4_0"] = hp.head_dim // 2 + hp.head_dim // 16
    for type_k in KV_TYPES:
        for type_v in KV_TYPES:
            plan = engine.memory_plan(1000, type_k=type_k, type_v=type_v)
            assert plan.kv == n * (row[type_k] + row[type_v])


@pytest.mark.model
@pytest.mark.parametrize("method", READERS)
def test_methods_that_read_float16_keys_refuse_others(engine, method):
    with pytest.raises(MethodError, match=r"keys as f16.*use type_k f16"):
        engine.session(n_ctx=256, n_ubatch=32, type_k="q8_0", **in_its_roles(method))


@pytest.mark.model
@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_serve_all_types(engine, method):
    methods = in_its_roles(method)
    dense, own = (engine.session(n_ctx=256, n_ubatch=32, **m, **Q8_0) for m in ({}, methods))
    ids = ids_of(engine, 100)
    assert np.isfinite(own.prefill(ids)).all()
    assert np.isfinite(own.decode(5)).all()
    dense.prefill(ids)


@pytest.mark.model
def test_an_audit_sees_what_is_kept(engine):
    session = engine.session(n_ctx=256, audit=1, **Q8_0)
    session.prefill(ids_of(engine, 100))
    session.decode(5)
    assert session.audit.total().error < 1e-3  # the queries' 15 bits
    attended, _, dense = session.audit.n_bytes()
    assert attended == dense


def test_types_that_do_not_fit_are_refused(tmp_path):
    write_tiny_model(tmp_path / "m.gguf", TinySpec("llama", "F32"))
    engine = Engine.load(tmp_path / "m.gguf", n_threads=1)
    with pytest.raises(ValueError, match="multiple of 32 elements; this model's have 16: use f16"):
        engine.session(n_ctx=64, type_v="q8_0")
    with pytest.raises(ValueError, match="type_k is 'q5_0', expected one of f16, q8_0, q4_0"):
        engine.session(n_ctx=64, type_k="q5_0")
    engine.close()
