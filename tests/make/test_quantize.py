"""Quantized copies of models: types by llama.cpp's mixtures, values within the types' errors."""

import json
import struct
from collections import Counter

import numpy as np
import pytest
from gguf_files import write_gguf
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import main
from tamis.engine.engine import Engine
from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.make import importance, mixes

PROMPT = list(range(1, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model in F32."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_tiny_model(path, TinySpec(layers=4, embd=256))


def values(file, name):
    info = file.tensors[name]
    return dequantize(file.data(name), info.type, info.shape)


def logits(path):
    engine = Engine.load(path, n_threads=1)
    found = engine.session(n_ctx=64).prefill(PROMPT)
    engine.close()
    return found


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K_M", "IQ4_XS"])
def test_a_quantized_model_runs_as_the_original(model, tmp_path, type, capsys):
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(model), str(out), type, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    with GGUFFile(model) as old, GGUFFile(out) as new:
        assert new.metadata["general.file_type"] == mixes.MIXES[type].number
        assert {t.name: t.type.name for t in new.tensors.values()} == report["tensors"]
        assert sum(t.n_bytes for t in new.tensors.values()) == report["bytes"]
        assert report["bytes"] < 0.36 * report["bytes_before"]
        for name, info in new.tensors.items():
            x, y = values(old, name), values(new, name)
            assert np.sqrt(((x - y) ** 2).mean() / (x**2).mean()) < 0.09, (name, info.type)
    exact, found = logits(model), logits(out)
    # Random weights of 4 layers enlarge what 4 bits lose.
    assert ((exact - found) ** 2).mean() < (0.01 if type == "Q8_0" else 0.2) * (exact**2).mean()


def test_f16_and_bf16_round_to_nearest_even(tmp_path):
    x = np.array([[1 + 2**-11, 1 + 3 * 2**-11, 1e-8, -70000.0] * 8] * 2, np.float32)
    x = np.concatenate([x, np.float32([[1 + 2**-8, 1 + 3 * 2**-8, 3e38, -1e-30] * 8] * 2)])
    path = tmp_path / "x.gguf"
    write_gguf(path, {}, {"a.weight": x})
    assert main(["quantize", str(path), str(tmp_path / "h.gguf"), "f16"]) == 0
    assert main(["quantize", str(path), str(tmp_path / "b.gguf"), "BF16"]) == 0
    with GGUFFile(tmp_path / "h.gguf") as half, GGUFFile(tmp_path / "b.gguf") as brain:
        with np.errstate(over="ignore"):
            assert np.array_equal(half.data("a.weight").view(np.float16), x.astype("f2").ravel())
        found = values(brain, "a.weight")
    assert found[2, :2].tolist() == [1.0, 1 + 2**-6]
    assert np.abs(found / x - 1).max() < 2**-7


@pytest.mark.model
@pytest.mark.parametrize(("name", "type"), [("smollm2", "Q4_1"), ("gemma3-270m", "Q4_K_M")])
def test_published_files_have_the_types_of_the_mixture(model_path, name, type):
    with GGUFFile(model_path(name)) as file:
        found = mixes.types(file, type, mixes.Choice())
        assert {n: t.type.name for n, t in file.tensors.items()} == {
            n: t.name for n, t in found.items()
        }


@pytest.mark.model
def test_a_file_whose_layers_were_counted_in_another_order_has_as_many_of_each_type(model_path):
    with GGUFFile(model_path("qwen2.5-coder-0.5b")) as file:  # blk.10 before blk.2
        found = mixes.types(file, "Q4_K_M", mixes.Choice())
        assert Counter(t.type for t in file.tensors.values()) == Counter(found.values())


def layers(path, arch="llama", n_layer=32, extra=(), **keys):
    """A file with the tensors' names of a model and one row each."""
    names = ["token_embd.weight", "output.weight", "output_norm.weight", *extra]
    for i in range(n_layer):
        parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down", "attn_norm")
        names += [f"blk.{i}.{part}.weight" for part in parts]
    shape = {name: (1, 256) if "norm" in name else (2, 256) for name in names}
    meta = {f"{arch}.block_count": n_layer} | {
        f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()
    }
    write_gguf(path, meta, {name: np.ones(shape[name], np.float32) for name in names}, arch=arch)
    return path


def chosen(path, name, part, **options):
    """The types of one part of all layers."""
    with GGUFFile(path) as file:
        found = mixes.types(file, name, mixes.Choice(), **options)
        n = sum(key.endswith(f"{part}.weight") for key in found)
        return [found[f"blk.{i}.{part}.weight"].name for i in range(n)]


def test_a_mixture_gives_more_bits_where_llama_cpp_does(tmp_path):
    heads = {"attention__head_count": 32, "attention__head_count_kv": 8}
    path = layers(tmp_path / "m.gguf", **heads)
    down = chosen(path, "Q4_K_M", "ffn_down")
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert [i for i, type in enumerate(down) if type == "Q6_K"] == more
    assert chosen(path, "Q4_K_M", "attn_v") == down
    assert set(chosen(path, "Q4_K_M", "attn_q")) == {"Q4_K"}
    assert set(chosen(path, "Q2_K", "attn_v")) == {"Q4_K"}  # four query heads to a KV head
    assert set(chosen(path, "Q2_K", "attn_output")) == {"Q3_K"}
    assert chosen(path, "Q3_K_M", "attn_v") == ["Q5_K"] * 2 + ["Q4_K"] * 30
    assert chosen(path, "Q3_K_M", "ffn_down") == ["Q5_K"] * 2 + ["Q4_K"] * 30
    assert chosen(path, "Q4_K_S", "attn_v") == ["Q5_K"] * 4 + ["Q4_K"] * 28
    assert chosen(path, "Q4_K_S", "ffn_down") == ["Q5_K"] * 4 + ["Q4_K"] * 28
    assert chosen(path, "IQ4_XS", "ffn_down") == ["Q5_K"] * 4 + ["IQ4_XS"] * 28
    assert set(chosen(path, "IQ4_XS", "ffn_down", has_importance=True)) == {"IQ4_XS"}
    assert chosen(path, "Q4_0", "ffn_down", has_importance=True) == ["Q4_1"] * 4 + ["Q4_0"] * 28
    assert set(chosen(path, "Q4_0", "ffn_down")) == {"Q4_0"}


def test_other_shapes_of_models_have_their_rules(tmp_path):
    alone = layers(tmp_path / "a.gguf", attention__head_count=32, attention__head_count_kv=32)
    assert set(chosen(alone, "Q2_K", "attn_v")) == {"Q3_K"}
    mixtral = {"attention__head_count": 32, "attention__head_count_kv": 8, "expert_count": 8}
    path = layers(tmp_path / "x.gguf", **mixtral)
    assert (
        set(chosen(path, "Q4_K_M", "attn_v")) == set(chosen(path, "Q4_K_M", "attn_k")) == {"Q8_0"}
    )
    assert set(chosen(path, "Q4_K_M", "attn_output")) == {"Q5_K"}
    large = layers(tmp_path / "l.gguf", n_layer=80, attention__head_count=64,
                   attention__head_count_kv=8)  # fmt: skip
    assert set(chosen(large, "Q4_K_M", "attn_v")) == {"Q5_K", "Q6_K"}
    assert set(chosen(large, "Q3_K_S", "attn_v")) == {"Q5_K"}


def test_the_head_and_small_tensors(tmp_path):
    path = layers(
        tmp_path / "m.gguf", extra=("blk.0.ffn_gate_inp.weight", "blk.0.ssm_conv1d.weight")
    )
    with GGUFFile(path) as file:
        found = mixes.types(file, "Q4_K_M", mixes.Choice())
        assert found["output.weight"] == GGMLType.Q6_K
        assert found["token_embd.weight"] == GGMLType.Q4_K
        for name in ("output_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ssm_conv1d.weight"):
            assert found[name] == GGMLType.F32
        pure = mixes.types(file, "Q4_K_M", mixes.Choice(pure=True))
        assert {pure[name] for name in ("output.weight", "blk.0.ffn_down.weight")} == {
            GGMLType.Q4_K
        }


def test_rows_that_no_block_fits_get_a_smaller_type(tmp_path):
    tensors = {f"{n}.weight": np.ones((2, n), np.float32) for n in (256, 288, 40)}
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    with GGUFFile(tmp_path / "m.gguf") as file:
        for name, other in (("Q4_K_S", "Q5_0"), ("Q6_K", "Q8_0"), ("Q3_K_S", "Q4_0"),
                            ("IQ4_XS", "IQ4_NL"), ("Q5_K_S", "Q5_1")):  # fmt: skip
            found = mixes.types(file, name, mixes.Choice())
            assert found["256.weight"] == mixes.MIXES[name].type
            assert [found["288.weight"].name, found["40.weight"].name] == [other, "F16"]


def test_flags_name_types(model, tmp_path, capsys):
    flags = ["--tensor-type", r"blk\.[01]\..*attn_v=q8_0", "--output-tensor-type", "f16",
             "--token-embedding-type", "Q5_K", "--dry-run", "--json"]  # fmt: skip
    assert main(["quantize", str(model), str(tmp_path / "o.gguf"), "Q4_K_M", *flags]) == 0
    found = json.loads(capsys.readouterr().out)["tensors"]
    assert [found[f"blk.{i}.attn_v.weight"] for i in range(3)] == ["Q8_0", "Q8_0", "Q4_K"]
    assert found["token_embd.weight"] == "Q5_K"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flags", "message"), [
    (["Q4_X"], "'Q4_X' is no type to quantize to: expected one of F32, F16"),
    (["Q4_K", "--tensor-type", "attn_v"], "expected PATTERN=TYPE"),
    (["Q4_K", "--tensor-type", "attn_v=IQ2_S"], "'IQ2_S' is no type of a tensor: expected F32"),
    (["Q4_K", "--tensor-type", "(=Q8_0"], "'(' is no expression"),
    (["Q4_K", "--output-tensor-type", "x"], "--output-tensor-type 'x' is no type"),
])  # fmt: skip
def test_wrong_flags_are_refused(model, tmp_path, flags, message, capsys):
    assert main(["quantize", str(model), str(tmp_path / "o.gguf"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_quantized_is_quantized_again_only_if_told(model, tmp_path, capsys):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert main(["quantize", str(model), str(first), "Q8_0"]) == 0
    assert main(["quantize", str(first), str(second), "Q4_0"]) == 2
    assert "are quantized already (" in capsys.readouterr().err
    assert not second.exists()
    assert main(["quantize", str(first), str(second), "Q4_0", "--allow-requantize"]) == 0
    assert "their errors add up" in capsys.readouterr().err


def test_values_that_are_not_finite_are_refused(tmp_path, capsys):
    x = np.ones((4, 256), np.float32)
    x[2, 7] = np.nan
    write_gguf(tmp_path / "m.gguf", {}, {"a.weight": x})
    assert main(["quantize", str(tmp_path / "m.gguf"), str(tmp_path / "o.gguf"), "Q4_0"]) == 1
    assert "a.weight has values that are not finite" in capsys.readouterr().err
    assert not (tmp_path / "o.gguf").exists()


def old_matrix(path, entries):
    """An importance matrix in the format before GGUF."""
    data = struct.pack("<i", len(entries))
    for name, (calls, sums) in entries.items():
        raw = name.encode()
        data += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, len(sums))
        data += np.float32(sums).tobytes()
    path.write_bytes(data + struct.pack("<i", 3))
    return path


def new_matrix(path, entries):
    tensors = {}
    for name, (calls, sums) in entries.items():
        tensors[name + ".in_sum2"] = np.float32(sums)
        tensors[name + ".counts"] = np.float32(calls).reshape(-1, 1)
    write_gguf(path, {"general.type": "imatrix"}, tensors)
    return path


def test_both_formats_of_importance_are_read(tmp_path):
    sums = np.arange(64, dtype=np.float32)
    old = importance.load(old_matrix(tmp_path / "a.dat", {"a.weight": (4, sums)})).values
    assert np.array_equal(old["a.weight"], sums[None] / 4)
    entries = {"a.weight": (np.array([4, 0]), np.stack([sums, sums]))}
    new = importance.load(new_matrix(tmp_path / "a.gguf", entries)).values
    assert np.array_equal(new["a.weight"], np.stack([sums / 4, np.ones(64, np.float32)]))


def test_an_importance_matrix_lowers_weighted_errors(model, tmp_path):
    name = "blk.0.ffn_up.weight"
    sums = np.where(np.arange(256) % 16 == 0, 1000, 1).astype(np.float32)
    matrix = new_matrix(tmp_path / "i.gguf", {name: (np.array([1]), sums[None])})
    errors = []
    for i, flags in enumerate(([], ["--imatrix", str(matrix)])):
        out = tmp_path / f"{i}.gguf"
        assert main(["quantize", str(model), str(out), "Q4_0", *flags]) == 0
        with GGUFFile(model) as old, GGUFFile(out) as new:
            errors.append((((values(old, name) - values(new, name)) ** 2) * sums).mean())
            assert ("quantize.imatrix.file" in new.metadata) == bool(flags)
    assert errors[1] < 0.9 * errors[0]


def test_an_importance_matrix_of_another_model_is_refused(model, tmp_path, capsys):
    for entries, message in (
        ({"other.weight": (np.array([1]), np.ones((1, 256)))}, "names no tensor of"),
        ({"blk.0.ffn_up.weight": (np.array([1]), np.ones((1, 64)))}, "1 matrices of 256 columns"),
    ):
        matrix = new_matrix(tmp_path / "i.gguf", entries)
        code = main(["quantize", str(model), str(tmp_path / "o.gguf"), "Q4_0", "--imatrix",
                     str(matrix)])  # fmt: skip
        assert code in (1, 2)
        assert message in capsys.readouterr().err
        matrix.unlink()


@pytest.mark.parametrize("data", [b"", b"\x01\0\0\0", struct.pack("<ii", 1, -1),
                                  struct.pack("<ii", 1, 1 << 30), struct.pack("<i", -5),
                                  struct.pack("<ii1siif", 1, 1, b"a", 1, 5, 1.0)])  # fmt: skip
def test_a_damaged_importance_matrix_is_refused(tmp_path, data):
    (tmp_path / "i.dat").write_bytes(data)
    with pytest.raises(GGUFError, match="not an importance matrix"):
        importance.load(tmp_path / "i.dat")
