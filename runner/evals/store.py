"""Results on disk: one JSON object per line, each durable once it is written.

A process that is killed loses only the sample in progress; the next process removes its incomplete
line if it begins like a result. Two processes cannot write to one folder.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tamis.platform.locks import try_lock

FILE = "results.jsonl"
_HEAD = b'{"key": "'  # the beginning of every line that this module writes


class StoreError(RuntimeError):
    """The folder's results are damaged, or another process is writing them."""


class Store:
    """The results of one folder, open for appending."""

    def __init__(self, folder: str | Path) -> None:
        """Open a folder, which is made if it does not exist. Raises StoreError, OSError."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if not try_lock(self._file):
            os.close(self._file)
            raise StoreError(f"another process is writing {self.path}: wait for it")
        try:
            self.rows, size = _read(self.path)
            if size < os.fstat(self._file).st_size:
                os.ftruncate(self._file, size)
            _sync_folder(folder)
        except BaseException:
            os.close(self._file)
            raise
        self._keys = {row["key"] for row in self.rows}

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Append a result and return it with its key; it is then on disk.

        After an OSError nothing was added. An interrupt leaves the whole line or nothing of it.
        """
        assert key not in self._keys, f"{key} is there already"
        whole = {"key": key, **row}
        line = json.dumps(whole, ensure_ascii=False).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except BaseException as error:
            if isinstance(error, OSError) or os.fstat(self._file).st_size < size + len(line):
                os.ftruncate(self._file, size)
            else:
                self._keep(whole)
            raise
        self._keep(whole)
        return whole

    def _keep(self, row: dict[str, Any]) -> None:
        self._keys.add(row["key"])
        self.rows.append(row)

    def close(self) -> None:
        """Release the folder for other processes."""
        os.close(self._file)


def read_results(folder: str | Path) -> list[dict[str, Any]]:
    """The results of a folder without an incomplete last line. Raises StoreError, OSError."""
    return _read(Path(folder) / FILE)[0]


def key_of(settings: Mapping[str, Any]) -> str:
    """The key of a result: a digest of everything that it depends on."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The results, and the number of bytes of the file that are whole lines."""
    data = path.read_bytes()
    size = data.rfind(b"\n") + 1
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(data[:size].split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            key = row["key"]
            if not isinstance(key, str):
                raise TypeError("a key is a text")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{path}: line {number} is no result: take it out to go on without it"
            ) from error
        if key in rows:
            raise StoreError(f"{path}: line {number} has a result that was there before: {key}")
        rows[key] = row
    _check_cut(path, data[size:], first=not size)
    return list(rows.values()), size


def _check_cut(path: Path, line: bytes, *, first: bool) -> None:
    """Raise StoreError for an incomplete last line that is not the beginning of a result.

    The first few bytes of a file do not count if any JSON could begin with them; zeros are what a
    power failure leaves.
    """
    begun = line.startswith(_HEAD)
    if line and not begun and (first or not (_HEAD.startswith(line) or not line.strip(b"\0"))):
        raise StoreError(f"{path}: its last line is no result: name another folder")


def _sync_folder(folder: Path) -> None:
    """Flush the folder, so that a new file survives a power failure, as its lines do."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
