"""Every architecture against the NumPy float64 forward, on tiny random models made here."""

import numpy as np
import pytest
from distances import relative_error
from oracle import Oracle
from tiny_models import ALL_TYPES, ARCHITECTURES, TinySpec, write_tiny_model

from tamis.engine.engine import Engine

SCALINGS = ["linear", "yarn", "llama3"]


def logits_of(path, ids, **session):
    # Bounds here are of float32 sums: activations of 8 bits would be all that they see.
    engine = Engine.load(path, n_threads=2, precision="exact")
    try:
        return np.concatenate(list(engine.session(n_ctx=256, **session).logits(ids)))
    finally:
        engine.close()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_architecture_is_its_float64_forward(arch, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, TinySpec(arch, "F32"))
    ids = np.random.default_rng(0).integers(0, 256, 100)
    expected = Oracle.from_gguf(path, kv_f16=True).logits(ids)
    # Float32 sums, and keys that round to the other f16 neighbour; the bound is 1e-3.
    assert relative_error(logits_of(path, ids), expected) < 1e-3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling_is_llama_cpps(scaling, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, TinySpec("llama", "F32", rope_scaling=scaling))
    ids = np.random.default_rng(1).integers(0, 256, 100)
    expected = Oracle.from_gguf(path, kv_f16=True).logits(ids)
    assert relative_error(logits_of(path, ids), expected) < 1e-3


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma3"])
def test_quantised_weights_are_decoded_exactly(arch, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, TinySpec(arch, "Q8_0"))
    ids = np.random.default_rng(2).integers(0, 256, 40)
    expected = Oracle.from_gguf(path, kv_f16=True).logits(ids)
    assert relative_error(logits_of(path, ids), expected) < 1e-3


@pytest.mark.parametrize("type_", [t for t in ALL_TYPES if t != "F32"])
def test_a_model_of_any_type_is_its_float64_forward(type_, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, TinySpec("llama", type_))
    ids = np.random.default_rng(4).integers(0, 256, 20)
    expected = Oracle.from_gguf(path, kv_f16=True).logits(ids)
    assert relative_error(logits_of(path, ids), expected) < 1e-3


@pytest.mark.parametrize("type_", ["IQ2_XXS", "IQ1_M", "IQ3_S"])
def test_experts_of_a_codebook_type_are_their_float64_forward(type_, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, TinySpec("qwen3moe", type_))
    ids = np.random.default_rng(5).integers(0, 256, 12)
    expected = Oracle.from_gguf(path, kv_f16=True).logits(ids)
    assert relative_error(logits_of(path, ids), expected) < 1e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    write_tiny_model(path, TinySpec("qwen2", "F32"))
    engine = Engine.load(path, n_threads=2)
    yield engine
    engine.close()


def decoded(engine, attn, n=200, start=100):
    """Logits of each token from `start` on, one at a time."""
    ids = np.random.default_rng(3).integers(0, engine.hp.n_vocab, n)
    session = engine.session(n_ctx=256, attn=attn)
    session.prefill(ids[:start])
    return np.array([session.decode(int(i)) for i in ids[start:]])


@pytest.mark.parametrize(
    "method", ["window:sink=4,recent=300", "topk:k=300", "topk:k=300,rows=head"]
)
def test_a_budget_that_covers_everything_is_dense_attention(tiny, method):
    # Sums in another order let a key round to the other f16 neighbour.
    np.testing.assert_allclose(decoded(tiny, method), decoded(tiny, "dense"), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "method", ["window:sink=4,recent=32", "topk:k=8,recent=8", "topk:k=8,recent=8,rows=head"]
)
def test_a_small_budget_is_not(tiny, method):
    assert np.abs(decoded(tiny, method) - decoded(tiny, "dense")).max() > 1e-3


@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_number_of_threads_does_not_change_the_answer(tiny, n_threads):
    other = Engine.load(tiny.path, n_threads=n_threads)
    np.testing.assert_allclose(decoded(other, "dense"), decoded(tiny, "dense"), rtol=0, atol=1e-3)
    other.close()


def test_sessions_of_one_engine_do_not_disturb_each_other(tiny):
    first, second = tiny.session(n_ctx=64), tiny.session(n_ctx=64)
    first.prefill([1, 2, 3])
    second.prefill([9, 8, 7, 6])
    alone = tiny.session(n_ctx=64)
    alone.prefill([1, 2, 3])
    np.testing.assert_array_equal(first.decode(4), alone.decode(4))
