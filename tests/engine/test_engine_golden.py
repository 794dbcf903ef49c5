"""The engine against the float64 forward and llama.cpp's golden numbers, on the real models."""

import golden_data
import numpy as np
import pytest
from golden_properties import (  # of the fixture `loaded`
    test_a_failed_call_leaves_the_session_as_it_was,
    test_a_saved_session_goes_on_with_the_same_numbers,
    test_greedy_text_is_llama_cpps_up_to_a_close_call,
)

from tamis.engine.engine import Engine

__all__ = [
    "test_a_failed_call_leaves_the_session_as_it_was",
    "test_a_saved_session_goes_on_with_the_same_numbers",
    "test_greedy_text_is_llama_cpps_up_to_a_close_call",
]
pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=sorted(golden_data.MODELS))
def loaded(request, model_path):
    engine = Engine.load(model_path(golden_data.MODELS[request.param]))
    session = engine.session(n_ctx=1024)
    yield golden_data.load(request.param), engine, session
    engine.close()


@pytest.fixture(scope="module", params=sorted(golden_data.MODELS))
def exact(request, model_path):
    path = model_path(golden_data.MODELS[request.param])
    engine = Engine.load(path, precision="exact")
    session = engine.session(n_ctx=1024)
    yield golden_data.load(request.param), engine, session
    engine.close()


@pytest.mark.parametrize("n", golden_data.PROMPTS)
def test_logits_are_nearer_to_the_true_ones_than_llama_cpp(loaded, n):
    golden, _, session = loaded
    session.truncate(0)
    logits = session.prefill(golden.prompt_ids(n))
    distance = golden_data.rms(logits - golden.float64_logits(n))
    assert distance <= min(golden.llama_distance(n, kv) for kv in golden_data.KV_TYPES)


@pytest.mark.parametrize("n", golden_data.PROMPTS)
def test_exact_logits_are_the_true_ones(exact, n):
    golden, _, session = exact
    session.truncate(0)
    logits = session.prefill(golden.prompt_ids(n))
    # Only the rounding of K and V to f16 and of sums to f32 is left.
    assert golden_data.rms(logits - golden.float64_logits(n)) < 0.02


def test_perplexity_is_llama_cpps(loaded):
    golden, _, session = loaded
    perplexity = golden.perplexity(session)
    assert abs(perplexity / golden.ppl_float64 - 1) < 0.003
    assert abs(perplexity / golden.ppl["kvf32_fa0"] - 1) < 0.003 or abs(
        perplexity - golden.ppl_float64
    ) < abs(golden.ppl["kvf32_fa0"] - golden.ppl_float64)


@pytest.mark.parametrize("size", [16, 50])
def test_logits_of_a_prompt_in_parts_are_nearer_than_llama_cpp(loaded, size):
    golden, _, session = loaded
    n = min(golden_data.PROMPTS)
    session.truncate(0)
    for start in range(0, n, size):
        logits = session.prefill(golden.prompt_ids(n)[start : start + size])
    distance = golden_data.rms(logits - golden.float64_logits(n))
    assert distance <= min(golden.llama_distance(n, kv) for kv in golden_data.KV_TYPES)


def test_an_exact_prompt_in_chunks_or_token_by_token_is_the_same(exact):
    golden, _, session = exact
    ids = golden.prompt_ids(64)
    session.truncate(0)
    whole = session.prefill(ids)
    session.truncate(0)
    for start in range(0, len(ids), 32):
        chunked = session.prefill(ids[start : start + 32])
    # A token's sums do not depend on its chunk.
    np.testing.assert_array_equal(chunked, whole)
    session.truncate(0)
    for token in ids:
        single = session.decode(int(token))
    # A single token meets weights in other steps.
    np.testing.assert_allclose(single, whole, atol=2e-2)
