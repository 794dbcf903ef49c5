"""Pages of prompts in files: what is written is read, damage is a page less, all fits."""

import contextlib
import threading
import tracemalloc

import numpy as np
import pytest

from tamis.kv import page_files
from tamis.kv.page_files import PageFiles, Record

SIZE = 1000  # bytes of K and V of these pages
FILE = 64 + 4 + SIZE  # with head and checksum


def name_of(i):
    return bytes([i]) * 32


def record_of(i, n_token=0, n_state=0, size=SIZE):
    rng = np.random.default_rng(i)
    tokens = rng.integers(0, 1 << 30, n_token).astype(np.int32)
    data, state = (rng.integers(0, 256, n).astype(np.uint8) for n in (size, n_state))
    return Record(tokens, data, state)


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def opened(tmp_path):
    """Opens a folder of files; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def opens(n_byte=1 << 20):
            files = PageFiles(tmp_path / "pages", n_byte)
            stack.callback(files.close, 5.0)
            return files

        yield opens


def write(files, *numbers, due=1000.0, **sizes):
    for i in numbers:
        files.write(name_of(i), record_of(i, **sizes), due + i)
    assert files.flush(5.0)


def there(files, numbers):
    return [i for i in numbers if files.has(name_of(i))]


@pytest.mark.parametrize("sizes", [{}, {"n_token": 7}, {"n_token": 3, "n_state": 8}, {"size": 0}])
def test_what_is_written_is_read_by_another_process(opened, sizes):
    files = opened()
    assert files.read(name_of(1)) is None
    write(files, 1, **sizes)
    same(files.read(name_of(1)), record_of(1, **sizes))
    same(opened().read(name_of(1)), record_of(1, **sizes))
    assert (files.n_failed, files.n_evicted) == (0, 0)


def test_a_file_is_read_in_as_much_memory_as_it_has(opened):
    files = opened()
    write(files, 1)
    tracemalloc.start()
    same(files.read(name_of(1)), record_of(1))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def test_a_file_is_where_its_name_says_and_due_when_it_was_said(opened):
    """Other versions of the program find it there."""
    files = opened()
    write(files, 0xAB, due=5000.0, n_token=2, n_state=4)
    path = files.folder / "ab" / ("ab" * 31 + ".page")
    assert path.stat().st_mtime == 5000.0 + 0xAB
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    record, data = record_of(0xAB, n_token=2, n_state=4), path.read_bytes()
    assert data[:8] == b"TAMISPG1"
    assert data[8:40] == name_of(0xAB)
    assert np.frombuffer(data[40:64], np.uint64).tolist() == [8, SIZE, 4]
    assert data[64:-4] == b"".join(part.tobytes() for part in record)
    assert len(data) == FILE + 8 + 4
    assert files.held == len(data)


def test_what_waits_is_there_and_is_counted(opened):
    files = opened()
    gate = threading.Event()
    files._write, write_now = lambda *given: (gate.wait(5), write_now(*given)), files._write
    for i in (1, 2):
        files.write(name_of(i), record_of(i), 1000.0)
    assert there(files, (1, 2, 3)) == [1, 2]
    same(files.read(name_of(2)), record_of(2))
    assert files._n_waiting == 2 * SIZE
    assert not files.flush(0.01)
    files.write(name_of(2), record_of(9), 1000.0)  # in place of the one that waits
    assert files._n_waiting == 2 * SIZE
    files.remove(name_of(1))
    assert files._n_waiting == SIZE
    assert there(files, (1, 2)) == [2]
    gate.set()
    assert files.flush(5.0)
    assert files._n_waiting == 0
    assert files._waiting == {}
    assert files.read(name_of(1)) is None
    same(files.read(name_of(2)), record_of(9))


def test_more_than_may_wait_is_not_written(opened, monkeypatch):
    monkeypatch.setattr(page_files, "MOST_WAITING", 2 * SIZE)
    files = opened()
    gate = threading.Event()
    files._write, write_now = lambda *given: (gate.wait(5), write_now(*given)), files._write
    for i in (1, 2, 3):
        files.write(name_of(i), record_of(i), 1000.0)
    assert there(files, (1, 2, 3)) == [1, 2]
    assert files.n_failed == 1
    gate.set()
    assert files.flush(5.0)
    write(files, 3)
    assert there(files, (1, 2, 3)) == [1, 2, 3]


@pytest.mark.parametrize(("n_byte", "found"), [(SIZE, []), (SIZE - 1, []), (FILE, [1])])
def test_a_record_that_has_no_room_is_not_kept(opened, n_byte, found):
    files = opened(n_byte)
    write(files, 1)
    assert there(files, (1,)) == found
    assert files.n_failed == (n_byte < SIZE)


def test_a_record_is_removed_while_it_is_written(opened):
    files = opened()
    real = page_files._packed

    def packed(name, record):
        files.remove(name)
        return real(name, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_files, "_packed", packed)
        write(files, 1)
    assert there(files, (1,)) == []
    assert not list(files.folder.rglob("*.page"))
    assert files._n_waiting == 0


def test_those_that_are_due_first_go_where_the_folder_is_full(opened):
    """20 files fit; the 21st leaves room for a sixteenth of the bytes."""
    files = opened(20 * FILE)
    write(files, *range(20))
    assert there(files, range(20)) == [*range(20)]
    files.touch(name_of(0), 9000.0)  # it is used again
    files.touch(name_of(1), 500.0)  # what is due later stays so
    write(files, 20)
    kept = 20 * FILE - 20 * FILE // 16
    assert there(files, range(21)) == [0, *range(4, 21)]
    assert files.held == 18 * FILE <= kept
    assert files.n_evicted == 3


def test_files_of_other_processes_count_once_they_are_seen(opened):
    mine, theirs = opened(32 * FILE), opened(1 << 30)
    write(theirs, *range(31))
    assert mine.held == 0
    write(mine, 40)
    assert mine.held == FILE  # it has not looked yet
    write(mine, 41, 42)  # more than a sixteenth since the last look
    assert len(there(mine, range(50))) == 30
    assert opened(1 << 30).flush(5.0)


def test_a_folder_is_counted_when_it_is_opened(opened):
    write(opened(), 1, 2, 3)
    files = opened()
    files.touch(name_of(1), 0.0)
    assert files.flush(5.0)
    assert files.held == 3 * FILE
    small = opened(2 * FILE)
    assert small.flush(5.0)
    small.touch(name_of(3), 0.0)
    assert small.flush(5.0)
    assert there(small, (1, 2, 3)) == [3]  # a part of the room is left
    assert small.n_evicted == 2


def test_other_files_of_the_folder_are_left_alone(opened):
    files = opened(FILE)
    (files.folder / "note").write_text("mine")
    (files.folder / "ab").mkdir()
    (files.folder / "ab" / "note").write_bytes(bytes(5 * FILE))
    write(files, 1)
    assert there(files, (1,)) == [1]
    assert (files.folder / "ab" / "note").exists()
    assert files.held == FILE


DAMAGE = {
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "short": lambda data: data[:67],
    "empty": lambda data: b"",
    "magic": lambda data: b"X" + data[1:],
    "name": lambda data: data[:8] + b"X" + data[9:],
    "size": lambda data: data[:48] + b"\1" + data[49:],
    "tokens": lambda data: data[:40] + bytes([data[40] + 1]) + data[41:],
    "data": lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:],
    "sum": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_no_record_and_goes(opened, damage):
    files = opened()
    write(files, 1, n_token=2)
    path = files._path(name_of(1))
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert files.read(name_of(1)) is None
    assert (files.n_failed, path.exists()) == (1, False)
    write(files, 1)
    same(files.read(name_of(1)), record_of(1))


def test_a_record_of_another_name_is_damage_though_its_sum_is_right(opened):
    files = opened()
    write(files, 1, 2)
    files._path(name_of(1)).write_bytes(files._path(name_of(2)).read_bytes())
    assert files.read(name_of(1)) is None
    same(files.read(name_of(2)), record_of(2))


def test_half_a_token_is_damage(opened):
    """A record whose sum is right, of bytes that no tokens are."""
    files = opened()
    odd = Record(np.zeros(6, np.uint8), np.zeros(0, np.uint8), np.zeros(0, np.uint8))
    path = files._path(name_of(1))
    path.parent.mkdir()
    path.write_bytes(bytes(page_files._packed(name_of(1), odd)))
    path.chmod(0o600)
    assert files.read(name_of(1)) is None
    assert files.n_failed == 1


def test_what_cannot_be_written_is_not_there_and_the_next_is(opened, monkeypatch):
    files = opened()
    broken = [True]
    real = page_files.write_whole

    def failing(*given, **how):
        if broken.pop():
            raise OSError(28, "No space left on device")
        return real(*given, **how)

    broken += [False, True]
    monkeypatch.setattr(page_files, "write_whole", failing)
    write(files, 1)
    assert (there(files, (1,)), files.n_failed, files._n_waiting) == ([], 1, 0)
    write(files, 2)
    assert there(files, (2,)) == [2]
    files.touch(name_of(7), 5.0)  # which is not there: no failure
    assert files.flush(5.0)
    assert files.n_failed == 1


def test_the_thread_ends(opened):
    files = opened()
    write(files, 1)
    files.close()
    assert not files._thread.is_alive()


def test_checksums_are_crc_32c():
    """Of the nine digits, as everywhere: 0xE3069283."""
    assert page_files._sum(np.frombuffer(b"123456789" + bytes(4), np.uint8)) == 0xE3069283
