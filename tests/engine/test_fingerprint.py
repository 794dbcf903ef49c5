"""The text that session files name a model by: which hyperparameters it has, and that it stays."""

import json
from dataclasses import fields, replace

import pytest
from kit_models import write_kit_model
from tiny_models import TinySpec, write_tiny_model

from tamis.arch.load import load_model
from tamis.engine.engine import Engine
from tamis.engine.fingerprint import ALWAYS, LATER, shape_text
from tamis.engine.session import SessionFileError
from tamis.formats.gguf import GGUFFile
from tamis.model.hparams import HParams, RopeScaling, Ssm

# The first versions wrote this; the records within are part of it.
FIRST = (
    "HParams(arch='llama', n_ctx_train=512, n_embd=64, n_layer=2, n_head=4, n_head_kv=2, "
    "head_dim=16, n_ff=96, n_vocab=128, n_rot=16, rms_eps=1e-05, rope_base=10000.0, "
    "rope_scaling=RopeScaling(kind='none', factor=1.0, n_ctx_orig=0, attn_factor=1.0, "
    "ext_factor=1.0, beta_fast=32.0, beta_slow=1.0), n_expert=0, n_expert_used=0, n_ff_expert=0, "
    "sliding_window=0)"
)
HP = HParams(
    arch="llama", n_ctx_train=512, n_embd=64, n_layer=2, n_head=4, n_head_kv=2, head_dim=16,
    n_ff=96, n_vocab=128, n_rot=16, rms_eps=1e-5, rope_base=1e4, rope_scaling=RopeScaling(),
    n_expert=0, n_expert_used=0, n_ff_expert=0, sliding_window=0,
)  # fmt: skip


def test_every_hyperparameter_is_listed_once() -> None:
    """A new one goes to the end of LATER; `declared` is written key by key."""
    names = [f.name for f in fields(HParams)]
    assert sorted([*ALWAYS, *LATER]) == sorted(set(names) - {"declared"})


def test_the_text_of_the_first_versions_stays() -> None:
    assert shape_text(HP) == [FIRST]
    more = replace(HP, n_ff_shared=32, ssm=Ssm(n_tap=4), parallel=True)
    ssm = "Ssm(n_tap=4, n_inner=0, n_state=0, n_rank=0, n_group=0, n_key=0)"
    assert shape_text(more) == [
        FIRST, {"n_ff_shared": "32", "ssm": ssm, "parallel": "True"},
    ]  # fmt: skip


def test_keys_that_an_architecture_declares_tell_models_apart(tmp_path) -> None:
    """The same tensors, read in another way: rows are halved after one layer, or never."""
    texts = []
    for every in (1, 0):
        change = {"rescale_every_n_layers": every}
        path = write_kit_model("rwkv6-dense", tmp_path / "m.gguf", change)
        texts.append(shape_text(load_model(GGUFFile(path)).hp))
    assert texts[0][-1]["rescale_every_n_layers"] == "1"
    assert "rescale_every_n_layers" not in texts[1][-1]


def test_a_session_of_other_hyperparameters_is_refused(tmp_path, monkeypatch) -> None:
    """Also where a file was written by a version that had another text for the same model."""
    engine = Engine.load(write_tiny_model(tmp_path / "m.gguf", TinySpec()), n_threads=1)
    session = engine.session(n_ctx=64)
    session.prefill([1, 2, 3])
    session.save(tmp_path / "s")
    assert json.dumps(shape_text(engine.hp))  # as it goes into the file's name of the model
    other = engine.session(n_ctx=64)
    other.load(tmp_path / "s")
    assert other.tokens == [1, 2, 3]
    monkeypatch.setattr("tamis.engine.session.shape_text", lambda hp: ["HParams()"])
    with pytest.raises(SessionFileError, match="model"):
        engine.session(n_ctx=64).load(tmp_path / "s")
