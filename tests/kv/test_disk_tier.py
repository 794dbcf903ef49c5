"""A KV cache larger than its memory: the same logits, and errors of a failing disk."""

import contextlib
import os
import resource
import time

import numpy as np
import pytest
from method_roles import in_its_roles
from precompiled import compile_for
from tier_cases import METHODS, N_CTX, OTHERS, check_same, ids_of, session_of
from tiny_models import TinySpec, like_qwen2, write_tiny_model

from tamis.cli.options import common
from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv import unit_file
from tamis.kv.types import UNIT, UNITS
from tamis.kv.unit_file import KVFile, KVFileError, Units
from tamis.select.notation import methods
from tamis.tools.stress_kv import CHUNK, Shape, stress


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("tier") / "m.gguf"
    write_tiny_model(path, TinySpec("llama", "F32", layers=6, n_ctx=2 * N_CTX))
    engine = Engine.load(path, n_threads=2)
    texts = (*METHODS, *OTHERS)
    compile_for(engine, [{"n_ctx": PAGE} | in_its_roles(text) for text in texts], 9, 9)
    yield engine
    engine.close()


@pytest.mark.parametrize("unit", UNITS)
def test_units_are_read_back_in_any_order(tmp_path, unit):
    rng = np.random.default_rng(unit)
    file, data = KVFile(tmp_path), rng.integers(0, 256, (3, 4 * unit, 24), np.uint8)
    assert os.listdir(tmp_path) == []  # nothing is left of a process that is killed
    units = Units(file, 100, 12 * unit, 24)
    units.write(4 * unit, [data[1], data[2]])
    units.write(0, [data[0]])
    numbers = np.sort(rng.permutation(12 * unit)[: 7 * unit])
    places = rng.permutation(12 * unit)[: 7 * unit]
    memory = np.zeros((12 * unit, 24), np.uint8)
    units.read(numbers, memory, places)
    np.testing.assert_array_equal(memory[places], data.reshape(-1, 24)[numbers])
    assert (np.delete(memory, places, axis=0) == 0).all()
    os.pwrite(file._file.fileno(), b"\1\2", 100 + 24 * int(numbers[3]))
    with pytest.raises(KVFileError, match="was changed: the context of this session is lost"):
        units.read(numbers, memory, places)
    os.ftruncate(file._file.fileno(), 130)
    with pytest.raises(KVFileError, match="was changed"):
        units.read(numbers, memory, places)
    file.close()


def changed_units(tmp_path, change):
    """Units of 16 words, of which one is changed in the file, are read: raises KVFileError."""
    data = np.random.default_rng(5).integers(0, 256, (4, 128), np.uint8)
    file = KVFile(tmp_path)
    units = Units(file, 0, 4, 128)
    units.write(0, [data])
    os.pwrite(file._file.fileno(), change(data[2].view(np.uint64)).tobytes(), 2 * 128)
    units.read(np.arange(4), np.zeros((4, 128), np.uint8), np.arange(4))


@pytest.mark.parametrize(
    "change",
    [
        lambda words: words[::-1],
        lambda words: words + np.where(np.arange(16) == 3, 1, np.where(np.arange(16) == 9, -1, 0)),
        lambda words: words ^ np.uint64(1 << 63) * (np.arange(16) < 2).astype(np.uint64),
        lambda words: np.roll(words, 1),
        lambda words: words * 0,
    ],
    ids=["reversed", "sums alike", "high bits", "moved", "zeros"],
)
def test_words_that_change_places_or_have_the_same_sum_are_noticed(tmp_path, change):
    with pytest.raises(KVFileError, match="was changed"):
        changed_units(tmp_path, lambda words: change(words.astype(np.uint64)).astype(np.uint64))
    changed_units(tmp_path, lambda words: words)


@pytest.mark.parametrize("most", [1, 7, 100, 5000])
def test_a_disk_that_gives_or_takes_a_part_at_a_time_loses_nothing(tmp_path, monkeypatch, most):
    """A call may move fewer bytes than it was asked to: that is no damage."""
    moved = []

    def cut(*, writes):
        def part(handle, buffers, at):
            whole = b"".join(bytes(buffer) for buffer in buffers)
            if writes:
                moved.append(os.pwrite(handle, whole[:most], at))
                return moved[-1]
            found = memoryview(os.pread(handle, min(most, len(whole)), at))
            moved.append(len(found))
            for buffer in buffers:
                n = min(len(buffer), len(found))
                buffer[:n], found = found[:n], found[n:]
            return moved[-1]

        return part

    monkeypatch.setattr(unit_file.os, "pwritev", cut(writes=True))
    monkeypatch.setattr(unit_file.os, "preadv", cut(writes=False))
    data = np.random.default_rng(most).integers(0, 256, (30, 48), np.uint8)
    units = Units(KVFile(tmp_path), 10, 30, 48)
    units.write(0, [data])
    numbers, places = np.array([0, 1, 2, 9, 10, 29]), np.array([5, 6, 9, 0, 1, 2])
    memory = np.zeros((12, 48), np.uint8)
    units.read(numbers, memory, places)
    np.testing.assert_array_equal(memory[places], data[numbers])
    assert len(moved) > 2


@pytest.mark.parametrize("attn", METHODS)
def test_logits_are_those_of_a_session_in_memory(engine, tmp_path, attn):
    tiered, whole = session_of(engine, tmp_path, 72, attn=attn), engine.session(N_CTX, 128, attn)
    check_same(tiered, whole)
    counts = tiered.kv_counts
    assert whole.kv_counts is None
    assert counts.n_written > 0
    assert counts.n_hit + counts.n_miss > 0
    assert counts.n_covered >= counts.n_chosen > 0


@pytest.mark.parametrize("attn", OTHERS)
def test_all_that_any_method_reads_is_there(engine, tmp_path, attn):
    sizes = {"n_ctx": 16 * PAGE, "n_ubatch": 128} | in_its_roles(attn)
    tiered = session_of(engine, tmp_path, 24, **sizes)
    check_same(tiered, engine.session(**sizes), 900, 3)
    assert tiered.kv_counts.n_read > 0


def test_layers_with_a_window_keep_only_that_in_memory(tmp_path, monkeypatch):
    """Pages that they have left behind are in the file, and read when a truncation leads there.

    The disk is slow: what is being written is waited for, before what is read in every step goes.
    """
    write = Units.write
    monkeypatch.setattr(Units, "write", lambda *args: (time.sleep(0.002), write(*args)))
    engine = Engine.load(write_tiny_model(tmp_path / "m.gguf", like_qwen2("gemma3")), n_threads=2)
    tiered = session_of(engine, tmp_path, 24, n_ctx=16 * PAGE)
    whole = engine.session(n_ctx=16 * PAGE, n_ubatch=128)
    check_same(tiered, whole, 900, 2)
    assert tiered.kv_ram * 2 < engine.memory_plan(900).kv
    assert tiered.kv_counts.n_read == 0
    for session in (tiered, whole):
        session.truncate(500)
    check_same(tiered, whole, 9, 2)
    assert tiered.kv_counts.n_read > 0
    engine.close()


def test_the_methods_above_are_all():
    names = {text.partition(":")[0].partition("(")[0] for text in (*METHODS, *OTHERS)}
    assert names == set(methods())


@pytest.mark.parametrize("unit", UNITS)
def test_units_of_every_size_give_the_same(engine, tmp_path, unit):
    tiered = session_of(engine, tmp_path, 72, attn="topk:k=64", kv_unit=unit)
    check_same(tiered, engine.session(N_CTX, 128, "topk:k=64"))
    # Single keys cost only themselves; what else is in larger units is read for nothing.
    assert (tiered.kv_counts.amplification == 1) == (unit == 1)


def test_what_is_kept_is_copied_saved_loaded_truncated_and_observed(engine, tmp_path):
    ids = ids_of(1500)
    whole = engine.session(N_CTX, 128, "lfps")
    whole.prefill(ids)
    whole.save(tmp_path / "s")
    tiered, copy = (session_of(engine, tmp_path, 72, attn="lfps") for _ in range(2))
    tiered.load(tmp_path / "s")
    whole.load(tmp_path / "s")
    copy.copy(tiered)
    expected = [whole.decode(int(token)) for token in ids[:9]]
    for session in (tiered, copy):
        for token, logits in zip(ids[:9], expected, strict=True):
            np.testing.assert_array_equal(session.decode(int(token)), logits)
    for session in (tiered, whole):
        session.truncate(700)  # within a page that is in the file
    check_same(tiered, whole, 300)
    tiered.save(tmp_path / "t")
    whole.save(tmp_path / "w")
    assert (tmp_path / "t").read_bytes() == (tmp_path / "w").read_bytes()


def test_nothing_is_copied_saved_and_loaded(engine, tmp_path):
    empty, other = (session_of(engine, tmp_path, 72) for _ in range(2))
    other.prefill([5, 6, 7])
    other.copy(empty)
    assert other.tokens == []
    empty.save(tmp_path / "s")
    other.prefill([5, 6, 7])
    other.load(tmp_path / "s")
    assert other.tokens == []
    whole = engine.session(N_CTX, 128)
    np.testing.assert_array_equal(other.prefill([8, 9]), whole.prefill([8, 9]))


@contextlib.contextmanager
def files_of_at_most(n_byte):
    """As on a disk with so much room: writing beyond it fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_byte, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_running_answer_only(engine, tmp_path):
    ids = ids_of(2000)
    tiered, whole = session_of(engine, tmp_path, 72), engine.session(N_CTX, 128)
    for session in (tiered, whole):
        session.prefill(ids[:900])
    with files_of_at_most(1 << 16), pytest.raises(KVFileError, match="make room there"):
        tiered.prefill(ids[900:])
    assert tiered.n_past == 900
    with files_of_at_most(1 << 16), pytest.raises(KVFileError, match="make room there"):
        tiered.prefill(ids[900:])
    np.testing.assert_array_equal(tiered.prefill(ids[900:]), whole.prefill(ids[900:]))


def test_a_file_that_somebody_wrote_to_is_never_read_as_keys(engine, tmp_path):
    tiered = session_of(engine, tmp_path, 72)
    tiered.prefill(ids_of(2000))
    file = tiered._kv._file._file.fileno()
    os.pwrite(file, b"\5" * os.fstat(file).st_size, 0)
    with pytest.raises(KVFileError, match="context of this session is lost; start again"):
        tiered.prefill(range(3, 9))
    tiered.truncate(0)
    check_same(tiered, engine.session(N_CTX, 128), 300)


def test_too_little_memory_is_refused_with_the_remedy(engine, tmp_path):
    with pytest.raises(ValueError, match=r"a method that reads every key needs \d+ MiB.* kv_ram"):
        session_of(engine, tmp_path, 40)
    narrow = session_of(engine, tmp_path, 40, attn="window:recent=64", prefill="window:recent=64")
    check_same(narrow, engine.session(N_CTX, 128, "window:recent=64", prefill="window:recent=64"))
    with pytest.raises(ValueError, match="go together"):
        engine.session(kv_ram=1 << 20)
    with pytest.raises(ValueError, match="no folder: make it first"):
        engine.session(kv_ram=1 << 20, kv_dir=tmp_path / "none")
    assert engine.session(N_CTX, kv_ram=1 << 40, kv_dir=tmp_path).kv_counts is None


def test_the_command_line_has_the_units():
    assert (common.KV_UNITS, common.KV_UNIT) == (UNITS, UNIT)


def test_the_plan_has_the_file(engine):
    plan, tiered = engine.memory_plan(N_CTX), engine.memory_plan(N_CTX, kv_ram=1 << 20)
    assert (tiered.kv, tiered.disk) == (1 << 20, plan.kv)
    assert plan.disk == engine.memory_plan(N_CTX, kv_ram=1 << 40).disk == 0


def test_a_store_of_many_pages_gives_back_every_bit(tmp_path):
    counts, n = stress(
        Shape(n_layer=5, head_dim=32), 32 * CHUNK, 10 << 20, tmp_path, n_round=4, share=0.05
    )
    whole = 32 * CHUNK * 5 * 3 * 32 * 2 * 2
    assert counts.n_written == whole + whole // 8
    assert n > 4 * 0.04 * 2 * whole / (16 * 32 * 2 * 2)
    assert 0.1 < counts.hit_rate < 0.9
