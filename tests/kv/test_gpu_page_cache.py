"""A KV cache in the host's memory with frames on a device: the same logits, to the bit.

The device is a CPU whose kernels see copies of arrays, as a GPU's do, but the store itself: see
test_placement.py.
"""

import json

import numpy as np
import pytest
from freezing import ETF
from method_roles import in_its_roles
from precompiled import compile_for
from tier_cases import OTHERS, check_same, ids_of
from tiny_models import TinySpec, like_qwen2, write_tiny_model
from two_devices import Apart, loaded

from tamis.cli import main
from tamis.cli.conversation import repl
from tamis.engine import engine as engine_module
from tamis.engine.engine import Engine
from tamis.engine.loaded import LoadedModel
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.cache import KVCounts
from tamis.kv.gpu_page_cache import GpuPageCache

N_LAYER, N_CTX = 4, 32 * PAGE
GPU_METHODS = [
    "dense", "window:recent=64", "quest:budget=256,page=16", "hip:k=128,b_k=16,l_d=1",
    "tactic:c=16,local=64,period=4,segment=512", "cpe", "lfps", "topk:k=64",
]  # fmt: skip
EXACT: dict[str, object] = {"key_copy": 0}  # a GPU's copies of keys have no kernels here


class WithHome(Apart):
    """It has room for all."""

    memory = 1 << 40


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("host") / "m.gguf"
    return write_tiny_model(
        path, TinySpec("llama", "F32", layers=N_LAYER, n_ctx=2 * N_CTX, embd=128)
    )


@pytest.fixture(scope="module")
def whole(path):
    engine = Engine.load(path, n_threads=2)
    texts = (*GPU_METHODS, *OTHERS)
    compile_for(engine, [{"n_ctx": PAGE} | in_its_roles(text) for text in texts], 9, 9)
    yield engine
    engine.close()


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(engine_module, "open_gpu", WithHome)


def least(engine, n_ctx=N_CTX, n_ubatch=128, n_layer=N_LAYER, **types):
    """The least kv_vram: a layer's pages, those of a chunk in all layers, one that is nobody's."""
    page = engine.memory_plan(PAGE, **types).kv // engine.hp.n_layer
    n_ring = -(-n_ubatch // PAGE) + 1
    return page * (1 + n_layer * n_ring + -(-n_ctx // PAGE // 16) * 16)


@pytest.mark.parametrize("attn", GPU_METHODS)
def test_logits_are_those_of_a_session_in_memory(path, whole, gpu, attn):
    engine = loaded(path, -1)
    how = {"n_ctx": N_CTX, "n_ubatch": 128, "attn": attn, **EXACT}
    tiered, other = engine.session(kv_vram=least(engine), **how), engine.session(**how)
    assert isinstance(tiered._kv, GpuPageCache)
    check_same(tiered, other, 1500, 40)
    counts = tiered.kv_counts
    assert 0 < counts.hit_rate < 1
    assert counts.n_read == counts.n_miss * engine.memory_plan(PAGE).kv // N_LAYER
    assert other.kv_counts is None
    engine.close()


@pytest.mark.parametrize("attn", GPU_METHODS[1:])
def test_with_room_for_a_token_bank_logits_are_the_same(path, whole, gpu, attn):
    engine = loaded(path, -1)
    how = {"n_ctx": N_CTX, "n_ubatch": 128, "attn": attn, **EXACT}
    page = engine.memory_plan(PAGE).kv // N_LAYER
    tiered = engine.session(kv_vram=least(engine) + 80 * page, **how)
    other = engine.session(**how)
    assert tiered._kv._bank is not None
    for n, n_token in ((1500, 40), (300, 9)):
        check_same(tiered, other, n, n_token)
        assert tiered.kv_counts.n_hit > 0
        assert attn.startswith("window") or tiered._kv._bank.counted[0] > 0
        for session in (tiered, other):
            session.truncate(1200)
    engine.close()


@pytest.mark.parametrize("n_gpu_layers", [2, -1])
@pytest.mark.parametrize(
    "prefill",
    [
        "dense", "window:recent=100", "hip:k=64,b_k=16,l_d=1,local=64",
        "delta(window:recent=64):gamma=16", "cpe", f"{ETF},kv=project", f"{ETF},kv=reuse",
    ],
)  # fmt: skip
def test_a_prompt_in_chunks_gives_the_same(path, whole, gpu, prefill, n_gpu_layers):
    if "reuse" in prefill and n_gpu_layers > 0:
        pytest.skip("copies keys to another device")
    engine, ids = loaded(path, n_gpu_layers), ids_of(1100)
    how = {"n_ctx": N_CTX // 2, "n_ubatch": 96, "prefill": prefill}
    kv_vram = least(engine, N_CTX // 2, 96, len(engine.places[-1].layers))
    sessions = engine.session(kv_vram=kv_vram, **how), whole.session(**how)
    found = []
    for session in sessions:
        logits = [session.prefill(ids[:700])]
        session.truncate(333)  # within a page that is in no frame any more
        logits += [session.decode(int(token)) for token in ids[:5]]
        session.truncate(331)
        logits += [*session.logits(ids[331:950])]
        session.truncate(949)
        found.append([*logits, session.prefill(ids[:50]), session.decode(9)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert sessions[0].kv_counts.n_miss > 0
    engine.close()


@pytest.mark.parametrize("attn", OTHERS)
def test_any_methods_readers_find_what_they_read(path, whole, gpu, attn):
    engine = loaded(path, -1)
    how = {"n_ctx": N_CTX // 2, "n_ubatch": 128, **in_its_roles(attn), **EXACT}
    kv_vram = least(engine, N_CTX // 2)
    check_same(engine.session(kv_vram=kv_vram, **how), whole.session(**how), 900, 3)
    engine.close()


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "f16"), ("q8_0", "q4_0")], ids=str)
@pytest.mark.parametrize("attn", ["dense", "quest:budget=64,page=16", "lfps:local=64"])
def test_it_is_copied_saved_loaded_and_shifted(
    path, whole, gpu, attn, types, tmp_path, monkeypatch
):
    # A CPU stores quantised keys in a basis, a GPU as they are.
    monkeypatch.setattr(LoadedModel, "key_bases", lambda self, type_k: {})
    if attn.startswith("lfps") and types[0] != "f16":
        pytest.skip("reads float16 only")
    engine, ids = loaded(path, -1), ids_of(1200)
    how = {"n_ctx": N_CTX, "n_ubatch": 128, "attn": attn, "type_k": types[0], "type_v": types[1]}
    kv_vram = least(engine, type_k=types[0], type_v=types[1])
    tiered, copy, other = (engine.session(kv_vram=kv_vram, **how) for _ in range(3))
    memory = whole.session(**how)
    for session in (tiered, memory):
        session.prefill(ids[:700])
        session.decode(5)
        session.remove(100, 300)
    copy.copy(tiered)
    memory.save(tmp_path / "s")
    other.load(tmp_path / "s")
    memory.load(tmp_path / "s")
    tiered.recall()
    expected = [memory.decode(int(token)) for token in ids[:9]]
    for session in (tiered, copy, other):
        for token, logits in zip(ids[:9], expected, strict=True):
            np.testing.assert_array_equal(session.decode(int(token)), logits)
    tiered.save(tmp_path / "s")
    memory.load(tmp_path / "s")
    for session in (tiered, memory):
        session.truncate(70)
    check_same(tiered, memory, 300)
    engine.close()


def test_a_prompt_that_is_left_early_leaves_what_was_read(path, whole, gpu):
    engine, ids = loaded(path, -1), ids_of(1200)
    how = {"n_ctx": N_CTX, "n_ubatch": 128}
    sessions = engine.session(kv_vram=least(engine), **how), whole.session(**how)
    for session in sessions:
        session.prefill(ids[:210])
        steps = session.prefill_steps(ids)
        next(steps)
        next(steps)
        steps.close()
        assert session.n_past == 210 + 2 * 128
    check_same(*sessions, 300)
    engine.close()


def test_layers_with_a_window_fetch_only_that(tmp_path, monkeypatch, gpu):
    path = write_tiny_model(tmp_path / "m.gguf", like_qwen2("gemma3"))
    engine, whole = loaded(path, -1), Engine.load(path, n_threads=2)
    how = {"n_ctx": 16 * PAGE, "n_ubatch": 64}
    kv_vram = least(engine, 16 * PAGE, 64, engine.hp.n_layer)
    tiered, other = engine.session(kv_vram=kv_vram, **how), whole.session(**how)
    check_same(tiered, other, 900, 2)
    for each in (engine, whole):
        each.close()


def test_with_room_for_all_it_is_an_ordinary_session(path, gpu):
    engine = loaded(path, -1)
    plan, limited = (engine.memory_plan(N_CTX, kv_vram=n) for n in (None, 1 << 19))
    assert (limited.kv, limited.host, plan.host) == (1 << 19, plan.kv, 0)
    session = engine.session(N_CTX, kv_vram=plan.kv)
    assert (session.kv_vram, session.kv_counts) == (None, None)
    engine.close()


def test_bench_and_stats_tell_what_was_brought(path, gpu, capsys):
    engine = loaded(path, -1)
    n_bytes = least(engine, n_ubatch=512)
    line = f"bench -m {path} --device cuda -p 0 -n 4 -r 2 -d 1500 -c {N_CTX} --kv-vram {n_bytes}"
    assert main([*line.split(), "--json"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    # A step reads all 24 pages of each layer.
    page = engine.memory_plan(PAGE).kv / N_LAYER
    assert row["mb_brought"] == pytest.approx(
        (1 - row["hit_rate"]) * 24 * N_LAYER * page / 1e6, 0.02
    )
    assert 0 < row["hit_rate"] < 1
    plan = engine.memory_plan(N_CTX, kv_vram=n_bytes)
    counts = KVCounts(n_hit=30, n_miss=10, n_read=3 << 20)
    assert repl._tier_line(plan, counts).startswith(f"\nRAM: KV of {plan.host >> 20} MiB, 3 MiB")
    engine.close()


def test_what_cannot_be_is_said(path, whole, gpu, monkeypatch, tmp_path):
    engine, most = loaded(path, -1), least(whole)
    with pytest.raises(ValueError, match=r"kv_vram is .* this context needs \d+ MiB of the GPU"):
        engine.session(N_CTX, 128, kv_vram=most - 1)
    with pytest.raises(ValueError, match="runs on the CPU: leave it out, or run layers on a GPU"):
        whole.session(N_CTX, kv_vram=most)
    with pytest.raises(ValueError, match="leave out kv_vram, or offload_kqv=False"):
        engine.with_kv_on_host().session(N_CTX, kv_vram=most)
    with pytest.raises(ValueError, match="kv_ram limits it: leave out one of them"):
        engine.session(N_CTX, kv_vram=most, kv_ram=1 << 20, kv_dir=tmp_path)
    monkeypatch.setattr(CpuBackend, "free_bytes", lambda *_: 1 << 20)
    with pytest.raises(MemoryError, match=r"in RAM, free: 0.0 GiB; lower n_ctx, or leave out"):
        engine.session(N_CTX, 128, kv_vram=most)
    engine.close()
