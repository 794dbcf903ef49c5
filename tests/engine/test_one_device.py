"""Models whose layers read more than what the one before them adds: all on one device."""

import pytest
from kit_models import specs, write_kit_model

from tamis.arch.load import arch_of
from tamis.engine.engine import Engine

OF_ONE = ["gemma3n-dense", "rwkv7-dense"]


@pytest.mark.parametrize("name", OF_ONE)
def test_a_model_of_one_device_is_loaded_on_one(tmp_path, name):
    assert arch_of(specs()[name]["arch"]).one_device
    with Engine.load(write_kit_model(name, tmp_path / "m.gguf"), n_threads=1) as engine:
        assert engine.hp.n_layer > 0
