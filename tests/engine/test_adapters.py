"""LoRA adapters and control vectors: as if merged into the weights, for each sequence its own."""

import math
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from lora_files import write_control, write_lora
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.adapters import (
    RANK_UNIT,
    AdapterError,
    Adapters,
    ControlVector,
    Lora,
    Pair,
    _joined,
    scales,
)
from tamis.engine.batch import Batch
from tamis.engine.engine import Engine
from tamis.engine.session_file import SessionFileError

IDS = [5 + 7 * i % 90 for i in range(40)]
NEAR = 3e-4  # of the largest: the KV cache is kept as float16, and rounds the other way
CASES = [("llama", {}), ("qwen3", {}), ("gemma3", {})]


def shapes(path):
    """All matrices of layers, (n_out, n_in) by name; and the output where the file has one."""
    reader = gguf.GGUFReader(path)
    return {
        t.name.removesuffix(".weight"): tuple(int(n) for n in t.shape[::-1])
        for t in reader.tensors
        if len(t.shape) == 2 and not t.name.startswith("token_embd")
    }


def merged(path, to, added):
    """A copy of an F32 model whose matrices have something added."""
    shutil.copy(path, to)
    reader = gguf.GGUFReader(to, "r+")
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        if name in added:
            tensor.data[...] = (tensor.data.astype(np.float64) + added[name]).reshape(
                tensor.data.shape
            )
    reader.data.flush()
    return to


def rows(engine, ids=IDS, n_ubatch=16, **how):
    """Logits of a prompt in chunks, and of three steps more."""
    with engine.session(n_ctx=64, n_ubatch=n_ubatch, **how) as session:
        found = np.concatenate(list(session.logits(ids[:-3])))
        return np.concatenate([found, [session.decode(i) for i in ids[-3:]]])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tiny models, each with an adapter of all of its matrices, and the merged model."""
    folder, found = tmp_path_factory.mktemp("lora"), {}
    for arch, how in CASES:
        path = write_tiny_model(folder / f"{arch}.gguf", TinySpec(arch, **how))
        added = write_lora(folder / f"{arch}.lora", arch, shapes(path))
        other = merged(path, folder / f"{arch}.merged", added)
        found[arch] = Engine.load(path), Lora.load(folder / f"{arch}.lora"), Engine.load(other)
    yield found
    for engine, _, other in found.values():
        engine.close()
        other.close()


@pytest.mark.parametrize("arch", [arch for arch, _ in CASES])
def test_an_adapter_is_as_if_merged_into_the_weights(made, arch):
    engine, lora, other = made[arch]
    plain, expected = rows(engine), rows(other)
    found = rows(engine, adapters=Adapters(((lora, 1.0),)))
    largest = np.abs(expected).max()
    assert np.abs(plain - expected).max() > 0.05 * largest, "the adapter changes much"
    assert np.abs(found - expected).max() < NEAR * largest
    assert np.array_equal(rows(engine, adapters=Adapters(((lora, 0.0),))), plain)
    assert np.array_equal(rows(engine), plain), "other sessions are as ever"


def test_several_adapters_add_up_with_their_scales(made, tmp_path):
    engine, lora, _ = made["llama"]
    some = {k: v for k, v in shapes(engine.path).items() if "attn_q" in k or "ffn_down" in k}
    write_lora(tmp_path / "b", "llama", some, rank=40, alpha=0.0, seed=3, dtype=np.float16)
    both = Lora.load(tmp_path / "b")
    added = {
        name: 0.5 * lora.scale(4, 1) * pair.b.astype(np.float64) @ pair.a
        for name, pair in lora.pairs.items()
    }
    for name, pair in both.pairs.items():
        added[name] = added[name] - 0.3 * pair.b.astype(np.float64) @ pair.a
    other = Engine.load(merged(engine.path, tmp_path / "m", added))
    found = rows(engine, adapters=Adapters(((lora, 0.5), (both, -0.3))))
    expected = rows(other)
    assert np.abs(found - expected).max() < NEAR * np.abs(expected).max()
    other.close()


def test_sequences_of_one_batch_have_each_their_own_adapters(made):
    engine, lora, _ = made["llama"]
    kinds = [None, Adapters(((lora, 1.0),)), Adapters(((lora, -0.5),)), None]
    open_ = [engine.session(n_ctx=64, adapters=kind) for kind in [*kinds, *kinds]]
    alone = [rows(engine, adapters=kind)[-3:] for kind in kinds]
    for session in open_:
        session.prefill(IDS[:-3])
    batch, order = Batch(engine), open_[::-1]
    for i in range(3):
        found = batch.step(dict.fromkeys(order, IDS[i - 3]))
        for j, session in enumerate(open_):
            expected = alone[j % 4][i]
            assert np.abs(found[session] - expected).max() < 1e-3 * np.abs(expected).max()
    for session in open_:
        session.close()


def test_a_control_vector_is_added_after_its_layers(made, tmp_path):
    """Of the last layer: the output norm of what the model has, and the vector."""
    engine, _, _ = made["llama"]
    write_control(tmp_path / "c", engine.hp.n_embd, [1])
    vector = ControlVector.load(tmp_path / "c")
    control = Adapters(control=((vector, 0.7),))
    with engine.session(n_ctx=64) as plain, engine.session(n_ctx=64, adapters=control) as other:
        list(plain.hidden(IDS))
        list(other.hidden(IDS))
        x = [session.forward._ws.x[: len(IDS)].copy() for session in (plain, other)]
    assert np.abs(x[1] - x[0] - 0.7 * vector.rows[1]).max() < 1e-5
    layers = Adapters(control=((vector, 0.7),), layers=(2, 9))
    assert np.array_equal(rows(engine, adapters=layers), rows(engine))
    write_control(tmp_path / "d", 8, [1])
    other_model = Adapters(control=((ControlVector.load(tmp_path / "d"), 1.0),))
    with pytest.raises(AdapterError, match="directions have 8 elements"):
        engine.session(adapters=other_model)


def test_a_session_file_is_of_its_adapters(made, tmp_path):
    engine, lora, _ = made["llama"]
    kinds = [None, Adapters(((lora, 1.0),)), Adapters(((lora, 0.5),))]
    with engine.session(n_ctx=64, adapters=kinds[1]) as session:
        session.prefill(IDS)
        session.save(tmp_path / "s")
    for kind in kinds:
        with engine.session(n_ctx=64, adapters=kind) as session:
            if kind is kinds[1]:
                session.load(tmp_path / "s")
                assert session.n_past == len(IDS)
            else:
                with pytest.raises(SessionFileError):
                    session.load(tmp_path / "s")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "qwen2"}, "for 'qwen2', the model is 'llama'"),
        ({"shapes": {"blk.0.attn_q": (64, 32)}}, r"\[64, 32\], the model has \[64, 64\]"),
        ({"shapes": {"blk.9.attn_q": (64, 64)}}, "no matrix of this model"),
        ({"shapes": {"blk.0.attn_norm": (64, 64)}}, "no matrix of this model"),
        ({"shapes": {"token_embd": (64, 64)}}, "no matrix of this model"),
        ({"rank": 5000}, "lora_a"),
        ({"shapes": {"blk.\u00b2.attn_q": (64, 64)}}, "no matrix of this model"),
        ({"shapes": {"blk.1" + "0" * 30 + ".attn_q": (64, 64)}}, "no matrix of this model"),
        ({"alpha": math.nan}, "alpha is nan, expected a finite number"),
        ({"alpha": math.inf}, "alpha is inf, expected a finite number"),
    ],
)
def test_an_adapter_of_another_model_is_refused_and_named(made, tmp_path, change, message):
    how = {"arch": "llama", "shapes": {"blk.0.attn_q": (64, 64)}, "rank": 4, "alpha": 8.0} | change
    arch, shapes = how["arch"], how["shapes"]
    with np.errstate(invalid="ignore"):
        write_lora(tmp_path / "bad.gguf", arch, shapes, rank=how["rank"], alpha=how["alpha"])

    def use():
        made["llama"][0].session(adapters=Adapters(((Lora.load(tmp_path / "bad.gguf"), 1.0),)))

    with pytest.raises(AdapterError, match=message) as error:
        use()
    assert "bad.gguf" in str(error.value)


@pytest.mark.parametrize("layer", ["\u00b2", "0", "-1", "1" * 40, "1.x"])
def test_a_direction_of_no_layer_is_refused(tmp_path, layer):
    write_control(tmp_path / "c", 64, [layer])
    with pytest.raises(ValueError, match=r"none of direction\.1"):
        ControlVector.load(tmp_path / "c")


def test_an_adapter_that_overflows_is_refused(made, tmp_path):
    write_control(tmp_path / "c", 64, [1])
    control = Adapters(control=((ControlVector.load(tmp_path / "c"), 3e38),) * 2)
    with pytest.raises(AdapterError, match=r"direction\.1 times .* no finite numbers"):
        made["llama"][0].session(adapters=control)
    write_lora(tmp_path / "l", "llama", {"blk.0.attn_q": (64, 64)}, alpha=3e38)
    lora = Adapters(((Lora.load(tmp_path / "l"), 1e6),))
    with pytest.raises(AdapterError, match=r"blk\.0\.attn_q times .* no finite numbers"):
        made["llama"][0].session(adapters=lora)


def test_files_that_are_no_adapters_are_refused(made, tmp_path):
    path = Path(made["llama"][0].path)
    for kind in (Lora, ControlVector):
        with pytest.raises(AdapterError):
            kind.load(path)
        with pytest.raises(FileNotFoundError):
            kind.load(tmp_path / "none")


@pytest.mark.parametrize("ranks", [(1,), (RANK_UNIT,), (RANK_UNIT, 1), (3, 4, 5)])
def test_joined_adapters_take_the_next_whole_unit_of_ranks(ranks):
    rng = np.random.default_rng(0)
    pairs = [Pair(rng.random((n, 6), "f4"), rng.random((5, n), "f4")) for n in ranks]
    n_rank = _joined(pairs).a.n_out
    assert n_rank % RANK_UNIT == 0
    assert 0 <= n_rank - sum(ranks) < RANK_UNIT


def test_scales_by_id():
    assert scales([{"id": 1, "scale": 0.5}], 3) == [0, 0.5, 0]
    assert scales([{"id": 0, "scale": 2}, {"id": 2, "scale": -1}], 3) == [2, 0, -1]
    numbers = [[{"id": 0, "scale": scale}] for scale in ("1", math.nan, math.inf, 10**400, True)]
    outside = [[{"id": i, "scale": 1}] for i in (-1, 3, True)]
    for wrong in (*outside, [{"scale": 1}], [1], *numbers):
        with pytest.raises(ValueError, match="lora"):
            scales(wrong, 3)


def quantized(path, to, kind, added=None):
    """A copy of an F32 model, matrices of a kind; or in F32, those values with an addition."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            of_items = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=of_items)
    kind = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        name, values = tensor.name.removesuffix(".weight"), np.array(tensor.data)
        if name not in shapes(path):
            writer.add_tensor(tensor.name, values)
            continue
        packed = gguf.quants.quantize(values, kind)
        if added is None:
            writer.add_tensor(tensor.name, packed, raw_dtype=kind)
        else:
            whole = gguf.quants.dequantize(packed, kind).astype(np.float64) + added.get(name, 0.0)
            writer.add_tensor(tensor.name, whole.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_an_adapter_of_a_quantized_model_is_as_if_merged(made, tmp_path, kind):
    path = made["llama"][0].path
    added = write_lora(tmp_path / "a", "llama", shapes(path))
    lora = Adapters(((Lora.load(tmp_path / "a"), 1.0),))
    with (
        Engine.load(quantized(path, tmp_path / "a.gguf", kind), precision="exact") as engine,
        Engine.load(quantized(path, tmp_path / "merged.gguf", kind, added)) as other,
    ):
        expected, plain = rows(other), rows(engine)
        largest = np.abs(expected).max()
        assert np.abs(plain - expected).max() > 0.05 * largest
        # Products with these have activations of 14 bits and more, an error of 1e-4 a product.
        assert np.abs(rows(engine, adapters=lora) - expected).max() < 5e-3 * largest


def test_an_adapter_in_q8_0_has_the_values_that_it_stands_for(made, tmp_path):
    engine, kind = made["llama"][0], gguf.GGMLQuantizationType.Q8_0
    rng, n = np.random.default_rng(9), 64
    halves = {half: rng.standard_normal((n, n)).astype(np.float32) / 8 for half in "ab"}
    packed = {half: gguf.quants.quantize(values, kind) for half, values in halves.items()}
    found = []
    for name in ("q8_0", "f32"):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        for half, data in packed.items():
            target = f"blk.0.attn_q.weight.lora_{half}"
            if name == "q8_0":
                writer.add_tensor(target, data, raw_dtype=kind)
            else:
                writer.add_tensor(target, gguf.quants.dequantize(data, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(rows(engine, adapters=Adapters(((Lora.load(tmp_path / name), 1.0),))))
    assert np.array_equal(*found)
    assert np.abs(found[0] - rows(engine)).max() > 0.05 * np.abs(found[0]).max()
