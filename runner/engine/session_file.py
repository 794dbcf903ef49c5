"""A session on disk: a header of JSON and arrays, each with a checksum.

The arrays lie as in memory. The header's checksum is SHA-256, an array's is CRC-32: fast, and
sufficient against disk errors. A checksum does not prove who wrote a file: readers also check the
contents of header and arrays.
"""

import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tamis.platform.private_files import write_whole

MAGIC, VERSION = b"TAMISSES", 2
MAX_HEADER = 1 << 28  # in bytes; a token takes at most 9 of them
_HEAD = struct.Struct("<8sII")  # magic, version, bytes of the header
_ARRAY = struct.Struct("<QI")  # in the table: bytes of an array, its checksum
_DIGEST = 32
_WHOLE = 1  # the version with one digest of the whole file, at its end
_READERS = 4  # threads that check arrays; CRC-32 releases the interpreter's lock
_PART = 1 << 20  # bytes that are read at a time


class SessionFileError(ValueError):
    """A session file is damaged, or was saved for another model."""


def write(path: Path, header: dict[str, Any], arrays: Iterable[np.ndarray]) -> None:
    """Write a file, whole or not at all: header, arrays, their checksums, a digest of the table.

    Raises OSError with this path, not with the temporary name.
    """
    try:
        with write_whole(path) as file:
            text = json.dumps(header).encode()
            head = _HEAD.pack(MAGIC, VERSION, len(text)) + text
            file.write(head)
            table = b""
            for array in arrays:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                table += _ARRAY.pack(len(data), zlib.crc32(data))
                file.write(data)
            file.write(table + struct.pack("<I", len(table)))
            file.write(hashlib.sha256(head + table).digest())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_replaced(path: Path) -> None:
    """Raise SessionFileError if a file is not a session's; an empty one may be replaced."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            return  # a file cannot take its place
        if not stat.S_ISREG(mode) or os.pread(handle, len(MAGIC), 0) not in (b"", MAGIC):
            raise SessionFileError(
                f"{path} is there and is no session file: it stays, name another file"
            )
    finally:
        os.close(handle)


class SessionFile:
    """An open file whose checksums are right. It is read, not mapped, as others may truncate it.

    Raises OSError, SessionFileError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.header, self._at, self._end, self._table = self._checked()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "SessionFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def arrays(self, sizes: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the arrays as uint8 [size]; the sizes must be all of the file's.

        Raises SessionFileError before the first one if they are not, and if the file has changed
        since it was opened.
        """
        held = [size for size, _ in self._table] if self._table is not None else [sum(sizes)]
        expected = list(sizes) if self._table is not None else [self._end - self._at]
        if held != expected:
            raise self.error(
                f"has {len(held)} arrays of {sum(held)} bytes, expected {len(expected)} of "
                f"{sum(expected)}"
            )
        return self._arrays(sizes)

    def error(self, what: str) -> SessionFileError:
        """An error about the content of the file."""
        return SessionFileError(f"{self.path} {what}: save the session again")

    def _arrays(self, sizes: Sequence[int]) -> Iterator[np.ndarray]:
        at = self._at
        for i, size in enumerate(sizes):
            data = self._read(at, size)
            if self._table is not None and zlib.crc32(data) != self._table[i][1]:
                raise SessionFileError(f"{self.path} was changed while it was read: read it again")
            yield np.frombuffer(data, np.uint8)
            at += size

    def _checked(self) -> tuple[dict[str, Any], int, int, list[tuple[int, int]] | None]:
        """The header, the start and end of the arrays, and the table if the version has one."""
        size = os.fstat(self._file).st_size
        damaged = SessionFileError(f"{self.path} is not a session file, or it is damaged")
        if size < _HEAD.size + _DIGEST:
            raise damaged
        magic, version, n_header = _HEAD.unpack(self._read(0, _HEAD.size))
        if magic != MAGIC:
            raise damaged
        if version not in (_WHOLE, VERSION):
            raise SessionFileError(
                f"{self.path} has version {version}, this program reads {VERSION}"
            )
        begin, end, table = _HEAD.size + n_header, size - _DIGEST, b""
        if n_header > MAX_HEADER or begin > end:
            raise damaged
        if version == VERSION:
            (n_table,) = struct.unpack("<I", self._read(end - 4, 4))
            end -= 4 + n_table
            if begin > end or n_table % _ARRAY.size:
                raise damaged
            table = self._read(end, n_table)
        digest = hashlib.sha256(head := self._read(0, begin))
        for part in [table] if version == VERSION else self._parts(begin, end - begin):
            digest.update(part)
        entries = list(_ARRAY.iter_unpack(table))
        if digest.digest() != self._read(size - _DIGEST, _DIGEST):
            raise damaged
        if version == VERSION and not self._intact(begin, end, entries):
            raise damaged
        try:
            header = json.loads(head[_HEAD.size :])
        except (ValueError, RecursionError):
            raise damaged from None
        if not isinstance(header, dict):
            raise damaged
        return header, begin, end, entries if version == VERSION else None

    def _intact(self, at: int, end: int, table: list[tuple[int, int]]) -> bool:
        """Whether every array has its checksum, and no bytes are between or after them."""
        from concurrent.futures import ThreadPoolExecutor

        if at + sum(size for size, _ in table) != end:
            return False
        jobs = []
        with ThreadPoolExecutor(_READERS) as pool:
            for size, expected in table:
                jobs.append((pool.submit(self._sum, at, size), expected))
                at += size
            return all(job.result() == expected for job, expected in jobs)

    def _sum(self, at: int, size: int) -> int:
        crc = 0
        for part in self._parts(at, size):
            crc = zlib.crc32(part, crc)
        return crc

    def _parts(self, at: int, size: int) -> Iterator[bytes]:
        for start in range(at, at + size, _PART):
            yield self._read(start, min(_PART, at + size - start))

    def _read(self, at: int, size: int) -> bytes:
        """Bytes of the file. Raises SessionFileError if it has become shorter."""
        data = bytearray()
        while len(data) < size:
            part = os.pread(self._file, size - len(data), at + len(data))
            if not part:
                raise SessionFileError(f"{self.path} was cut off while it was read: read it again")
            data += part
        return bytes(data)
