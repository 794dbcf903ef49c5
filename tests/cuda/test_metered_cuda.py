"""Metered attention on a GPU has the properties that tests/methods/test_metered.py names."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tiny_models import like_qwen2, write_tiny_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.cuda.runtime.driver import CudaError

pytestmark = pytest.mark.gpu

FILE = Path(__file__).parents[1] / "methods" / "test_metered.py"
SPEC = importlib.util.spec_from_file_location("metered_properties", FILE)
assert SPEC is not None
assert SPEC.loader is not None
properties = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(properties)
METHODS = [m for m in properties.METHODS if not m.startswith("magicpig")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("metered") / "m.gguf"
    try:
        engine = Engine.load(write_tiny_model(path, like_qwen2("qwen2")), device="cuda")
    except CudaError as error:
        pytest.skip(str(error))
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "name",
    [
        "test_the_estimate_of_what_was_left_out_has_no_bias",
        "test_a_floor_reads_more_and_says_how_much",
        "test_the_audit_has_the_exact_mass_beside_the_estimate",
        "test_a_prompt_begins_a_new_count",
        "test_sessions_of_a_batch_have_their_own",
        "test_auto_is_dense_to_the_bit_up_to_a_length_and_metered_beyond",
    ],
)
def test_a_property_of_the_cpu_holds(engine, name):
    getattr(properties, name)(engine)


@pytest.mark.parametrize("attn", METHODS)
def test_where_nothing_may_be_missed_any_method_is_dense(engine, attn):
    properties.test_where_nothing_may_be_missed_any_method_is_dense(engine, attn)


def test_keys_in_ram_behind_a_page_cache_give_the_same_to_the_bit(engine):
    whole, logits = properties.decoded(engine, properties.BAD, min_mass=0.9)
    tier, cached = properties.decoded(engine, properties.BAD, min_mass=0.9, kv_vram=1 << 20)
    np.testing.assert_array_equal(cached, logits)
    assert (properties.reports(tier) == properties.reports(whole)).all()
