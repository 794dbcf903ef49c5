"""Quantised keys of the CPU: less their constant part, scaled and rotated."""

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.engine.loaded import LoadedModel
from tamis.engine.session_file import SessionFileError
from tamis.formats.gguf import GGUFFile
from tamis.model.key_basis import KeyBasis, has_basis, key_basis
from tamis.select.notation import MethodError

Q4_0 = {"type_k": "q4_0", "type_v": "q4_0"}
N = 150


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A model whose keys have a large bias in pairs that hardly rotate, as Qwen2.5's have."""
    path = write_tiny_model(
        tmp_path_factory.mktemp("m") / "m.gguf", TinySpec("qwen2", embd=128, seed=3)
    )
    data = path.read_bytes()
    with GGUFFile(path) as file:
        for layer in range(2):
            old = bytes(file.data(f"blk.{layer}.attn_k.bias"))
            bias = np.frombuffer(old, np.float32).reshape(2, 32).copy()
            bias[:, [12, 13, 14, 15, 28, 29]] += 30
            assert data.count(old) == 1
            data = data.replace(old, bias.tobytes())
    path.write_bytes(data)
    engine = Engine.load(path, n_threads=1, precision="exact", prepare=False)
    yield engine
    engine.close()


def ids_of(engine):
    return np.random.default_rng(0).integers(3, engine.hp.n_vocab, N)


def error(found, true):
    return (found - true).std() / true.std()


def test_scores_are_those_of_the_keys_but_for_what_all_have_in_common(engine):
    basis = key_basis(engine.file, engine.model, 1)
    q, k = np.random.default_rng(1).standard_normal((2, 9, 2, 32)).astype(np.float32)
    np.testing.assert_allclose(basis.original(basis.stored(k)), k, atol=1e-4)
    matrices = basis.queries.data.view(np.float32).reshape(2, 32, 32)
    scores = np.einsum("hij,qhj,khi->hqk", matrices, q, basis.stored(k))
    plain = np.einsum("qhd,khd->hqk", q, k)
    differences = scores - plain
    np.testing.assert_allclose(differences, differences[:, :, :1] + 0 * scores, atol=1e-3)


def test_the_centre_is_the_mean_of_the_rotated_bias(engine):
    basis = key_basis(engine.file, engine.model, 0)
    bias = engine.model.weights.blk[0].attn_k.bias().reshape(2, 32)
    angles = np.arange(512)[:, None] * engine.model.frequencies(0).inv_freq
    z = (bias[:, None, :16] + 1j * bias[:, None, 16:]) * np.exp(1j * angles)
    mean = z.mean(1)
    np.testing.assert_allclose(
        basis.centre, np.concatenate([mean.real, mean.imag], axis=1), atol=1e-3
    )


@pytest.mark.slow  # kernels of q4_0 and heads of 32
def test_four_bits_hold_keys_with_a_large_bias(engine, monkeypatch):
    ids, found = ids_of(engine), {}
    true = engine.session(n_ctx=256).prefill(ids)
    found["basis"] = error(engine.session(n_ctx=256, **Q4_0).prefill(ids), true)
    with monkeypatch.context() as patch:
        patch.setattr(LoadedModel, "key_bases", lambda self, type_k: {})
        found["plain"] = error(engine.session(n_ctx=256, **Q4_0).prefill(ids), true)
    assert found["basis"] < 0.15
    assert found["basis"] < found["plain"] / 3


@pytest.mark.slow  # kernels of q4_0
def test_keys_that_four_bits_do_not_hold_are_known(engine, monkeypatch):
    assert not engine.session(n_ctx=64, **Q4_0).loses_keys
    monkeypatch.setattr(LoadedModel, "key_bases", lambda self, type_k: {})  # as on a GPU
    assert engine.session(n_ctx=64, **Q4_0).loses_keys
    assert not engine.session(n_ctx=64).loses_keys


@pytest.mark.slow  # kernels of q8_0 and q4_0
@pytest.mark.parametrize("types", [{}, {"type_k": "q8_0"}, Q4_0], ids=["f16", "q8_0", "q4_0"])
def test_a_saved_session_is_read_into_any_type(engine, tmp_path, types):
    ids = ids_of(engine)
    session = engine.session(n_ctx=256, **Q4_0)
    session.prefill(ids)
    session.save(tmp_path / "s")
    expected = session.decode(5)
    other = engine.session(n_ctx=256, **types)
    other.load(tmp_path / "s")
    assert error(other.decode(5), expected) < (1e-6 if types == Q4_0 else 0.1)
    copy = engine.session(n_ctx=256, **types)
    session.truncate(N)
    copy.copy(session)
    assert error(copy.decode(5), expected) < (1e-6 if types == Q4_0 else 0.1)


@pytest.mark.slow  # kernels of q8_0
def test_a_file_from_before_has_keys_as_they_were(engine, tmp_path, monkeypatch):
    ids = ids_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(LoadedModel, "key_bases", lambda self, type_k: {})
        old = engine.session(n_ctx=256, type_k="q8_0")
        old.prefill(ids)
        old.save(tmp_path / "s")
        expected = old.decode(5)
    session = engine.session(n_ctx=256, type_k="q8_0")
    session.load(tmp_path / "s")
    assert error(session.decode(5), expected) < 0.05
    assert session.identity != old.identity
    monkeypatch.setattr("tamis.engine.session.BASIS", 2)
    session.truncate(N)
    session.save(tmp_path / "new")
    monkeypatch.undo()
    with pytest.raises(SessionFileError, match="keys in basis 2, this program has 1"):
        session.load(tmp_path / "new")


@pytest.mark.slow  # kernels of q8_0
def test_after_a_context_shift_keys_have_moved(engine):
    ids, found = ids_of(engine), []
    for types in ({}, {"type_k": "q8_0"}):
        session = engine.session(n_ctx=256, **types)
        session.prefill(ids)
        session.remove(20, 90)
        found.append(session.decode(5))
    assert error(*found) < 0.02


def test_methods_that_copy_keys_between_layers_refuse(engine):
    with pytest.raises(MethodError, match="kv=project, or type_k f16"):
        engine.session(n_ctx=256, prefill="cpe:s=0,kv=reuse", **Q4_0)


def test_layers_without_keys_of_their_own_shape_are_left_as_they_are(tmp_path):
    write_tiny_model(tmp_path / "m.gguf", TinySpec("gemma3", embd=64))
    engine = Engine.load(tmp_path / "m.gguf", n_threads=1, prepare=False)
    assert all(has_basis(engine.model, layer) for layer in range(7))
    basis = key_basis(engine.file, engine.model, 0)
    assert isinstance(basis, KeyBasis)
    assert not basis.centre.any()
    assert basis.shift is None
    engine.close()
