"""Prepared weights (strips) on disk: written once, mapped by every process of the same model.

A file gets its name only when all of it is on disk; until then it is an unfinished one, which the
next process continues. It begins with a header whose digest is checked, as are the file's size and
samples of each matrix; a file that fails is written anew. Each unit of the strips has a checksum,
too: a thread checks them all once they are mapped, and they are checked again if logits are not
finite. A file that fails then is removed, and the model's next step is an error that names it.
Writing is optional: if it fails, the copies in memory serve as before.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tamis.formats.gguf import GGUFError
from tamis.jit_kernels.compile.store import user_folder
from tamis.platform.memory import map_file, map_over
from tamis.platform.private_files import open_private, private_folder, sync_folder, write_on

LEAST = 512 << 20  # bytes of strips: fewer are copied within half a second
MOST = 64 << 30  # bytes of all files in the folder, unless the caller names a number
SUFFIX, UNFINISHED = ".strips", ".unfinished"
SPARE = 1 << 30  # bytes of the disk that stay free
PART = 16 << 20  # bytes that are written, and then mapped from the file, at a time
UNIT = 4 << 20  # bytes that have a checksum of their own
_MAGIC = b"tamis strips 2\n\0"
_PAGE, _MAX_HEADER = 4096, 1 << 24
_EDGE = 4096  # bytes at either end of a matrix that are checked before it is mapped


def default_folder() -> Path:
    """Where prepared weights are kept: beside the compiled kernels."""
    return user_folder().parent / "weights"


class Prepared(NamedTuple):
    """The file of one model's strips, which may not exist."""

    path: Path
    spans: Sequence[tuple[int, int]]  # for each matrix: the offset of its strips, and their bytes
    n_bytes: int  # of all strips
    most: int  # bytes of all files in the folder
    model: str  # the model's path, for messages

    @staticmethod
    def of(
        folder: Path, key: bytes, spans: Sequence[tuple[int, int]], most: int, model: str
    ) -> "Prepared":
        """The file of a key that identifies model, layout and matrices."""
        name = hashlib.sha256(key + repr(list(spans)).encode()).hexdigest()[:32]
        n_bytes = max((start + size for start, size in spans), default=0)
        return Prepared(folder / f"{name}{SUFFIX}", spans, n_bytes, most, model)

    def map(self) -> np.ndarray | None:
        """The strips, uint8 [n_bytes], read-only; None without an intact file of the user."""
        try:
            private_folder(self.path.parent)
            with open_private(self.path) as file:
                handle = file.fileno()
                head = self._checked_head(handle)
                if head is None:
                    return None
                with contextlib.suppress(OSError):
                    os.utime(self.path)  # the last use, by which files are evicted
                return map_file(handle, head.first, self.n_bytes)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None  # another version wrote the header, or it is incomplete

    def _checked_head(self, handle: int) -> "_Head | None":
        """The header of an intact file."""
        fixed = os.pread(handle, len(_MAGIC) + 40, 0)
        if len(fixed) < len(_MAGIC) + 40 or not fixed.startswith(_MAGIC):
            return None
        digest, size = fixed[len(_MAGIC) : -8], int.from_bytes(fixed[-8:], "little")
        if size > _MAX_HEADER:
            return None
        text = os.pread(handle, size, len(fixed))
        if hashlib.sha256(text).digest() != digest:
            return None
        told, first = json.loads(text), _first(size)
        if told["name"] != self.path.name or os.fstat(handle).st_size != first + self.n_bytes:
            return None
        sums = [_sum(lambda at, n: os.pread(handle, n, first + at), *span) for span in self.spans]
        units = [int(sum_) for sum_ in told["units"]]
        whole = sums == told["sums"] and len(units) == -(-self.n_bytes // UNIT)
        return _Head(first, units) if whole else None

    def write(self, memory: np.ndarray, stopped: threading.Event) -> bool:
        """Write filled strips; part by part `memory`, pages of huge_zeros, is mapped to the file.

        Returns False if it was stopped, another process writes the file, or the disk or the limit
        has no room. What was written before a stop stays, and the next call writes only the rest.
        Raises OSError.
        """
        folder = private_folder(self.path.parent)
        if not self._make_room(folder):
            return False
        sums = [_sum(lambda at, n: memory[at : at + n].tobytes(), *span) for span in self.spans]
        told = {"name": self.path.name, "model": self.model, "sums": sums}
        starts = range(0, self.n_bytes, UNIT)
        told["units"] = [zlib.crc32(memory[at : at + UNIT].data) for at in starts]
        text = json.dumps(told).encode()
        head = _MAGIC + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + text
        first = _first(len(text))
        with write_on(self._unfinished) as handle:
            if handle is None:
                return False
            _put(handle, 0, np.frombuffer(head.ljust(first, b"\0"), np.uint8))
            for at in range(0, self.n_bytes, PART):
                if stopped.is_set():
                    return False
                part = memory[at : min(at + PART, self.n_bytes)]
                _put(handle, first + at, part)
                map_over(part, handle, first + at)
            os.ftruncate(handle, first + self.n_bytes)
            os.fsync(handle)
            os.replace(self._unfinished, self.path)
        sync_folder(folder)
        return True

    @property
    def _unfinished(self) -> Path:
        return self.path.with_suffix(UNFINISHED)

    def _make_room(self, folder: Path) -> bool:
        """Remove the least recently used files; returns False if there is no room even so."""
        found, done = [], 0
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                if path == self._unfinished:
                    done = min(status.st_size, self.n_bytes)
                elif path.suffix in (SUFFIX, UNFINISHED):
                    found.append((status.st_mtime_ns, status.st_size, path))
        kept = sum(size for _, size, _ in found)
        total = kept + self.n_bytes
        free = shutil.disk_usage(folder).free - SPARE - (self.n_bytes - done)
        if self.n_bytes > self.most or free + kept < 0:
            return False
        for _, size, path in sorted(found):
            if total <= self.most and free >= 0:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total, free = total - size, free + size
        return total <= self.most and free >= 0


class _Head(NamedTuple):
    """An intact file's header: the offset of its strips, and the checksum of each unit."""

    first: int
    units: list[int]


class Checking:
    """The check of a mapped file's checksums by a thread, which reads all of it ahead as well."""

    def __init__(self, prepared: Prepared) -> None:
        """Start the thread. Raises OSError if the file is gone."""
        self._prepared = prepared
        with open_private(prepared.path) as file:
            self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)
        self._head, self._damaged = prepared._checked_head(self._handle), ""
        self._thread = threading.Thread(
            target=_check_all, args=(weakref.ref(self),), name="tamis-weights", daemon=True
        )
        self._thread.start()

    def check(self, *, thorough: bool = False) -> None:
        """Raise GGUFError if a unit differs from what was written; thorough: read all of it now."""
        if thorough and not self._damaged:
            self._thread.join()
            for unit in range(self.n_unit):
                self.check_unit(unit)
        if self._damaged:
            raise GGUFError(self._damaged, path=self._prepared.path)

    def finish(self) -> None:
        """Wait until all of it has been checked once."""
        self._thread.join()

    @property
    def n_unit(self) -> int:
        """The number of units."""
        return 0 if self._damaged else -(-self._prepared.n_bytes // UNIT)

    def check_unit(self, unit: int) -> None:
        """Compare a unit with its checksum; if they differ, the file is removed."""
        at, head = unit * UNIT, self._head
        if head is not None and zlib.crc32(self._read(head.first + at, at)) == head.units[unit]:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._handle), os.stat(self._prepared.path)):
                self._prepared.path.unlink()
        # last: the file is removed before another thread reads this
        self._damaged = self._damaged or (
            f"the prepared weights of {self._prepared.model} are damaged at byte {at}: the file "
            "was removed, load the model again and it is made anew"
        )

    def _read(self, place: int, at: int) -> bytes:
        try:
            return os.pread(self._handle, min(UNIT, self._prepared.n_bytes - at), place)
        except OSError:
            return b""


def _check_all(checking: "weakref.ref[Checking]") -> None:
    """Check each unit, as long as the weights are in use."""
    from tamis.platform.cores import spread_files  # not needed before a model is loaded

    spread_files()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread
    unit = 0
    while (found := checking()) is not None and unit < found.n_unit:
        found.check_unit(unit)
        unit += 1
        del found  # a reference here would keep it alive


class Writing:
    """A thread that writes filled strips in the background."""

    def __init__(self, prepared: Prepared, memory: np.ndarray) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_write, args=(prepared, memory, self._stopped), daemon=True
        )
        # At exit, too: what was written so far stays, for the next load.
        self.stop = weakref.finalize(self, _stop, os.getpid(), self._stopped, self._thread)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()


def _stop(pid: int, stopped: threading.Event, thread: threading.Thread) -> None:
    if pid == os.getpid():
        stopped.set()
        thread.join()


def _write(prepared: Prepared, memory: np.ndarray, stopped: threading.Event) -> None:
    from tamis.platform.cores import spread_files  # not needed before a model is loaded

    spread_files()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread
        prepared.write(memory, stopped)


def _put(handle: int, at: int, data: np.ndarray) -> None:
    """Write bytes at an offset of a file and flush them, unless they are there already."""
    if np.array_equal(np.frombuffer(os.pread(handle, len(data), at), np.uint8), data):
        return
    left = data.data
    while len(left):
        n = os.pwrite(handle, left, at)
        at, left = at + n, left[n:]
    # flushed part by part: so it neither fills memory nor ends with a long wait
    os.fdatasync(handle)


def _sum(read: Callable[[int, int], bytes], start: int, size: int) -> int:
    """A checksum of the first and last bytes of a matrix."""
    edge = min(size, _EDGE)
    return zlib.crc32(read(start + size - edge, edge), zlib.crc32(read(start, edge)))


def _first(n_header: int) -> int:
    """The offset of strips after a header of n_header bytes."""
    return -(-(len(_MAGIC) + 40 + n_header) // _PAGE) * _PAGE
