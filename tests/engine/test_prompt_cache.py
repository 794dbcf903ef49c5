"""The prompt cache: what is kept is what was read, whose it was, and no more than there is room.

Logits of a session that was extended are those of one that has read all, up to rounding: products
of one row and of several are summed in another order. Another text's logits differ by 1 and more.
"""

import os
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from faults import FAULTS, outcomes
from lora_files import write_lora
from recurrent_models import LAYERS, N_VOCAB, write_recurrent_model
from tier_cases import METHODS
from tiny_models import TinySpec, write_tiny_model

from tamis.engine import prompt_cache
from tamis.engine.adapters import AdapterFiles
from tamis.engine.engine import Engine
from tamis.engine.prompt_cache import PromptCache
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.page_files import PageFiles, Record

MIB = 1 << 20
N_CTX = 640


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec(embd=128))


@pytest.fixture(scope="module")
def engine(path):
    engine = Engine.load(path, n_threads=2)
    yield engine
    engine.close()


def ids_of(n, seed=0):
    return np.random.default_rng(seed).integers(3, 200, n).tolist()


def opened(engine, **options):
    return engine.session(n_ctx=N_CTX, n_ubatch=64, **options)


def read(session, ids):
    session.truncate(0)
    return session.prefill(ids)


def check_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=5e-3)


def check_again(cache, session, ids, logits, scope=""):
    """The cache has all of a prompt but at most a page, and it is what reading it gives."""
    session.truncate(0)
    n = cache.extend(session, ids, scope)
    assert len(ids) - PAGE <= n < len(ids)
    check_close(session.prefill(ids[n:]), logits)


# ---- what is kept is what was read ---------------------------------------------------
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 128, 300])
def test_a_prompt_is_read_once(engine, n):
    cache, session, ids = PromptCache.open(MIB), opened(engine), ids_of(n)
    logits = read(session, ids)
    cache.keep(session)
    session.truncate(0)
    assert cache.extend(session, ids) == n - 1
    check_close(session.prefill(ids[-1:]), logits)
    assert cache.n_hits == (n > 1)


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0")])
@pytest.mark.parametrize("method", ["dense", *METHODS[1:]])
def test_every_method_and_type_goes_on_as_if_it_had_read(engine, method, types):
    how = {"attn": method, "type_k": types[0], "type_v": types[1]}
    try:
        first, other = opened(engine, **how), opened(engine, **how)
    except ValueError:
        pytest.skip("the method reads no such keys")
    cache, ids = PromptCache.open(MIB), ids_of(300)
    read(first, ids)
    cache.keep(first)
    assert cache.extend(other, ids) == 299
    first.truncate(0)
    first.copy(other)  # both learn from the last queries only: as a restored session does
    for token in ids_of(8, 1):
        np.testing.assert_array_equal(other.decode(token), first.decode(token))


def test_a_tier_on_disk_and_memory_have_each_others(engine, tmp_path):
    cache, ids = PromptCache.open(MIB), ids_of(400)
    in_memory = engine.session(n_ctx=4096, n_ubatch=64)
    on_disk = engine.session(n_ctx=16384, n_ubatch=64, kv_ram=5 * MIB, kv_dir=tmp_path)
    assert on_disk.kv_ram is not None
    logits = read(in_memory, ids)
    cache.keep(in_memory)
    check_again(cache, on_disk, ids, logits)
    cache = PromptCache.open(MIB)
    read(on_disk, ids)
    cache.keep(on_disk)
    check_again(cache, in_memory, ids, logits)


@pytest.mark.parametrize("arch", ["gemma3", "qwen3moe"])
def test_windows_and_experts(arch, tmp_path):
    with Engine.load(write_tiny_model(tmp_path / "m", TinySpec(arch)), n_threads=2) as engine:
        cache, session, ids = PromptCache.open(4 * MIB), opened(engine), ids_of(300)
        logits = read(session, ids)
        cache.keep(session)
        check_again(cache, session, ids, logits)
        edited = [*ids[:150], *ids_of(150, 2)]
        logits = read(session, edited)
        session.truncate(0)
        assert cache.extend(session, edited) == 128
        check_close(session.prefill(edited[128:]), logits)


@pytest.mark.parametrize("arch", sorted(LAYERS))
def test_recurrent_layers_go_on_from_a_state(arch, tmp_path):
    with Engine.load(write_recurrent_model(tmp_path / "m", arch), n_threads=2) as engine:
        ids = np.random.default_rng(3).integers(2, N_VOCAB, 340).tolist()
        session = engine.session(n_ctx=512, n_ubatch=128)
        read(session, ids[:300])
        cache = PromptCache.open(64 * MIB, tmp_path / "cache", 64 * MIB)
        cache.keep(session)
        assert cache._files.flush(10)
        expected = session.prefill(ids[300:])
        for again in (cache, PromptCache.open(0, tmp_path / "cache", 64 * MIB)):
            other = engine.session(n_ctx=512, n_ubatch=128)
            assert again.extend(other, ids) == 300
            check_close(other.prefill(ids[300:]), expected)
            # An edit is read from the newest state before it.
            edited = [*ids[:280], *ids[:40]]
            other.truncate(0)
            assert again.extend(other, edited) == 256
            alone = read(session, edited)
            check_close(other.prefill(edited[256:]), alone)


def test_a_session_that_holds_a_part_gets_the_rest(engine):
    cache, session, ids = PromptCache.open(MIB), opened(engine), ids_of(300)
    logits = read(session, ids)
    cache.keep(session)
    for held in (1, 63, 64, 100, 298):
        session.truncate(0)
        session.prefill(ids[:held])
        assert cache.extend(session, ids) == 299
        check_close(session.prefill(ids[-1:]), logits)


def test_pages_of_a_copy_are_not_written_to(engine):
    """Sessions share pages: what is restored into one is not seen by the other."""
    cache, a, b, ids = PromptCache.open(MIB), opened(engine), opened(engine), ids_of(200)
    other = [*ids[:100], *ids_of(100, 5)]
    read(a, other)
    cache.keep(a)
    logits = read(a, ids)
    b.copy(a, 100)
    a.truncate(199)
    assert cache.extend(b, other) == 199
    check_close(a.prefill(ids[-1:]), logits)


# ---- whose it is ---------------------------------------------------------------------
def test_scopes_methods_types_and_salts_share_nothing(engine):
    cache, ids = PromptCache.open(MIB), ids_of(200)
    session = opened(engine)
    read(session, ids)
    cache.keep(session, "a")
    for scope in ("", "b", "a\0", "A"):
        assert cache.extend(opened(engine), ids, scope) == 0
    for how in ({"type_k": "q8_0"}, {"type_v": "q4_0"}, {"attn": "hip"}, {"prefill": "window"}):
        assert cache.extend(opened(engine, **how), ids, "a") == 0, how
    salted = PromptCache(MIB, salt="exact")
    salted._records, salted._due = cache._records, cache._due
    assert salted.extend(opened(engine), ids, "a") == 0
    assert cache.extend(opened(engine), ids, "a") == 199


def test_models_of_one_shape_share_nothing(engine, tmp_path):
    """As two fine-tunes of one model have."""
    cache, ids = PromptCache.open(MIB, tmp_path / "c", MIB), ids_of(200)
    session = opened(engine)
    read(session, ids)
    cache.keep(session)
    data = bytearray(engine.path.read_bytes())
    data[-2] ^= 1
    (tmp_path / "tuned.gguf").write_bytes(data)
    with Engine.load(tmp_path / "tuned.gguf", n_threads=1) as tuned:
        assert opened(tuned)._fingerprint() == session._fingerprint()
        assert cache.extend(opened(tuned), ids) == 0


def test_adapters_share_nothing(engine, tmp_path):
    shapes = {"blk.0.attn_q": (engine.hp.n_embd, engine.hp.n_embd)}
    lora = tmp_path / "lora.gguf"
    write_lora(lora, "llama", shapes, alpha=40.0)
    cache, ids, sessions = PromptCache.open(MIB), ids_of(200), []
    for scale in (None, 1.0, 0.5):
        files = AdapterFiles() if scale is None else AdapterFiles(((str(lora), scale),))
        sessions.append(opened(engine, adapters=files.load()))
        assert cache.extend(sessions[-1], ids) == 0
        read(sessions[-1], ids)
        cache.keep(sessions[-1])
    for session in sessions:
        session.truncate(0)
        assert cache.extend(session, ids) == 199


def test_what_is_evicted_is_gone_from_the_disk_too(engine, tmp_path):
    cache, session, ids = PromptCache.open(MIB, tmp_path, MIB), opened(engine), ids_of(200)
    read(session, ids)
    cache.keep(session)
    cache.evict(session)
    assert cache._files.flush(10)
    assert not list(tmp_path.rglob("*.page"))
    assert cache.extend(opened(engine), ids) == 0
    assert cache.ram_bytes == 0


def test_a_page_after_another_page_is_another_page(engine):
    cache, session = PromptCache.open(MIB), opened(engine)
    one, two, same, rest = (ids_of(PAGE, i) for i in range(4))
    for prompt in ([*one, *same], [*two, *rest]):
        read(session, prompt)
        cache.keep(session)
    prompt = [*two, *same, *rest]
    logits = read(opened(engine), prompt)
    session.truncate(0)
    assert cache.extend(session, prompt) == PAGE
    check_close(session.prefill(prompt[PAGE:]), logits)


# ---- room ----------------------------------------------------------------------------
def test_a_prefix_that_is_shared_is_kept_once(engine):
    cache, session, head = PromptCache.open(MIB), opened(engine), ids_of(256)
    page = opened(engine)
    read(page, head[:64])
    size = page.pages(0, 1).nbytes
    for i in range(5):
        read(session, [*head, *ids_of(64, 10 + i)])
        cache.keep(session)
    assert cache.ram_bytes == (4 + 5) * size


class Clock:
    """Seconds that pass by hand."""

    def __init__(self, monkeypatch):
        self.now = time.time()
        monkeypatch.setattr(prompt_cache.time, "time", lambda: self.now)

    def pass_by(self, seconds=1.0):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def caches(engine, n_page, folder):
    """Room for so many pages, in RAM or in files."""
    session = opened(engine)
    read(session, ids_of(64))
    size = session.pages(0, 1).nbytes
    room = n_page * size * prompt_cache.ROOM // (prompt_cache.ROOM - 1) + size // 2
    return [PromptCache.open(room), PromptCache.open(0, folder, room + n_page * 128)]


def kept(cache, engine, ids):
    """Tokens of a prompt that the cache has."""
    if cache._files is not None:
        assert cache._files.flush(10)
    return cache._find(cache._root(opened(engine), ""), np.array(ids, np.int32), states=False)[2]


def test_a_long_conversation_outlives_a_swarm_of_short_ones(engine, clock, tmp_path):
    session, long = opened(engine), ids_of(512)
    for cache in caches(engine, 12, tmp_path):
        read(session, long)
        cache.keep(session)
        shorts = [ids_of(64, 100 + i) for i in range(40)]
        for short in shorts:
            clock.pass_by(10)
            read(session, short)
            cache.keep(session)
        assert kept(cache, engine, long) == 512
        assert [kept(cache, engine, short) for short in shorts[:30]] == [0] * 30
        assert kept(cache, engine, shorts[-1]) == 64
        assert cache.n_evicted > 30
        # Unused, it goes once it was not used for as many seconds as it is longer.
        clock.pass_by(512)
        for i in range(12):
            clock.pass_by()
            read(session, ids_of(64, 500 + i))
            cache.keep(session)
        assert kept(cache, engine, long) < 512


def test_the_conversation_unused_longest_goes_whole_before_others_do(engine, clock, tmp_path):
    """Of three of four pages each in room for 12, the first is used again: the second goes."""
    session, three = opened(engine), [ids_of(256, i) for i in range(3)]
    for cache in caches(engine, 12, tmp_path):
        for ids in three:
            clock.pass_by()
            read(session, ids)
            cache.keep(session)
        assert [kept(cache, engine, ids) for ids in three] == [256] * 3
        clock.pass_by()
        session.truncate(0)
        assert cache.extend(session, three[0]) == 255
        clock.pass_by(250)  # what is shorter is due later then
        for i in range(4):  # a page each: the last ones of the second go first
            clock.pass_by()
            read(session, ids_of(64, 50 + i))
            cache.keep(session)
        found = [kept(cache, engine, ids) for ids in three]
        assert found[0] == found[2] == 256
        assert 0 <= found[1] < 256
        assert found[1] % 64 == 0


def test_ram_that_is_small_reads_the_rest_from_files(engine, tmp_path):
    session, texts = opened(engine), [ids_of(200, i) for i in range(40)]
    cache, logits = PromptCache.open(100_000, tmp_path, 64 * MIB), []
    for ids in texts:
        logits.append(read(session, ids))
        cache.keep(session)
        assert cache.ram_bytes <= 100_000
    for ids, expected in zip(texts, logits, strict=True):
        session.truncate(0)
        assert cache.extend(session, ids) == 199
        check_close(session.prefill(ids[-1:]), expected)
    assert cache.ram_bytes <= 100_000


def test_the_folder_stays_within_its_bytes(engine, tmp_path):
    cache, session = PromptCache.open(0, tmp_path, 300_000), opened(engine)
    for i in range(40):
        read(session, ids_of(200, i))
        cache.keep(session)
    assert cache._files.flush(10)
    held = sum(path.stat().st_size for path in tmp_path.rglob("*.page"))
    assert held <= 300_000
    assert cache.disk_bytes == held
    assert cache.n_evicted > 0


def test_a_session_without_room_gets_what_fits(engine):
    cache, session, ids = PromptCache.open(MIB), opened(engine), ids_of(500)
    read(session, ids)
    cache.keep(session)
    small = engine.session(n_ctx=192, n_ubatch=64)
    assert cache.extend(small, ids) == 192


def test_a_hit_of_few_tokens_changes_nothing(engine):
    cache, session, ids = PromptCache.open(MIB), opened(engine), ids_of(100)
    read(session, ids)
    cache.keep(session)
    session.truncate(90)
    assert cache.extend(session, ids, least=16) == 90
    assert session.tokens == ids[:90]
    assert cache.n_hits == 0


# ---- disks ---------------------------------------------------------------------------
def record(seed, n=3000):
    data = np.random.default_rng(seed)
    return Record(
        np.arange(seed, dtype=np.int32), data.integers(0, 256, n, np.uint8), data.bytes(8)
    )


def made(seed, n=3000):
    found = record(seed, n)
    return found._replace(state=np.frombuffer(found.state, np.uint8))


def name_of(i):
    return bytes([i]) * 32


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_records_are_read_as_they_were_written(tmp_path):
    files = PageFiles(tmp_path / "new" / "folder", MIB)
    for i in range(5):
        files.write(name_of(i), made(i), time.time() + 100)
    assert all(same(files.read(name_of(i)), made(i)) for i in range(5))  # written or not
    files.close()
    files = PageFiles(tmp_path / "new" / "folder", MIB)
    assert all(same(files.read(name_of(i)), made(i)) for i in range(5))
    assert files.read(name_of(9)) is None
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o077 == 0
    for path in tmp_path.rglob("*.page"):
        assert path.stat().st_mode & 0o077 == 0
        assert path.stat().st_mtime > time.time() + 50


def test_every_flipped_bit_and_every_cut_is_a_record_that_is_not_there(tmp_path):
    files = PageFiles(tmp_path, MIB)
    files.write(name_of(1), made(3, 200), 1.0)
    assert files.flush(10)
    path = files._path(name_of(1))
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        for data in (damaged, whole[:at], whole + bytes(at + 1)):
            path.write_bytes(data)
            path.chmod(0o600)
            assert files.read(name_of(1)) is None
            assert not path.exists()
    assert files.n_failed == 3 * len(whole)
    other = files._path(name_of(2))
    other.parent.mkdir()
    other.write_bytes(whole)  # under another name it is another's
    other.chmod(0o600)
    assert files.read(name_of(2)) is None


def test_damaged_files_cost_time_and_change_no_logit(engine, tmp_path):
    draw, session, ids = random.Random(1), opened(engine), ids_of(300)
    logits = read(session, ids)
    cache = PromptCache.open(0, tmp_path, MIB)
    cache.keep(session)
    assert cache._files.flush(10)
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.page")}
    assert len(whole) == 5
    for _ in range(60):
        for path, data in whole.items():
            path.write_bytes(data)
            path.chmod(0o600)
        path = draw.choice(sorted(whole))
        data = bytearray(whole[path])
        for _ in range(draw.randint(1, 9)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        session.truncate(0)
        n = PromptCache.open(0, tmp_path, MIB).extend(session, ids)
        assert n < 300
        check_close(session.prefill(ids[n:]), logits)


def test_files_of_another_size_are_not_taken(engine, tmp_path):
    """As where somebody has written a file with a right checksum."""
    session, ids = opened(engine), ids_of(300)
    logits = read(session, ids)
    cache = PromptCache.open(0, tmp_path, MIB)
    names = prompt_cache._chain(cache._root(session, ""), np.array(ids, np.int32))
    cache.keep(session)
    cache._files.write(names[2], made(0, 10), time.time())
    assert cache._files.flush(10)
    session.truncate(0)
    n = cache.extend(session, ids)
    assert n == 128
    check_close(session.prefill(ids[n:]), logits)
    cache._files.write(names[0], made(0, 10), time.time())
    assert cache._files.flush(10)
    session.truncate(0)
    assert cache.extend(session, ids) == 0
    check_close(session.prefill(ids), logits)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_of_a_writer_fails_once(tmp_path, fault):
    """What is there then is whole, later records are written, and there is no litter."""
    folder = tmp_path / "c"

    def run():
        files = PageFiles(folder, MIB)
        for i in range(3):
            files.write(name_of(i), made(i), time.time())
        assert files.flush(10)
        for i in range(3):
            found = files.read(name_of(i))
            assert found is None or same(found, made(i))

    for _, outcome in outcomes(run, fault):
        files = PageFiles(folder, MIB)
        for i in range(3):
            found = files.read(name_of(i))
            assert found is None or same(found, made(i))
        files.write(name_of(0), made(0), time.time())
        assert files.flush(10)
        assert same(files.read(name_of(0)), made(0))
        assert len(list(folder.glob("00/*"))) == 1, outcome
        files.close()
        shutil.rmtree(folder)


def test_a_full_disk_costs_nothing_but_speed(engine, tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    session, ids = opened(engine), ids_of(300)
    logits = read(session, ids)
    cache = PromptCache.open(0, tmp_path, MIB)
    monkeypatch.setattr("tamis.kv.page_files.write_whole", full)
    cache.keep(session)
    assert cache._files.flush(10)
    assert cache.n_failed == 5
    session.truncate(0)
    assert cache.extend(session, ids) == 0
    check_close(session.prefill(ids), logits)
    monkeypatch.undo()
    cache.keep(session)
    assert cache._files.flush(10)
    check_again(cache, session, ids, logits)


def test_a_disk_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("tamis.kv.page_files.MOST_WAITING", 10_000)
    monkeypatch.setattr(PageFiles, "_write", lambda *_: time.sleep(0.3))
    files, begin = PageFiles(tmp_path, MIB), time.monotonic()
    for i in range(50):
        files.write(name_of(i), made(i), time.time())
    assert time.monotonic() - begin < 0.2
    assert files.n_failed >= 40


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="can be changed by others"):
        PageFiles(tmp_path, MIB)


WRITER = """
import sys, time, numpy as np
from pathlib import Path
from tamis.kv.page_files import PageFiles, Record
seed, folder = int(sys.argv[1]), Path(sys.argv[2])
files, draw = PageFiles(folder, 60_000), np.random.default_rng(seed)
def made(i):
    data = np.random.default_rng(i).integers(0, 256, 3000, np.uint8)
    return Record(np.zeros(0, np.int32), data, np.zeros(0, np.uint8))
n = 0
for _ in range(400):
    i = int(draw.integers(0, 40))
    name = bytes([i]) * 32
    found = files.read(name)
    if found is None:
        files.write(name, made(i), time.time() + i)
    else:
        n += 1
        assert np.array_equal(found.data, made(i).data)
        files.touch(name, time.time() + i)
assert files.flush(20)
print(n, files.n_failed)
"""


def test_processes_share_a_folder(tmp_path):
    command = [sys.executable, "-c", WRITER]
    folder = str(tmp_path / "c")
    started = [
        subprocess.Popen([*command, str(seed), folder], stdout=subprocess.PIPE, env=os.environ)
        for seed in range(3)
    ]
    for process in started:
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        n_read, n_failed = map(int, text.split())
        assert n_read > 0
        assert n_failed == 0
