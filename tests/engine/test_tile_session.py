"""tools/tile_session.py: keys of a repeated text are what the model itself would have kept."""

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.tools.tile_session import tile


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_the_first_layers_kv_cache_is_that_of_the_repeated_tokens(tmp_path, arch):
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, TinySpec(arch=arch))
    engine = Engine.load(path, n_threads=1)
    ids = np.random.default_rng(1).integers(3, engine.hp.n_vocab, 70)
    short, long = engine.session(n_ctx=256), engine.session(n_ctx=256)
    short.prefill(ids)
    tile(short, 180)
    expected = np.concatenate([ids, ids, ids])[:180]
    long.prefill(expected)
    assert short.tokens == expected.tolist()
    for found, own in zip(short._kv.read(0, 180), long._kv.read(0, 180), strict=True):
        np.testing.assert_allclose(found.astype(float), own.astype(float), rtol=0, atol=0.01)
    assert np.isfinite(short.decode(5)).all()
