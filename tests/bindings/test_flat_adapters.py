"""The flat API's adapters, samplers of a program's own, and what it refuses."""

import numpy as np
import pytest
from lora_files import write_control, write_lora

import tamis.bindings.llama as L
from tamis.bindings.flat import not_here
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.model import Model
from tamis.bindings.flat.params import TOKEN_DATA
from tamis.engine.adapters import Adapters, ControlVector, Lora

IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(path):
    handle = L.llama_model_load_from_file(str(path).encode(), L.llama_model_default_params())
    yield handle
    L.llama_model_free(handle)


@pytest.fixture
def ctx(model):
    handle = L.llama_init_from_model(model, L.llama_context_default_params())
    yield handle
    L.llama_free(handle)


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    hp, folder = TABLE.get(model, Model).engine.hp, tmp_path_factory.mktemp("adapters")
    write_lora(folder / "lora.gguf", hp.arch, {"blk.0.attn_q": (hp.n_embd, hp.n_embd)}, alpha=64)
    write_lora(folder / "other.gguf", "none", {"blk.0.attn_q": (hp.n_embd, hp.n_embd)})
    write_control(folder / "control.gguf", hp.n_embd, [1])
    return folder


def logits(ctx):
    assert L.llama_memory_clear(L.llama_get_memory(ctx), True) == L.LLAMA_OK
    assert L.llama_decode(ctx, L.llama_batch_get_one(np.array(IDS, np.int32), len(IDS))) == 0
    return np.array(L.llama_get_logits_ith(ctx, -1))


def expected(model, adapters):
    session = TABLE.get(model, Model).engine.session(n_ctx=512, n_ubatch=512, adapters=adapters)
    return session.prefill(IDS)


def last_error():
    return L.tamis_last_error()[1].decode()


def test_a_context_has_the_adapters_that_it_is_given(model, ctx, files):
    plain = logits(ctx)
    adapter = L.llama_adapter_lora_init(model, str(files / "lora.gguf").encode())
    assert adapter
    assert L.llama_set_adapters_lora(ctx, [adapter], 1, [0.5]) == L.LLAMA_UNSUPPORTED
    assert "llama_memory_clear" in last_error()
    L.llama_memory_clear(L.llama_get_memory(ctx), True)
    assert L.llama_set_adapters_lora(ctx, [adapter], 1, [0.5]) == L.LLAMA_OK
    assert L.llama_adapter_lora_free(adapter) == L.LLAMA_OK  # the context keeps it
    found = logits(ctx)
    assert not np.allclose(found, plain, atol=1e-3)
    lora = Lora.load(files / "lora.gguf")
    assert np.array_equal(found, expected(model, Adapters(((lora, 0.5),))))
    L.llama_memory_clear(L.llama_get_memory(ctx), True)
    assert L.llama_set_adapters_lora(ctx, None, 0, None) == L.LLAMA_OK
    assert np.array_equal(logits(ctx), plain)


def test_a_context_has_the_control_vector_that_it_is_given(model, ctx, files):
    plain = logits(ctx)
    control = ControlVector.load(files / "control.gguf")
    row = control.rows[1]
    L.llama_memory_clear(L.llama_get_memory(ctx), True)
    assert L.llama_set_adapter_cvec(ctx, row, len(row), len(row), 1, 1) == L.LLAMA_OK
    found = logits(ctx)
    assert not np.allclose(found, plain, atol=1e-3)
    assert np.array_equal(found, expected(model, Adapters(control=((control, 1.0),))))
    L.llama_memory_clear(L.llama_get_memory(ctx), True)
    assert L.llama_set_adapter_cvec(ctx, row, len(row), len(row) + 1, 1, 1) == L.LLAMA_INVALID
    assert L.llama_set_adapter_cvec(ctx, None, 0, 0, 0, 0) == L.LLAMA_OK
    assert np.array_equal(logits(ctx), plain)


def test_an_adapter_tells_of_its_file_and_a_wrong_one_is_refused(model, files):
    adapter = L.llama_adapter_lora_init(model, str(files / "lora.gguf").encode())
    buffer = np.zeros(64, np.uint8)
    n = L.llama_adapter_meta_val_str(adapter, b"adapter.type", buffer, 64)
    assert bytes(buffer[:n]) == b"lora"
    keys = set()
    for i in range(L.llama_adapter_meta_count(adapter)):
        n = L.llama_adapter_meta_key_by_index(adapter, i, buffer, 64)
        keys.add(bytes(buffer[:n]))
        assert L.llama_adapter_meta_val_str_by_index(adapter, i, buffer, 64) >= 0
    assert {b"general.architecture", b"adapter.lora.alpha"} <= keys
    assert L.llama_adapter_meta_val_str(adapter, b"none", buffer, 64) == -1
    assert L.llama_adapter_get_alora_n_invocation_tokens(adapter) == 0
    assert L.llama_adapter_get_alora_invocation_tokens(adapter) is None
    assert L.llama_adapter_lora_free(adapter) == L.LLAMA_OK
    assert L.llama_adapter_lora_free(adapter) == L.LLAMA_INVALID
    assert L.llama_adapter_lora_init(model, str(files / "other.gguf").encode()) == 0
    assert "the adapter is for" in last_error()


def candidates(logits):
    data = np.zeros(len(logits), TOKEN_DATA)
    data["id"], data["logit"] = np.arange(len(logits)), logits
    return L.llama_token_data_array(data, len(data))


def test_functions_of_a_program_are_a_sampler(model, ctx):
    seen = []

    def apply(limit, array):
        array.size = limit
        seen.append(array.data["id"].tolist())

    own = L.llama_sampler_i(apply=apply, accept=lambda _, token: seen.append(token))
    chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
    L.llama_sampler_chain_add(chain, L.llama_sampler_init_top_k(4))
    L.llama_sampler_chain_add(chain, L.llama_sampler_init(own, 2))
    assert L.llama_sampler_name(L.llama_sampler_chain_get(chain, 1)) == b"custom"
    array = candidates([1.0, 5.0, 3.0, 2.0, 4.0])
    assert L.llama_sampler_apply(chain, array) == L.LLAMA_OK
    assert array.data["id"].tolist() == [1, 4]
    assert seen == [[1, 4, 2, 3]]
    assert L.llama_sampler_accept(L.llama_sampler_clone(chain), 9) == L.LLAMA_OK
    assert seen[-1] == 9

    def last(_, array):
        array.selected = array.size - 1

    choosing = L.llama_sampler_init(L.llama_sampler_i(apply=last), None)
    row = logits(ctx)
    assert L.llama_sampler_sample(choosing, ctx, -1) == len(row) - 1
    assert L.llama_sampler_init(L.llama_sampler_i(apply=None), None) == 0


def test_a_sampler_that_leaves_nothing_is_an_error():
    def nothing(_, array):
        array.size = 0

    sampler = L.llama_sampler_init(L.llama_sampler_i(apply=nothing), None)
    assert L.llama_sampler_apply(sampler, candidates([1.0, 2.0])) == L.LLAMA_INVALID


@pytest.mark.parametrize("name", sorted(not_here.REFUSED))
def test_what_is_not_here_says_why(name):
    function = getattr(L, name)
    failed, why = not_here._WHY[name]
    assert function(1, 2, 3) == failed
    assert last_error() == f"{name}: {why}"


def test_nothing_is_sampled_on_a_device_and_a_model_is_saved_by_a_copy(model, ctx, path, tmp_path):
    assert L.llama_set_sampler(ctx, 0, 0) is False
    assert L.llama_get_sampled_token_ith(ctx, 0) == L.LLAMA_TOKEN_NULL
    assert L.llama_get_sampled_probs_ith(ctx, 0) is None
    assert L.llama_get_sampled_candidates_count_ith(ctx, 0) == 0
    target = tmp_path / "copy.gguf"
    assert L.llama_model_save_to_file(model, str(target).encode()) == L.LLAMA_OK
    assert target.read_bytes() == path.read_bytes()
    assert L.llama_model_save_to_file(model, str(tmp_path / "no" / "x").encode()) == L.LLAMA_FAILED
