"""The tool that writes random models: they load, and say something."""

import numpy as np
import pytest

from tamis.engine import Engine
from tamis.tools.random_model import SHAPES, write_random_model


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "F16"])
def test_a_random_model_speaks(type_, tmp_path):
    path = tmp_path / "m.gguf"
    small = {"n_layer": 1, "n_head": 4, "n_head_kv": 1, "n_embd": 512, "n_ff": 1024, "n_vocab": 600}
    shape = SHAPES["llama-3.1-8b"]._replace(**small)
    write_random_model(path, shape, type_)
    engine = Engine.load(path)
    session = engine.session(n_ctx=64)
    first = session.prefill([116, 5, 7])
    assert np.isfinite(first).all()
    assert 0.1 < first.std() < 10
    assert np.abs(session.decode(9) - first).max() > 0.01
    assert engine.tokenizer.decode(engine.tokenizer.encode("the end")) == "the end"
    engine.close()
