"""The engine on a GPU against llama.cpp's golden numbers and the float64 forward."""

import golden_data
import pytest
from golden_properties import (  # of the fixture `loaded`
    test_a_failed_call_leaves_the_session_as_it_was,
    test_a_saved_session_goes_on_with_the_same_numbers,
    test_greedy_text_is_llama_cpps_up_to_a_close_call,
)

from tamis.engine.engine import Engine
from tamis.jit_kernels.cuda.runtime.driver import CudaError

__all__ = [
    "test_a_failed_call_leaves_the_session_as_it_was",
    "test_a_saved_session_goes_on_with_the_same_numbers",
    "test_greedy_text_is_llama_cpps_up_to_a_close_call",
]
pytestmark = [pytest.mark.gpu, pytest.mark.model]


@pytest.fixture(scope="module", params=sorted(golden_data.MODELS))
def loaded(request, model_path):
    path = model_path(golden_data.MODELS[request.param])
    try:
        engine = Engine.load(path, device="cuda")
    except CudaError as error:
        pytest.skip(str(error))
    session = engine.session(n_ctx=1024)
    yield golden_data.load(request.param), engine, session
    engine.close()


def test_perplexity_is_the_true_one(loaded):
    golden, _, session = loaded
    assert abs(golden.perplexity(session) / golden.ppl_float64 - 1) < 0.003


@pytest.mark.parametrize("n", golden_data.PROMPTS)
def test_logits_are_as_near_to_the_true_ones_as_llama_cpps(loaded, n):
    golden, _, session = loaded
    session.truncate(0)
    distance = golden_data.rms(session.prefill(golden.prompt_ids(n)) - golden.float64_logits(n))
    assert distance <= max(golden.llama_distance(n, kv) for kv in golden_data.KV_TYPES)


def test_a_prompt_token_by_token_is_the_same(loaded):
    golden, _, session = loaded
    ids = golden.prompt_ids(64)
    session.truncate(0)
    whole = session.prefill(ids)
    session.truncate(0)
    for token in ids:
        single = session.decode(int(token))
    # Prompts are products of float16, single tokens of float32.
    assert golden_data.rms(single - whole) < 0.05
