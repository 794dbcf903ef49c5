"""Session files: what is written is read, and damage anywhere is noticed."""

import hashlib
import json
import struct

import numpy as np
import pytest

from tamis.engine import session_file
from tamis.engine.session_file import SessionFileError

HEADER = {"model": "abc", "tokens": [1, 2, 3]}


def arrays():
    rows = np.dtype([("q", np.int8, 4), ("d", np.float16)])  # as rows of q8_0 are
    return [
        np.arange(12, dtype=np.float16).reshape(3, 4),
        np.zeros((3, 2), rows),
        np.arange(24, dtype=np.float16).reshape(4, 6).swapaxes(0, 1),
    ]


def body(found):
    return b"".join(array.tobytes() for array in found)


@pytest.mark.parametrize("found", [arrays(), [], [np.zeros((0, 2, 3), np.float16)]])
def test_what_is_written_is_read(tmp_path, found):
    session_file.write(tmp_path / "s", HEADER, found)
    header, data = session_file.read(tmp_path / "s")
    assert header == HEADER
    assert bytes(data) == body(found)
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    session_file.write(tmp_path / "s", HEADER, arrays())
    whole = (tmp_path / "s").read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "d").write_bytes(damaged)
        with pytest.raises(SessionFileError):
            session_file.read(tmp_path / "d")
        (tmp_path / "d").write_bytes(whole[:at])
        with pytest.raises(SessionFileError, match="damaged"):
            session_file.read(tmp_path / "d")


def test_a_file_of_version_1_is_read(tmp_path):
    """One digest of everything, at the end: how sessions were saved before."""
    text = json.dumps(HEADER).encode()
    whole = b"TAMISSES" + struct.pack("<II", 1, len(text)) + text + body(arrays())
    (tmp_path / "s").write_bytes(whole + hashlib.sha256(whole).digest())
    header, data = session_file.read(tmp_path / "s")
    assert (header, bytes(data)) == (HEADER, body(arrays()))


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
