"""What a session would take is compared with what is free: at the byte where it no longer fits."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine import memory_plan
from tamis.engine.engine import Engine
from tamis.engine.memory_plan import (
    GIB,
    N_UBATCH,
    N_UBATCH_GPU,
    MemoryPlan,
    best_ubatch,
    plans,
    total,
)
from tamis.kv.types import KVOptions, KVTypes, Tier, kv_bytes

TYPES = KVTypes("f16", "f16")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("plans") / "m.gguf", TinySpec())
    engine = Engine.load(path, n_threads=1)
    yield engine
    engine.close()


@pytest.mark.parametrize("less", [0, 1])
def test_a_kv_cache_goes_to_a_file_where_it_is_a_byte_too_large(engine, less):
    n_kv = kv_bytes(engine.hp, 256, TYPES)
    tier = Tier(n_kv - less, Path(), 16)
    (plan,) = plans(engine.loaded, 256, 64, KVOptions(TYPES, tier)).values()
    assert (plan.kv, plan.disk, plan.host) == (n_kv - less, less * n_kv, 0)
    assert plan.whole == (less == 0)


def test_a_plan_is_of_memory_alone_unless_it_says_otherwise():
    plan = MemoryPlan(weights=1, kv=2, workspace=3, available=5)
    assert (plan.disk, plan.host, plan.whole) == (0, 0, True)
    assert plan.fits
    assert not plan._replace(available=4).fits


def place(*, on_host, layers=(0,), free=0):
    """A place of a model, its KV cache in RAM or on a GPU."""
    backend = SimpleNamespace(on_host=on_host, free_bytes=lambda n=0: free, sides=())
    host = SimpleNamespace(free_bytes=lambda: free)
    return SimpleNamespace(
        device="cpu" if on_host else "gpu", kv_device="cpu" if on_host else "gpu",
        kv_backend=backend, backend=backend, layers=layers, host=host,
    )  # fmt: skip


def loaded_of(*places):
    arch = SimpleNamespace(is_encoder=False)
    return SimpleNamespace(places=places, model=SimpleNamespace(arch=arch))


@pytest.mark.parametrize(
    ("vram", "fits", "on_host", "expected"),
    [
        (None, True, False, N_UBATCH_GPU),
        (None, False, False, N_UBATCH),
        (1 << 20, True, False, N_UBATCH),  # the KV cache is in RAM, chunk by chunk
        (None, True, True, N_UBATCH),
    ],
)
def test_chunks_are_long_where_a_gpu_has_all_and_room(monkeypatch, vram, fits, on_host, expected):
    plan = MemoryPlan(1, 2, 3, 9 if fits else 0)
    monkeypatch.setattr(memory_plan, "plans", lambda *_: {"gpu": plan})
    loaded = loaded_of(place(on_host=on_host))
    assert best_ubatch(loaded, 1 << 20, KVOptions(TYPES, None, vram)) == expected


@pytest.mark.parametrize(
    ("layers", "is_right"), [(((0, 1), ()), True), (((), (0, 1)), True), (((0,), (1,)), False)]
)
def test_a_file_is_of_one_device_that_has_layers(monkeypatch, tmp_path, layers, is_right):
    loaded = loaded_of(*(place(on_host=True, layers=each) for each in layers))
    monkeypatch.setattr(memory_plan, "devices", lambda _: {"cpu": place(on_host=True).backend})
    given = loaded, 256, Tier(1, tmp_path, 16), {"cpu": MemoryPlan(1, 2, 3, 9, disk=1)}
    if is_right:
        memory_plan._check_disk(*given)
    else:
        with pytest.raises(ValueError, match="needs all layers on one device"):
            memory_plan._check_disk(*given)


@pytest.mark.parametrize("over", [0, 1])
def test_ram_has_room_for_what_a_gpu_reads_beside_what_is_its_own(monkeypatch, over):
    free, own = 5 * GIB, 2 * GIB
    gpu, cpu = place(on_host=False, free=free), place(on_host=True, free=free)
    monkeypatch.setattr(memory_plan, "devices", lambda _: {"gpu": gpu.backend, "cpu": cpu.backend})
    found = {
        "gpu": MemoryPlan(0, GIB, GIB, 9 * GIB, host=free - own + over),
        "cpu": MemoryPlan(0, GIB, own - GIB, free),
    }
    if over:
        with pytest.raises(MemoryError, match=r"is 3\.0 GiB, .* free: 3\.0 GiB"):
            memory_plan._check_host(loaded_of(gpu, cpu), 256, found)
    else:
        memory_plan._check_host(loaded_of(gpu, cpu), 256, found)


def test_the_plan_of_two_devices_fits_where_each_part_does():
    """What is free is in proportion to the fuller one, which has 6 bytes for 5."""
    parts = {"gpu": MemoryPlan(10, 3, 2, 6, host=7), "cpu": MemoryPlan(20, 4, 1, 50, disk=8)}
    assert total(parts) == MemoryPlan(30, 7, 3, 12, disk=8, host=7)
    parts["gpu"] = parts["gpu"]._replace(available=4)
    assert not total(parts).fits
    assert total({"cpu": parts["cpu"]}) is parts["cpu"]


@pytest.mark.parametrize(
    ("on_host", "n_kv", "said"),
    [
        (True, GIB, "free: 1.5 GiB; lower n_ctx, or keep a part on disk with kv_ram and kv_dir"),
        (False, 0, "with 3.0 GiB of weights; lower n_ctx, or keep layers on the CPU with n_gpu_l"),
        (False, GIB, "n_gpu_layers, or the KV cache with offload_kqv=False, or most of it with kv"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would_help(monkeypatch, on_host, n_kv, said):
    needed = MemoryPlan(3 * GIB, n_kv, 2 * GIB, GIB + GIB // 2)
    own = place(on_host=on_host)
    for module, name, value in (
        (memory_plan, "devices", lambda _: {"one": own.backend}),
        (memory_plan, "described", lambda *_: " on one"),
        (memory_plan, "plans", lambda *_: {"one": needed}),
    ):
        monkeypatch.setattr(module, name, value)
    given = loaded_of(own), 256, 64, KVOptions(TYPES, None), {}
    with pytest.raises(MemoryError, match=re.escape(said)) as found:
        memory_plan.checked_plans(*given)
    text = str(found.value)
    assert text.startswith(f"KV at 256 tokens is {n_kv / GIB:.1f} GiB and scratch 2.0 GiB on one")
    assert ("of weights" in text) is not on_host  # there they are pages of the file
    needed = needed._replace(available=n_kv + 2 * GIB)  # which the stand-in gives from here on
    assert memory_plan.checked_plans(*given) == {"one": needed}


@pytest.mark.parametrize("over", [0, 1])
def test_a_disk_has_room_for_the_file_to_the_byte(monkeypatch, tmp_path, over):
    usage = SimpleNamespace(free=3 * GIB)
    monkeypatch.setattr(memory_plan.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(memory_plan, "devices", lambda _: {"cpu": place(on_host=True).backend})
    given = loaded_of(place(on_host=True)), 256, Tier(1, tmp_path, 16)
    by_device = {"cpu": MemoryPlan(1, 2, 3, 9, disk=3 * GIB + over)}
    if over:
        said = f"is 3.0 GiB, {tmp_path} has 3.0 GiB free: lower n_ctx, or choose another kv_dir"
        with pytest.raises(ValueError, match=re.escape(said)):
            memory_plan._check_disk(*given, by_device)
    else:
        memory_plan._check_disk(*given, by_device)


def test_a_file_is_not_of_a_device_with_memory_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_plan, "devices", lambda _: {"gpu": place(on_host=False).backend})
    given = loaded_of(place(on_host=False)), 256, Tier(1, tmp_path, 16), {}
    with pytest.raises(ValueError, match="leave out kv_ram, or have it on the CPU"):
        memory_plan._check_disk(*given)


@pytest.mark.parametrize(
    ("on_gpu", "kv_on_gpu", "tier", "said"),
    [
        ((False,), (False,), None, "kv_vram is memory of a GPU, and this model runs on the CPU"),
        ((True, False), (False, False), None, "the KV cache is the CPU's: leave out kv_vram"),
        ((True, False), (True, False), Tier(1, Path(), 16), "leave out one of them"),
        ((False, True), (False, True), None, None),
    ],
)
def test_frames_are_of_a_gpu_that_has_the_kv_cache(on_gpu, kv_on_gpu, tier, said):
    places = []
    for gpu, kv_gpu in zip(on_gpu, kv_on_gpu, strict=True):
        found = place(on_host=not gpu)
        found.backend = SimpleNamespace(sides=(SimpleNamespace(on_host=not gpu),))
        found.kv_backend = SimpleNamespace(on_host=not kv_gpu)
        places.append(found)
    if said is None:
        memory_plan._check_vram(loaded_of(*places), tier)
    else:
        with pytest.raises(ValueError, match=said):
            memory_plan._check_vram(loaded_of(*places), tier)
