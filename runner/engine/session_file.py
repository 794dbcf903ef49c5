"""A session on disk: a header of JSON and arrays, each with a checksum.

The arrays lie as in memory, so that a file is mapped and read once, into the pages of a session.
The header's checksum is SHA-256, an array's is CRC-32: fast, and enough for a disk's mistakes.
"""

import hashlib
import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

MAGIC, VERSION = b"TAMISSES", 2
_HEAD = struct.Struct("<8sII")  # magic, version, bytes of the header
_DIGEST = 32
_WHOLE = 1  # the version with one digest of all, at the end
_READERS = 4  # threads that check arrays; CRC-32 lets go of the interpreter


class SessionFileError(ValueError):
    """A session file is damaged, or was saved for another model."""


def write(path: Path, header: dict[str, Any], arrays: Iterable[np.ndarray]) -> None:
    """Write a file, whole or not at all: header, arrays, their checksums, a digest of the rest.

    Raises OSError with this path, not with the name that the file has until it is whole.
    """
    try:
        _write(path, header, arrays)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(path: Path, header: dict[str, Any], arrays: Iterable[np.ndarray]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            text = json.dumps(header).encode()
            head = _HEAD.pack(MAGIC, VERSION, len(text)) + text
            file.write(head)
            table = b""
            for array in arrays:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                table += struct.pack("<QI", len(data), zlib.crc32(data))
                file.write(data)
            file.write(table + struct.pack("<I", len(table)))
            file.write(hashlib.sha256(head + table).digest())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path) -> tuple[dict[str, Any], memoryview]:
    """The header and the bytes of all arrays, checked; the bytes are a mapping of the file.

    Raises OSError, SessionFileError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b"")
    damaged = SessionFileError(f"{path} is not a session file, or it is damaged")
    if size < _HEAD.size + _DIGEST or data[: len(MAGIC)] != MAGIC:
        raise damaged
    _, version, n_header = _HEAD.unpack_from(data)
    if version not in (_WHOLE, VERSION):
        raise SessionFileError(f"{path} has version {version}, this program reads {VERSION}")
    begin, end = _HEAD.size + n_header, size - _DIGEST
    if version == _WHOLE:
        signed: Iterable[memoryview] = [data[:end]]
    else:
        (n_table,) = struct.unpack_from("<I", data, end - 4)
        end -= 4 + n_table
        signed = [data[:begin], data[max(end, 0) : max(end, 0) + n_table]]
    digest = hashlib.sha256()
    for part in signed:
        digest.update(part)
    if begin > end or digest.digest() != data[size - _DIGEST :]:
        raise damaged
    if version == VERSION and not _intact(data[begin:end], data[end : end + n_table]):
        raise damaged
    return json.loads(bytes(data[_HEAD.size : begin])), data[begin:end]


def _intact(data: memoryview, table: memoryview) -> bool:
    """Whether every array has its checksum, and nothing is between or after them."""
    at, jobs = 0, []
    with ThreadPoolExecutor(_READERS) as pool:
        for size, expected in struct.iter_unpack("<QI", table):
            jobs.append((pool.submit(zlib.crc32, data[at : at + size]), expected))
            at += size
        return at == len(data) and all(job.result() == expected for job, expected in jobs)
