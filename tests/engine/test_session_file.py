"""Session files: what is written is read, and damage anywhere is noticed."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from tamis.engine import session_file
from tamis.engine.session_file import SessionFile, SessionFileError

HEADER = {"model": "abc", "tokens": [1, 2, 3]}


def arrays():
    rows = np.dtype([("q", np.int8, 4), ("d", np.float16)])  # as rows of q8_0 are
    return [
        np.arange(12, dtype=np.float16).reshape(3, 4),
        np.zeros((3, 2), rows),
        np.arange(24, dtype=np.float16).reshape(4, 6).swapaxes(0, 1),
    ]


def read(path, sizes):
    with SessionFile(path) as file:
        return file.header, b"".join(array.tobytes() for array in file.arrays(sizes))


def sizes_of(found):
    return [array.nbytes for array in found]


def body(found):
    return b"".join(array.tobytes() for array in found)


@pytest.mark.parametrize("found", [arrays(), [], [np.zeros((0, 2, 3), np.float16)]])
def test_what_is_written_is_read(tmp_path, found):
    session_file.write(tmp_path / "s", HEADER, found)
    assert read(tmp_path / "s", sizes_of(found)) == (HEADER, body(found))
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0


def test_a_file_is_laid_out_as_other_versions_of_the_program_read_it(tmp_path):
    found = arrays()
    session_file.write(tmp_path / "s", HEADER, found)
    text = json.dumps(HEADER).encode()
    head = struct.pack("<8sII", b"TAMISSES", 2, len(text)) + text
    datas = [array.tobytes() for array in found]
    table = b"".join(struct.pack("<QI", len(data), zlib.crc32(data)) for data in datas)
    tail = table + struct.pack("<I", len(table)) + hashlib.sha256(head + table).digest()
    assert (tmp_path / "s").read_bytes() == head + b"".join(datas) + tail


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    session_file.write(tmp_path / "s", HEADER, arrays())
    whole = (tmp_path / "s").read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "d").write_bytes(damaged)
        with pytest.raises(SessionFileError):
            SessionFile(tmp_path / "d")
        (tmp_path / "d").write_bytes(whole[:at])
        with pytest.raises(SessionFileError, match="damaged"):
            SessionFile(tmp_path / "d")


def test_a_file_of_version_1_is_read(tmp_path):
    """One digest of everything, at the end: how sessions were saved before."""
    text = json.dumps(HEADER).encode()
    whole = b"TAMISSES" + struct.pack("<II", 1, len(text)) + text + body(arrays())
    (tmp_path / "s").write_bytes(whole + hashlib.sha256(whole).digest())
    assert read(tmp_path / "s", sizes_of(arrays())) == (HEADER, body(arrays()))
    with pytest.raises(SessionFileError, match="bytes, expected"):
        read(tmp_path / "s", [1])


def test_arrays_of_other_sizes_than_expected_are_refused(tmp_path):
    session_file.write(tmp_path / "s", HEADER, arrays())
    sizes = sizes_of(arrays())
    for wrong in (sizes[:-1], [*sizes, 0], sizes[::-1], [sum(sizes)], []):
        with pytest.raises(SessionFileError, match=r"has 3 arrays of \d+ bytes, expected"):
            read(tmp_path / "s", wrong)


@pytest.mark.parametrize("text", [b"[]", b"7", b"null", b"[" * 100_000, b"{", b"\xff"])
def test_a_header_that_is_no_record_is_damage_whatever_its_checksum_says(tmp_path, text):
    head = b"TAMISSES" + struct.pack("<II", 2, len(text)) + text
    end = struct.pack("<I", 0)
    (tmp_path / "s").write_bytes(head + end + hashlib.sha256(head).digest())
    with pytest.raises(SessionFileError, match="damaged"):
        SessionFile(tmp_path / "s")


def signed(body, table, n_table=None, text=b"{}", n_text=None):
    """A file whose digest is right, whatever its sizes say."""
    n_text, n_table = (len(text) if n_text is None else n_text), n_table or len(table)
    head = b"TAMISSES" + struct.pack("<II", 2, n_text) + text
    digest = hashlib.sha256(head + table).digest()
    return head + body + table + struct.pack("<I", n_table) + digest


@pytest.mark.parametrize(
    ("body", "listed"),
    [(b"", []), (b"ab", [b"ab"]), (b"abc", [b"ab"]), (b"abc", []), (b"ab", [b"ab", b"c"]),
     (b"abc", [b"ab", b"c"]), (b"abc", [b"abc", b""]), (b"", [b"c"])],
)  # fmt: skip
def test_bytes_that_no_array_owns_are_damage(tmp_path, body, listed):
    """Sizes of a table with the right digest add up to what lies before it, or all is refused."""
    table = b"".join(struct.pack("<QI", len(part), zlib.crc32(part)) for part in listed)
    (tmp_path / "s").write_bytes(signed(body, table))
    if b"".join(listed) == body:
        assert read(tmp_path / "s", [len(part) for part in listed]) == ({}, body)
    else:
        with pytest.raises(SessionFileError, match="damaged"):
            SessionFile(tmp_path / "s")


@pytest.mark.parametrize("n_table", [1, 11, 13, 24, 1 << 31, (1 << 32) - 1])
def test_a_table_of_another_size_than_it_says_is_damage(tmp_path, n_table):
    table = struct.pack("<QI", 2, zlib.crc32(b"ab"))
    (tmp_path / "s").write_bytes(signed(b"ab", table, n_table))
    with pytest.raises(SessionFileError, match="damaged"):
        SessionFile(tmp_path / "s")
    (tmp_path / "s").write_bytes(signed(b"ab", table + b"\0"))
    with pytest.raises(SessionFileError, match="damaged"):
        SessionFile(tmp_path / "s")


def test_a_header_has_a_longest_size(tmp_path, monkeypatch):
    text = json.dumps({"tokens": list(range(40))}).encode()
    (tmp_path / "s").write_bytes(signed(b"", b"", text=text))
    monkeypatch.setattr(session_file, "MAX_HEADER", len(text))
    assert read(tmp_path / "s", [])[0]["tokens"][-1] == 39
    monkeypatch.setattr(session_file, "MAX_HEADER", len(text) - 1)
    with pytest.raises(SessionFileError, match="damaged"):
        SessionFile(tmp_path / "s")


@pytest.mark.parametrize("n_left", [0, 30, 60])
def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_and_no_signal(tmp_path, n_left):
    session_file.write(tmp_path / "s", HEADER, arrays())
    with SessionFile(tmp_path / "s") as file:
        found = file.arrays(sizes_of(arrays()))
        os.truncate(tmp_path / "s", n_left)
        with pytest.raises(SessionFileError, match="cut off while it was read"):
            list(found)


def test_a_file_that_is_overwritten_while_it_is_read_is_an_error(tmp_path):
    session_file.write(tmp_path / "s", HEADER, arrays())
    with SessionFile(tmp_path / "s") as file:
        found = file.arrays(sizes_of(arrays()))
        with (tmp_path / "s").open("r+b") as other:
            other.seek(len((tmp_path / "s").read_bytes()) - 120)
            other.write(b"\1" * 40)
        with pytest.raises(SessionFileError, match="changed while it was read"):
            list(found)


def test_what_a_killed_save_left_goes_with_the_next_one(tmp_path):
    code = (
        "import os, sys, numpy as np; from pathlib import Path; from tamis.engine import "
        "session_file as f; os.replace = lambda *names: os.kill(os.getpid(), 9); "
        "f.write(Path(sys.argv[1]), {}, [np.zeros(9)])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    session_file.write(tmp_path / "s", HEADER, arrays())
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    def broken():
        yield arrays()[0]
        raise OSError(28, "No space left on device")

    (tmp_path / "s").write_text("old")
    with pytest.raises(OSError, match="No space") as full:
        session_file.write(tmp_path / "s", HEADER, broken())
    assert full.value.filename == str(tmp_path / "s")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s").read_text() == "old"
    with pytest.raises(FileNotFoundError) as nowhere:
        session_file.write(tmp_path / "nowhere" / "s", HEADER, arrays())
    assert nowhere.value.filename == str(tmp_path / "nowhere" / "s")


@pytest.mark.parametrize(
    ("held", "stays"),
    [
        (None, False),
        (b"", False),
        (session_file.MAGIC, False),
        (session_file.MAGIC + b"more", False),
        (session_file.MAGIC[:-1], True),
        (b"x" + session_file.MAGIC, True),
        (b"my notes", True),
    ],
)
def test_only_a_sessions_file_or_an_empty_one_is_replaced(tmp_path, held, stays):
    path = tmp_path / "s"
    if held is not None:
        path.write_bytes(held)
    if stays:
        with pytest.raises(SessionFileError, match="is no session file: it stays, name another"):
            session_file.check_replaced(path)
        assert path.read_bytes() == held
    else:
        session_file.check_replaced(path)


def test_a_pipe_is_not_replaced_nor_waited_for_and_a_folder_is_left_to_the_system(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SessionFileError, match="pipe is there and is no session file"):
        session_file.check_replaced(tmp_path / "pipe")
    session_file.check_replaced(tmp_path)
