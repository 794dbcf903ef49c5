"""Weights in strips on disk: written once, mapped by every process that loads the same model.

A file has its name only when all of it is on the disk; until then it is a model's unfinished one,
which the next process goes on with. It begins with a header whose digest is checked, as are the
file's size and samples of each matrix; one that does not pass is written anew. Writing is a favour:
where it fails, the copies in memory serve as before.
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

from tamis.jit_kernels.compile.store import user_folder
from tamis.platform.memory import available_bytes, map_file, map_over, read_ahead
from tamis.platform.private_files import open_private, private_folder, sync_folder, write_on

LEAST = 512 << 20  # bytes of strips: fewer are copied within half a second
MOST = 64 << 30  # bytes of all files in the folder, unless the caller names a number
SUFFIX, UNFINISHED = ".strips", ".unfinished"
SPARE = 1 << 30  # bytes of the disk that stay free
PART = 16 << 20  # bytes that are written, and become the file's pages, at a time
_MAGIC = b"tamis strips 1\n\0"
_PAGE, _MAX_HEADER = 4096, 1 << 24


def default_folder() -> Path:
    """Where prepared weights are kept: beside the compiled kernels."""
    return user_folder().parent / "weights"


class Prepared(NamedTuple):
    """The file of one model's strips, whether it is there or not."""

    path: Path
    spans: Sequence[tuple[int, int]]  # of each matrix: where its strips begin, how many bytes
    n_bytes: int  # of all strips
    most: int  # bytes of all files in the folder
    model: str  # path of the model, for people

    @staticmethod
    def of(
        folder: Path, key: bytes, spans: Sequence[tuple[int, int]], most: int, model: str
    ) -> "Prepared":
        """The file of a key, which tells model, layout and matrices."""
        name = hashlib.sha256(key + repr(list(spans)).encode()).hexdigest()[:32]
        n_bytes = max((start + size for start, size in spans), default=0)
        return Prepared(folder / f"{name}{SUFFIX}", spans, n_bytes, most, model)

    def map(self) -> np.ndarray | None:
        """The strips, uint8 [n_bytes], read-only; None where no sound file of the user has them."""
        try:
            private_folder(self.path.parent)
            with open_private(self.path) as file:
                handle = file.fileno()
                head = self._checked_head(handle)
                if head is None:
                    return None
                with contextlib.suppress(OSError):
                    os.utime(self.path)  # the last use, by which files are evicted
                strips = map_file(handle, head, self.n_bytes)
                if self.n_bytes < available_bytes() // 2:
                    threading.Thread(
                        target=_read_all, args=(os.dup(handle), head, self.n_bytes), daemon=True
                    ).start()
                return strips
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None  # of a header that another version, or nobody, has written

    def _checked_head(self, handle: int) -> int | None:
        """Where the strips begin in a sound file."""
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
        return first if sums == told["sums"] else None

    def write(self, memory: np.ndarray, stopped: threading.Event) -> bool:
        """Write filled strips; `memory`, pages of huge_zeros, becomes the file's, part by part.

        False where it was stopped, another process writes it, or the disk or the limit has no room.
        What was written until a stop stays, and the next call writes only what it lacks. Raises
        OSError.
        """
        folder = private_folder(self.path.parent)
        if not self._make_room(folder):
            return False
        sums = [_sum(lambda at, n: memory[at : at + n].tobytes(), *span) for span in self.spans]
        told = {"name": self.path.name, "model": self.model, "sums": sums}
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
        """Remove the files that were not used for longest; False where there is no room even so."""
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


class Writing:
    """A thread that writes filled strips, behind what the process does."""

    def __init__(self, prepared: Prepared, memory: np.ndarray) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_write, args=(prepared, memory, self._stopped), daemon=True
        )
        # At exit too: what is written so far stays, for the next load.
        self.stop = weakref.finalize(self, _stop, os.getpid(), self._stopped, self._thread)
        self._thread.start()

    def finish(self) -> None:
        """Wait for its end."""
        self._thread.join()


def _stop(pid: int, stopped: threading.Event, thread: threading.Thread) -> None:
    if pid == os.getpid():
        stopped.set()
        thread.join()


def _write(prepared: Prepared, memory: np.ndarray, stopped: threading.Event) -> None:
    from tamis.platform.cores import spread_files  # not before a model is loaded

    spread_files()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread
        prepared.write(memory, stopped)


def _put(handle: int, at: int, data: np.ndarray) -> None:
    """Have a file hold bytes at a place, on the disk too; it may do so already."""
    if np.array_equal(np.frombuffer(os.pread(handle, len(data), at), np.uint8), data):
        return
    left = data.data
    while len(left):
        n = os.pwrite(handle, left, at)
        at, left = at + n, left[n:]
    os.fdatasync(handle)  # as it goes: it then neither fills memory nor ends in a wait


def _read_all(handle: int, first: int, n_bytes: int) -> None:
    """Have a file read from the disk, in the order in which a prompt reads it."""
    from tamis.platform.cores import spread_files  # not before a model is loaded

    spread_files()
    try:
        for at in range(0, n_bytes, PART):
            read_ahead(handle, first + at, PART)
    finally:
        os.close(handle)


def _sum(read: Callable[[int, int], bytes], start: int, size: int) -> int:
    """A checksum of the first and the last bytes of a matrix."""
    edge = min(size, _PAGE)
    return zlib.crc32(read(start + size - edge, edge), zlib.crc32(read(start, edge)))


def _first(n_header: int) -> int:
    """Where strips begin behind a header of so many bytes."""
    return -(-(len(_MAGIC) + 40 + n_header) // _PAGE) * _PAGE
