"""Pages of prompts in files of a folder, which processes share and which outlive them.

A file holds a record, under a name that is a hash of everything the record depends on. It is
written whole or not at all, and never changed. Its modification time is the time at which it is due
(see engine/prompt_cache): if the folder is full, those due first are removed. A thread writes, so
that no call waits for the disk; a record that cannot be written or read counts as missing.
"""

import contextlib
import os
import queue
import struct
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tamis.jit_kernels.compile.library import shared
from tamis.kv.unit_file import CRC32C, checksums
from tamis.platform.private_files import open_private, private_folder, write_whole

_MAGIC = b"TAMISPG1"
_HEAD = struct.Struct("<8s32sQQQ")  # magic, name, bytes of tokens, data and state
_SUM = struct.Struct("<I")  # CRC-32C of everything before it
_END = ".page"
MOST_WAITING = 256 << 20  # bytes that wait to be written; further records are dropped
ROOM = 16  # a full folder is emptied by one ROOM-th


class Record(NamedTuple):
    """A page of a prompt, or the remainder after its last whole page."""

    tokens: np.ndarray  # int32: those of the remainder; empty for a whole page
    data: np.ndarray  # uint8: the KV cache of a page of all layers
    state: np.ndarray  # uint8: of recurrent layers, after `tokens`; may be empty

    @property
    def n_byte(self) -> int:
        """The bytes of all arrays."""
        return self.tokens.nbytes + self.data.nbytes + self.state.nbytes


class PageFiles:
    """Records by names of 32 bytes, of at most n_byte bytes in total.

    The folder is private to this user. Calls come from one thread. Raises OSError if the folder
    does not exist and cannot be made.
    """

    def __init__(self, folder: Path, n_byte: int) -> None:
        self.folder, self.n_byte = private_folder(folder), n_byte
        self.n_evicted = self.n_failed = 0
        self.held = 0  # bytes in the folder at the last look, plus those written since
        self._since = 0  # bytes written since that look
        self._waiting: dict[bytes, Record] = {}
        self._n_waiting = 0  # bytes
        self._lock = threading.Lock()
        self._todo = queue.Queue[tuple[str, bytes, float] | None]()
        shared().load([CRC32C])
        self._thread = threading.Thread(target=self._run, name="tamis-pages", daemon=True)
        self._thread.start()

    def has(self, name: bytes) -> bool:
        """Whether there is such a record."""
        return name in self._waiting or self._path(name).is_file()

    def read(self, name: bytes) -> Record | None:
        """The record; None if there is none, or its file is damaged, which is then removed."""
        with self._lock:
            if (record := self._waiting.get(name)) is not None:
                return record
        path = self._path(name)
        try:
            with open_private(path) as file:
                data = np.fromfile(file, np.uint8)
        except (OSError, MemoryError):
            return None
        record = _unpacked(name, data)
        if record is None:
            self.n_failed += 1
            with contextlib.suppress(OSError):
                path.unlink()
        return record

    def write(self, name: bytes, record: Record, due: float) -> None:
        """Queue a record for writing; it is worth keeping until `due`, in seconds since 1970.

        If more than MOST_WAITING bytes are queued already it is dropped: the disk is slow, or
        hangs.
        """
        with self._lock:
            if self._n_waiting + record.n_byte > MOST_WAITING or record.n_byte > self.n_byte:
                self.n_failed += 1
                return
            if (older := self._waiting.pop(name, None)) is not None:
                self._n_waiting -= older.n_byte
            self._waiting[name] = record
            self._n_waiting += record.n_byte
        self._todo.put(("write", name, due))

    def touch(self, name: bytes, due: float) -> None:
        """Make a record due not before `due`."""
        self._todo.put(("touch", name, due))

    def remove(self, name: bytes) -> None:
        """Remove a record, even one that is queued or being written."""
        with self._lock:
            if (record := self._waiting.pop(name, None)) is not None:
                self._n_waiting -= record.n_byte
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def flush(self, seconds: float) -> bool:
        """Wait until everything queued is done; returns whether it is."""
        with self._todo.all_tasks_done:
            return self._todo.all_tasks_done.wait_for(
                lambda: not self._todo.unfinished_tasks, seconds
            )

    def close(self, seconds: float = 10.0) -> None:
        """End the thread once everything queued is done, or after some seconds."""
        self.flush(seconds)
        self._todo.put(None)
        self._thread.join(1.0)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        self._make_room()
        for action, name, due in iter(self._todo.get, None):
            try:
                if action == "write":
                    self._write(name, due)
                else:
                    self._touch(name, due)
            except (OSError, MemoryError):
                self.n_failed += action == "write"
            finally:
                self._todo.task_done()

    def _write(self, name: bytes, due: float) -> None:
        with self._lock:
            record = self._waiting.get(name)
        if record is None:  # it was removed, or another one of its name was written
            return
        try:
            path = self._path(name)
            data = _packed(name, record)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with write_whole(path, durable=False) as file:
                file.write(data)
                file.flush()
                os.utime(file.fileno(), (due, due))
            self.held += len(data)
            self._since += len(data)
        finally:
            with self._lock:
                stays = self._waiting.get(name) is record
                if stays:
                    del self._waiting[name]
                    self._n_waiting -= record.n_byte
        if not stays:  # removed meanwhile; a newer record of its name is written next
            path.unlink(missing_ok=True)
        # Other processes write, too: an occasional look counts what they have written.
        if self.held > self.n_byte or self._since > self.n_byte // ROOM:
            self._make_room()

    def _touch(self, name: bytes, due: float) -> None:
        path = self._path(name)
        if path.stat().st_mtime < due:
            os.utime(path, (due, due))

    def _make_room(self) -> None:
        """Remove the files that are due first if there are too many bytes."""
        files = sorted(self._files())
        self.held, self._since = sum(size for _, size, _ in files), 0
        if self.held <= self.n_byte:
            return
        for _, size, path in files:
            if self.held <= self.n_byte - self.n_byte // ROOM:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                self.n_evicted += 1
            self.held -= size

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield each file's due time, bytes and path."""
        for part in _entries(self.folder):
            for entry in _entries(part.path):
                if entry.name.endswith(_END):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime, status.st_size, entry.path

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self.folder / text[:2] / (text[2:] + _END)


def _entries(folder: str | Path) -> Sequence[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _packed(name: bytes, record: Record) -> memoryview:
    """A file's bytes."""
    parts = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in record]
    head = _HEAD.pack(_MAGIC, name, *(part.nbytes for part in parts))
    data = np.concatenate([np.frombuffer(head, np.uint8), *parts, np.zeros(_SUM.size, np.uint8)])
    _SUM.pack_into(data.data, len(data) - _SUM.size, _sum(data))
    return data.data


def _unpacked(name: bytes, data: np.ndarray) -> Record | None:
    """The record that `_packed` wrote; None for other bytes, or for another name."""
    if len(data) < _HEAD.size + _SUM.size:
        return None
    magic, written, n_token, n_data, n_state = _HEAD.unpack_from(data.data)
    at = np.cumsum([_HEAD.size, n_token, n_data, n_state]).tolist()
    if magic != _MAGIC or written != name or n_token % 4 or at[-1] + _SUM.size != len(data):
        return None
    if _SUM.unpack_from(data.data, at[-1]) != (_sum(data),):
        return None
    tokens, pages, state = (data[a:b] for a, b in pairwise(at))
    return Record(tokens.copy().view(np.int32), pages, state)


def _sum(data: np.ndarray) -> int:
    """The CRC-32C of all but the last four bytes."""
    body = data[: -_SUM.size]
    return int(checksums(body.reshape(1, -1), np.zeros(1, np.int64))[0])
