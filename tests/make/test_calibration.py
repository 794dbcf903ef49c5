"""Importance matrices from a text: what each product reads, counted as llama-imatrix does."""

import json

import numpy as np
import pytest
from checkpoints import cases, make

from tamis.cli import main
from tamis.engine.engine import Engine
from tamis.formats.dequant import dequantize
from tamis.formats.gguf import GGUFFile
from tamis.graph.linear import Source
from tamis.make import importance
from tamis.make.calibration import Calibration
from tamis.make.convert.writing import convert, planned

N_CTX = 32


@pytest.fixture(scope="module", params=["qwen3", "qwen3moe"])
def model(request, tmp_path_factory):
    """A small model, dense or with 4 experts of which 2 are used."""
    folder = tmp_path_factory.mktemp("models")
    plan = planned(make(folder / "x", cases()[request.param]), "auto", pre="qwen2")
    convert(plan, folder / "tiny.gguf", n_threads=1)
    return folder / "tiny.gguf"


def calibrated(path, n_chunk=2):
    found = Calibration(N_CTX)
    chunks = np.random.default_rng(0).integers(3, 360, (n_chunk, N_CTX))
    with Engine.load(path, n_threads=1) as engine:
        assert list(found.run(engine, chunks)) == list(range(1, n_chunk + 1))
    return found, chunks


def tensor(file, name):
    info = file.tensors[name]
    values = dequantize(file.data(name), info.type, info.shape)
    return np.asarray(values, np.float64).reshape(info.shape[::-1])


def test_sums_are_of_what_products_read(model):
    found, chunks = calibrated(model)
    with GGUFFile(model) as file:
        x = tensor(file, "token_embd.weight")[chunks.ravel()]
        normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        normed *= tensor(file, "blk.0.attn_norm.weight")
        for name in ("attn_q", "attn_k", "attn_v"):
            sums = found.sums[f"blk.0.{name}.weight"]
            assert sums.rows.tolist() == [chunks.size]
            np.testing.assert_allclose(sums.squares[0], (normed**2).sum(0), rtol=1e-5)
        matrices = {n for n, t in file.tensors.items() if n.startswith("blk.") and len(t.shape) > 1}
    assert found.sums.keys() == matrices
    for name, sums in found.sums.items():
        used = 2 if "_exps" in name else 1
        assert sums.rows.sum() == used * chunks.size, name
        assert (sums.squares >= 0).all()
    if any("_exps" in name for name in matrices):
        names = [f"blk.1.{name}.weight" for name in ("ffn_gate_inp", "ffn_gate_exps")]
        read, gate = (found.sums[name].squares for name in names)
        np.testing.assert_allclose(gate.sum(0), 2 * read[0], rtol=1e-4)
        assert len(gate) == 4


@pytest.mark.parametrize("kind", ["norm", "silu", "gelu"])
def test_rows_are_what_products_pack(kind):
    rng = np.random.default_rng(1)
    x, other = rng.standard_normal((2, 5, 8)).astype(np.float32)
    x64, other64 = x[1:4].astype(np.float64), other[1:4].astype(np.float64)
    if kind == "norm":
        other = other[0]
        expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * other
    elif kind == "silu":
        expected = x64 / (1 + np.exp(-x64)) * other64
    else:
        inner = np.sqrt(2 / np.pi) * (x64 + 0.044715 * x64**3)
        expected = 0.5 * x64 * (1 + np.tanh(inner)) * other64
    found = Source(x, kind, other, 1e-5).values(1, 3)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_the_command_writes_what_quantize_reads_and_goes_on(model, tmp_path, capsys):
    text, whole, parts = tmp_path / "text.txt", tmp_path / "whole.gguf", tmp_path / "parts.gguf"
    text.write_text("the cat sat on the mat " * 60)
    arguments = ["imatrix", str(model), str(text)]
    more = ["-c", str(N_CTX), "--save-frequency", "1", "-t", "1", "--json"]
    assert main([*arguments, str(whole), *more, "--chunks", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 3
    assert main([*arguments, str(parts), *more, "--chunks", "1"]) == 0
    assert main([*arguments, str(parts), *more, "--chunks", "3", "--resume"]) == 0
    assert parts.read_bytes() == whole.read_bytes()
    with GGUFFile(whole) as file:
        assert file.metadata["general.type"] == "imatrix"
        assert list(file.metadata["imatrix.datasets"]) == [str(text)]
        assert file.metadata["imatrix.chunk_count"] == 3
        assert file.metadata["imatrix.chunk_size"] == N_CTX
    assert importance.load(whole).values.keys() == Calibration.load(whole, N_CTX).sums.keys()
    out = tmp_path / "q.gguf"
    assert main(["quantize", str(model), str(out), "Q4_0", "--imatrix", str(whole)]) == 0
    capsys.readouterr()
    assert main([*arguments, str(whole), *more]) != 0
    assert "exists" in capsys.readouterr().err
    assert main([*arguments, str(whole), *more, "--chunks", "3", "--resume"]) != 0
    assert "has no more" in capsys.readouterr().err
    assert main([*arguments, str(whole), "-c", "64", "--resume"]) != 0
    assert "add --ctx 32" in capsys.readouterr().err
    assert main([*arguments, str(model), "-c", str(N_CTX), "--resume"]) != 0
    assert "no importance matrix" in capsys.readouterr().err


def test_values_that_are_not_finite_are_an_error():
    found = Calibration(N_CTX)
    with pytest.raises(ValueError, match=r"blk\.0\.w is multiplied with"):
        found.add("blk.0.w", np.array([[1.0, np.inf]], np.float32), None)
