"""Weights kept on disk: the same model without a copy, and nothing else is ever mapped."""

import errno
import hashlib
import os
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from matmul_cases import weights
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.formats.gguf import GGUFError
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.compile.library import KernelLibrary
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import QTensor
from tamis.model import prepared
from tamis.model.prepared import Prepared
from tamis.model.repack import Preparing, in_strips
from tamis.platform.memory import huge_zeros
from tamis.platform.private_files import write_on
from tamis.sampling.base import LogitsError
from tamis.sampling.chain import SamplerParams

SPANS = [(0, 5000), (5056, 9000)]  # of two matrices


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model that is small, and prepared all the same."""
    monkeypatch.setattr("tamis.engine.engine.Preparing", partial(Preparing, least=1))
    return write_tiny_model(tmp_path / "tiny.gguf", TinySpec(type_="Q4_0"))


def logits(path, folder, **more):
    """Whether the weights came from a file, whether there is one then, and what they give."""
    engine = Engine.load(path, n_threads=2, prepare=folder, **more)
    mapped = len(engine._filling._program) == 0
    session = engine.session(n_ctx=64)
    kept = engine.prepared()  # the weights are the file's pages from here on, in the first one too
    found = [session.prefill(list(range(1, 30))), session.decode(3)]
    engine.close()
    return mapped, kept, found


def test_a_second_load_copies_nothing_and_gives_the_same_bits(model, tmp_path):
    folder = tmp_path / "weights"
    (first, kept, a), (second, _, b) = logits(model, folder), logits(model, folder)
    assert (first, kept, second) == (False, True, True)
    np.testing.assert_array_equal(a, b)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_false_keeps_nothing_and_small_models_need_nothing(model, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "tamis" / "weights"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert prepared.default_folder() == folder
    assert logits(model, False)[:2] == (False, False)
    assert logits(model, folder, prepare_max=1000)[:2] == (False, False)
    monkeypatch.undo()  # as models are prepared: only large ones
    assert logits(model, folder)[:2] == (False, False)
    assert not folder.exists() or not list(folder.iterdir())


def test_another_file_or_another_level_is_another_copy(model, tmp_path):
    folder, level = tmp_path / "weights", KernelLibrary(level="generic")
    logits(model, folder)
    status = os.stat(model)
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # written to
    assert not logits(model, folder)[0]
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not logits(copy, folder)[0]
    assert CpuBackend(1, level).layout != CpuBackend(1).layout
    assert len(list(folder.iterdir())) == 3


def strips(seed=0):
    _, memory = huge_zeros((14056,), np.dtype(np.uint8))
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory))
    return memory


def file_of(folder, key=b"a", most=1 << 30):
    return Prepared.of(folder, key, SPANS, most, "m.gguf")


def written(folder, key=b"a", most=1 << 30):
    file = file_of(folder, key, most)
    return file, file.write(strips(), threading.Event())


def test_what_was_written_is_mapped_by_writer_and_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "PART", 8192)
    memory, file = strips(), file_of(tmp_path)
    assert file.write(memory, threading.Event())
    np.testing.assert_array_equal(memory, strips())
    np.testing.assert_array_equal(file.map(), strips())
    mapped = Path("/proc/self/maps").read_text().splitlines()
    begins = {int(line.split("-")[0], 16) for line in mapped if str(file.path) in line}
    assert memory.ctypes.data in begins  # both parts of it, which the system may show as one


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(at):
    def damage(path):
        with path.open("r+b") as file:
            file.seek(at if at >= 0 else path.stat().st_size + at)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    return damage


def lent(path):
    path.chmod(0o666)


def linked(path):
    path.rename(path.with_suffix(".there"))
    path.symlink_to(path.with_suffix(".there"))


def headed(text):
    """Put another header, with its digest, in the place of a file's."""

    def damage(path):
        digest = hashlib.sha256(text).digest()
        head = prepared._MAGIC + digest + len(text).to_bytes(8, "little") + text
        path.write_bytes(head + path.read_bytes()[len(head) :])

    return damage


HEADERS = [b"\xff", b"[" * 9999, b"[]", b"{}", b'{"name": 1}', b"1e999"]


def foreign(path):
    other, _ = written(path.parent, b"b")
    other.path.replace(path)


@pytest.mark.parametrize(
    "damage",
    [cut, flip(3), flip(20), flip(60), flip(4096 + 10), flip(-1), lent, linked, foreign]
    + [headed(text) for text in HEADERS],
)
def test_a_damaged_or_foreign_file_is_not_mapped(damage, tmp_path):
    file, _ = written(tmp_path)
    assert file.map() is not None
    damage(file.path)
    assert file.map() is None
    assert file.write(strips(), threading.Event())
    np.testing.assert_array_equal(file.map(), strips())


def test_damage_in_the_middle_is_found_and_the_file_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "UNIT", 512)
    file, _ = written(tmp_path)
    sound = prepared.Checking(file)
    sound.finish()
    sound.check(thorough=True)
    flip(-4500)(file.path)  # neither of the first nor of the last bytes of a matrix
    assert file.map() is not None
    with pytest.raises(GGUFError, match=r"of m.gguf are damaged at byte 9\d\d\d: the file was"):
        sound.check(thorough=True)  # mapped before, damaged since
    assert not file.path.exists()
    assert file.map() is None
    with pytest.raises(GGUFError, match="damaged"):
        sound.check()


@pytest.fixture
def middle(monkeypatch):
    """The place in a file of the middle of its longest matrix, as the last load had them.

    Damage at a matrix's ends is found before the file is mapped, and is another test's.
    """
    monkeypatch.setattr(prepared, "_EDGE", 16)
    spans, map_ = [], Prepared.map

    def recorded(self):
        spans[:] = self.spans
        return map_(self)

    def find(file):
        start, size = max(spans, key=lambda span: span[1])
        assert size > 4 * 64
        return file.stat().st_size - max(map(sum, spans)) + start + size // 2

    monkeypatch.setattr(Prepared, "map", recorded)
    return find


@pytest.mark.parametrize("n_byte", [1, 64])
def test_damaged_weights_give_an_error_that_names_them_and_are_made_anew(
    model, tmp_path, middle, n_byte
):
    folder = tmp_path / "weights"
    _, _, right = logits(model, folder)
    (file,) = folder.iterdir()
    with file.open("r+b") as damaged:
        damaged.seek(middle(file))
        damaged.write(bytes(b ^ 0x55 for b in os.pread(damaged.fileno(), n_byte, damaged.tell())))
    engine = Engine.load(model, n_threads=2, prepare=folder)
    session = engine.session(n_ctx=64)
    with pytest.raises(GGUFError, match=r"prepared weights of .*tiny.gguf are") as found:
        session.check_weights()
    assert str(file) in str(found.value)
    with pytest.raises(GGUFError, match="prepared weights"):
        session.prefill([1, 2, 3])
    engine.close()
    assert not file.exists()
    mapped, kept, again = logits(model, folder)
    assert (mapped, kept) == (False, True)
    np.testing.assert_array_equal(again, right)


def test_the_damage_is_found_where_nobody_asks(model, tmp_path, middle):
    folder = tmp_path / "weights"
    logits(model, folder)
    (file,) = folder.iterdir()
    flip(middle(file))(file)
    engine = Engine.load(model, n_threads=2, prepare=folder)
    assert len(engine._filling._program) == 0, "mapped: what is damaged is not in a sample"
    session = engine.session(n_ctx=64)
    deadline = time.monotonic() + 20

    def steps():
        while time.monotonic() < deadline:
            session.truncate(0)
            session.prefill([1, 2, 3])

    with pytest.raises(GGUFError, match="damaged"):
        steps()
    engine.close()


def test_logits_that_are_not_finite_have_the_weights_read_again(model, tmp_path, monkeypatch):
    engine = Engine.load(model, n_threads=2, prepare=tmp_path / "weights")
    session, read = engine.session(n_ctx=64), []
    monkeypatch.setattr(engine.loaded.file, "checks", [lambda thorough: read.append(thorough)])
    monkeypatch.setattr(session, "prefill", lambda *_: np.full(engine.hp.n_vocab, np.nan, "f4"))
    with pytest.raises(LogitsError):
        list(session.generate([1, 2], SamplerParams()))
    assert True in read
    engine.close()


def test_a_folder_of_others_is_not_used(tmp_path):
    file, _ = written(tmp_path)
    tmp_path.chmod(0o777)
    assert file.map() is None
    with pytest.raises(OSError, match="can be changed by others"):
        file.write(strips(), threading.Event())


def test_the_files_not_used_for_longest_make_room(tmp_path):
    one = file_of(tmp_path).n_bytes
    for age, key in enumerate([b"a", b"b", b"c"]):
        file, _ = written(tmp_path, key)
        os.utime(file.path, ns=(age, age))
    assert file_of(tmp_path, b"a").map() is not None  # used now
    most = 3 * one + 3 * 4096  # with their headers
    assert written(tmp_path, b"d", most)[1]
    left = [key for key in (b"a", b"b", b"c", b"d") if file_of(tmp_path, key).path.exists()]
    assert left == [b"a", b"c", b"d"]
    assert not written(tmp_path, b"e", one - 1)[1]


def test_a_full_disk_leaves_nothing_and_the_strips_in_memory(tmp_path, monkeypatch):
    free = type("Usage", (), {"free": prepared.SPARE + 100})
    monkeypatch.setattr(prepared.shutil, "disk_usage", lambda _: free)
    assert not written(tmp_path)[1]
    monkeypatch.undo()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepared.os, "fdatasync", full)
    memory = strips()
    with pytest.raises(OSError, match="No space"):
        file_of(tmp_path).write(memory, threading.Event())
    np.testing.assert_array_equal(memory, strips())
    assert not list(tmp_path.iterdir())


def test_one_of_two_writers_writes(tmp_path):
    file = file_of(tmp_path)
    with write_on(file.path.with_suffix(prepared.UNFINISHED)) as other:
        assert other is not None
        assert not file.write(strips(), threading.Event())
    assert file.write(strips(), threading.Event())
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


@pytest.mark.parametrize("damage", [lambda path: None, cut, flip(-1), flip(3), flip(60)])
def test_the_next_writer_goes_on_where_one_was_stopped(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(prepared, "PART", 4096)
    stopped, sync, memory, n_sync = threading.Event(), os.fdatasync, strips(), []
    monkeypatch.setattr(prepared.os, "fdatasync", lambda handle: (sync(handle), n_sync.append(1)))
    monkeypatch.setattr(stopped, "is_set", lambda: len(n_sync) == 3)  # a header and two parts
    file = file_of(tmp_path)
    assert not file.write(memory, stopped)
    assert file.map() is None
    np.testing.assert_array_equal(memory, strips())  # a part of it is the file's
    (left,) = tmp_path.iterdir()
    damage(left)
    assert file.write(strips(), threading.Event())
    assert len(n_sync) == 3 + 2 + (damage.__name__ != "<lambda>"), "two parts, and what was damaged"
    np.testing.assert_array_equal(file.map(), strips())
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


def test_files_of_strips_have_the_layout_that_this_version_reads():
    """A change of what REPACK writes raises ops.STRIP_LAYOUT, and this digest follows."""
    digest, backend = hashlib.sha256(), CpuBackend(1)
    for type in dict.fromkeys(ops.STRIP_TYPES.values()):
        data, _ = weights(type, np.random.default_rng(0), 32, 512)
        copies = in_strips([QTensor(data, type, 32, 512)], backend)
        backend.run(backend.link(copies.program))
        digest.update(copies.matrices[0].data)
    backend.close()
    assert (ops.STRIP_LAYOUT, digest.hexdigest()[:16]) == (1, "e3d74e5516cd2a01")
