"""The tool that writes random models: they load, and say something."""

import sys

import numpy as np
import pytest
from gguf import GGUFReader

from tamis.engine.engine import Engine
from tamis.tools.random_model import SHAPES, main, tensors_of, type_of, write_random_model


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "F16", "Q4_K_M"])
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


def test_a_mix_gives_more_bits_to_values_and_down_of_half_of_the_layers(tmp_path):
    shape, path = SHAPES["llama-3.1-8b"], tmp_path / "m.gguf"
    names = [name for name, dims in tensors_of(shape).items() if len(dims) == 2]
    more = [name for name in names if type_of(name, "Q4_K_M", shape.n_layer).name == "Q6_K"]
    layers = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert sorted(more) == sorted(
        ["output.weight"]
        + [f"blk.{i}.{name}.weight" for i in layers for name in ("attn_v", "ffn_down")]
    )
    small = {"n_layer": 8, "n_head": 2, "n_head_kv": 1, "n_embd": 256, "n_ff": 256, "n_vocab": 600}
    write_random_model(path, shape._replace(**small), "Q5_K_M")
    found = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
    values = [found[f"blk.{i}.attn_v.weight"] for i in range(8)]
    assert values == ["Q6_K", "Q5_K", "Q5_K", "Q6_K", "Q5_K", "Q5_K", "Q6_K", "Q6_K"]
    assert (found["blk.0.attn_q.weight"], found["output.weight"]) == ("Q5_K", "Q6_K")
    assert found["output_norm.weight"] == "F32"


@pytest.mark.parametrize("type_", ["Q8_0", "Q4_K_M"])
def test_the_command_writes_types_and_mixes(type_, tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    monkeypatch.setitem(SHAPES, "small", SHAPES["llama-3.1-8b"]._replace(n_embd=256, n_vocab=600))
    monkeypatch.setattr(sys, "argv", ["random_model", "small", type_, str(path), "--layers", "1"])
    main()
    types = {t.tensor_type.name for t in GGUFReader(path).tensors}
    assert types == {"Q8_0": {"F32", "Q8_0"}, "Q4_K_M": {"F32", "Q4_K", "Q6_K"}}[type_]


def test_rows_that_are_no_whole_blocks_are_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "narrow", SHAPES["llama-3.1-8b"]._replace(n_embd=64))
    monkeypatch.setattr(sys, "argv", ["random_model", "narrow", "Q4_K_M", str(tmp_path / "m.gguf")])
    with pytest.raises(SystemExit):
        main()
    assert "Q4_K_M has blocks of 256: rows of 64 are no multiple" in capsys.readouterr().err
