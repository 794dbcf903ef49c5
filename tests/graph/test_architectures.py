"""How an architecture is found, how it writes a layer, and what its graph needs of memory."""

import importlib.metadata
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models
from tiny_models import TinySpec, write_tiny_model

from tamis.arch import load
from tamis.arch.load import ArchError, arch_of, load_model
from tamis.engine.engine import Engine
from tamis.engine.fingerprint import shape_text
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.graph import layer as graph_layer
from tamis.graph.workspace import workspace_bytes
from tamis.model.arch import Arch
from tamis.model.weights import Tensor

BACKEND = SimpleNamespace(n_thread=3, n_part=4)


def test_an_unknown_architecture_is_named_with_those_that_are_known():
    with pytest.raises(ArchError, match=r"'llema' is not supported; supported: .*gemma3.*qwen3moe"):
        arch_of("llema")


@pytest.mark.parametrize("name", ["load", "__init__", "../model/arch", ""])
def test_no_other_module_is_an_architecture(name):
    with pytest.raises(ArchError):
        arch_of(name)


def twice(g, il):
    """Each layer of the file, two times."""
    graph_layer.layer(g, il)
    graph_layer.layer(g, il)


OWN = Arch(neox=False, layer=twice)


def test_another_package_brings_an_architecture_with_its_own_layer(tmp_path, monkeypatch):
    path = write_tiny_model(tmp_path / "m.gguf", TinySpec("llama", layers=1))
    twin = write_tiny_model(tmp_path / "twin.gguf", TinySpec("llama", layers=1))
    found = EntryPoint("llamatwice", f"{__name__}:OWN", load.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [found])
    assert arch_of("llamatwice") is OWN
    engine = Engine.load(twin, n_threads=1)
    once = engine.session(n_ctx=64).prefill([4, 5, 6])
    engine.close()
    monkeypatch.setattr(load, "arch_of", lambda _name: OWN)
    engine = Engine.load(path, n_threads=1)
    assert not np.allclose(engine.session(n_ctx=64).prefill([4, 5, 6]), once)
    engine.close()


@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "gemma3"])
def test_a_workspace_has_what_the_graph_asked_for_and_its_plan_tells_the_truth(tmp_path, arch):
    model = load_model(GGUFFile(write_tiny_model(tmp_path / "m.gguf", TinySpec(arch))))
    hp, n_ff = model.hp, model.hp.n_ff_expert or model.hp.n_ff
    assert model.needs.n_in == max(hp.n_embd, hp.n_embd_q, n_ff)
    assert model.needs.rows["attn_q"] == model.needs.rows["att"] == 4 * hp.n_embd_q
    assert ("ffn_gate_exps" in model.needs.rows) == (arch == "qwen3moe")
    assert ("branch" in model.needs.rows) == (arch == "gemma3")  # norms after each part
    sizes = [workspace_bytes(model, n_tok, BACKEND) for n_tok in (16, 32, 48)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]
    named = sum(model.needs.rows.values())
    assert sizes[1] - sizes[0] >= 16 * (named + 4 * hp.n_embd + 4)


def test_a_tensor_that_the_graph_reads_and_the_file_has_not_is_named(tmp_path, monkeypatch):
    shapes = tiny_models.tensor_shapes

    def without(spec, n_vocab):
        return {n: s for n, s in shapes(spec, n_vocab).items() if n != "blk.1.ffn_down.weight"}

    monkeypatch.setattr(tiny_models, "tensor_shapes", without)
    path = write_tiny_model(tmp_path / "m.gguf", TinySpec())
    with pytest.raises(GGUFError, match=r"missing.*blk\.1\.ffn_down|blk\.1\.ffn_down.*missing"):
        load_model(GGUFFile(path))


@pytest.mark.parametrize("name", ["blk.1.attn_gate.weight", "blk.0.attn_norm.bias", "odd"])
def test_a_tensor_that_the_graph_leaves_unread_is_named(tmp_path, monkeypatch, name):
    shapes = tiny_models.tensor_shapes

    def more(spec, n_vocab):
        return shapes(spec, n_vocab) | {name: (spec.n_embd,)}

    monkeypatch.setattr(tiny_models, "tensor_shapes", more)
    path = write_tiny_model(tmp_path / "m.gguf", TinySpec())
    with pytest.raises(GGUFError, match=rf"{name}.*does not read|does not read.*{name}"):
        load_model(GGUFFile(path))


def test_a_scale_and_a_bias_of_one_matrix_are_refused(tmp_path, monkeypatch):
    shapes, name = tiny_models.tensor_shapes, "blk.0.ffn_up"

    def more(spec, n_vocab):
        found = shapes(spec, n_vocab)
        n_ff = found[f"{name}.weight"][0]
        return found | {f"{name}.scale": (1,), f"{name}.bias": (n_ff,)}

    monkeypatch.setattr(tiny_models, "tensor_shapes", more)
    path = write_tiny_model(tmp_path / "m.gguf", TinySpec())
    with pytest.raises(GGUFError, match=rf"scale and a bias.*{name}"):
        load_model(GGUFFile(path))


def test_a_key_that_llama_cpp_reads_and_no_graph_has_is_refused_where_it_has_an_effect(
    tmp_path, monkeypatch
):
    arch = Arch(neox=False, refused=("residual_scale", "block_count"))
    monkeypatch.setattr(load, "arch_of", lambda _name: arch)
    path = write_tiny_model(tmp_path / "m.gguf", TinySpec())
    with pytest.raises(GGUFError, match=r"is 2, which is not supported; only 0 is .*block_count"):
        load_model(GGUFFile(path))


def test_queries_of_gemma_3_27b_are_scaled_by_the_width_that_heads_have_on_average(tmp_path):
    spec = TinySpec("gemma3", layers=62)
    other = load_model(GGUFFile(write_tiny_model(tmp_path / "o.gguf", TinySpec("gemma3"))))
    model = load_model(GGUFFile(write_tiny_model(tmp_path / "m.gguf", spec)))
    assert model.hp.scale == (spec.n_embd // spec.n_head) ** -0.5
    assert other.hp.scale == spec.head_dim**-0.5
    assert len(shape_text(other.hp)) == 1  # nothing that the first session files did not have


def test_a_tensor_is_read_by_a_call_and_by_nothing_else():
    """What looks at attributes, such as a debugger, does not make a graph whole."""
    tensor = Tensor("attn_k", np.ones(4, np.float32), np.ones(4, np.float32), whole="attn_k.weight")
    for name in dir(tensor):
        getattr(tensor, name)
    assert not tensor.read
    tensor.vector()
    assert tensor.read == {"attn_k.weight"}
    tensor.leave_bias()
    assert tensor.read == {"attn_k.weight", "attn_k.bias"}
    other = replace(tensor, read=set())
    other.leave()
    assert other.read == tensor.read
