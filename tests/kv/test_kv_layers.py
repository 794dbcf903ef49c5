"""Layers that append no keys of their own take none of the KV cache's memory."""

import dataclasses

import pytest
from kit_models import write_kit_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.cache import KVCounts
from tamis.kv.types import KVOptions, KVTypes

# Recurrent before attention; both in each layer; recurrent only; keys that later layers share.
KEEPING = {
    "qwen35-dense": (1,),
    "qwen35moe-moe": (1,),
    "falcon-h1-dense": (0, 1),
    "mamba2-dense": (),
    "llama-dense": (0, 1),
}


@pytest.mark.parametrize("name", KEEPING)
def test_only_layers_that_append_keys_are_counted(name, tmp_path):
    engine = Engine.load(write_kit_model(name, tmp_path / "m.gguf"))
    assert engine.model.kv_layers == KEEPING[name]
    shape, n_layer = engine.hp, len(KEEPING[name])
    a_layer = 2 * 2 * shape.n_head_kv * shape.head_dim  # float16 K and V of a token
    assert engine.memory_plan(4 * PAGE).kv == n_layer * a_layer * 4 * PAGE
    engine.close()


@pytest.mark.parametrize("name", ["gemma4-dense", "gemma3n-dense"])
def test_layers_that_share_keys_have_none(name, tmp_path):
    engine = Engine.load(write_kit_model(name, tmp_path / "m.gguf"))
    own = engine.hp.n_layer_kv
    assert 0 < own < engine.hp.n_layer
    assert engine.model.kv_layers == tuple(range(own))
    engine.close()


@pytest.mark.parametrize("name", KEEPING)
def test_a_cache_has_the_memory_that_the_plan_says(name, tmp_path):
    engine = Engine.load(write_kit_model(name, tmp_path / "m.gguf"))
    place, loaded = engine.places[0], engine.loaded
    kv = loaded.new_cache(place, 4 * PAGE, 16, KVOptions(KVTypes(), None), whole=True)
    kv.reserve(0, 4 * PAGE)
    held = 4 * place.n_kv_layer(loaded.model)
    assert sum(pages[:held].nbytes for pages in kv.arrays) == engine.memory_plan(4 * PAGE).kv
    assert not held or kv.view(0).k_table.max() == held - held // 4
    kv.truncate(0)
    engine.close()


def test_what_a_tier_counted_begins_with_nothing_and_gives_its_shares():
    counts = KVCounts()
    assert set(dataclasses.astuple(counts)) == {0}
    assert (counts.hit_rate, counts.amplification) == (0, 0)
    counts = KVCounts(n_hit=6, n_miss=4, n_ahead=2, n_chosen=100, n_covered=400)
    assert (counts.hit_rate, counts.amplification) == (0.4, 4)
    assert KVCounts(n_hit=1, n_miss=1, n_ahead=2).hit_rate == 0
