"""The file behind keys and values that memory has no room for: numbered units with checksums.

It has no name in its folder, so that it is gone with the process, however that ends. What is read
is checked: a unit that is not what was written is an error and never a key.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MOST_BUFFERS = 1024  # of one call, as Linux has it


class KVFileError(RuntimeError):
    """The disk has no room, or the file is not what was written; the message has the remedy."""


class KVFile:
    """A nameless file in a folder. Raises OSError where none can be made there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        # Read only what is asked for: what lies beside a unit is not what comes next.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def write(self, at: int, buffers: list[memoryview]) -> None:
        """Write buffers from byte `at` on. Raises KVFileError."""
        try:
            for part, first in _parts(buffers):
                size = sum(len(buffer) for buffer in part)
                n = os.pwritev(self._file.fileno(), part, at + first)
                while n < size:  # a disk that is full takes a part first, and then fails
                    rest = memoryview(b"".join(part))[n:]
                    n += os.pwrite(self._file.fileno(), rest, at + first + n)
        except OSError as error:
            raise KVFileError(
                f"keys and values cannot be written to {self.folder}: {error.strerror}; make room "
                "there, or start again with another --kv-dir or a smaller --ctx"
            ) from error

    def read(self, at: int, buffers: list[memoryview]) -> None:
        """Fill buffers from byte `at` on. Raises KVFileError."""
        try:
            for part, first in _parts(buffers):
                if os.preadv(self._file.fileno(), part, at + first) < sum(map(len, part)):
                    raise self.damaged()
        except OSError as error:
            raise KVFileError(
                f"keys and values cannot be read from {self.folder}: {error.strerror}"
            ) from error

    def damaged(self) -> KVFileError:
        """The error of a file that somebody else wrote to."""
        return KVFileError(
            f"the file of keys and values in {self.folder} was changed: the context of this "
            "session is lost; start again (/reset) or load a saved one"
        )

    def forget_cached(self) -> None:
        """Let the system drop its copies in memory, so that a measurement reads the disk."""
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give back the space on disk."""
        self._file.close()


class Units:
    """A part of a file, from byte `start` on: n_unit units of `size` bytes."""

    def __init__(self, file: KVFile, start: int, n_unit: int, size: int) -> None:
        self._file, self._start, self._size = file, start, size
        word = next(
            t for t in (np.uint64, np.uint32, np.uint16) if size % np.dtype(t).itemsize == 0
        )
        self._sums = np.zeros(n_unit, word)

    def write(self, first: int, pages: list[np.ndarray]) -> None:
        """Units first .. from pages, each uint8 [n, size]. Raises KVFileError."""
        self._file.write(self._start + first * self._size, [_bytes(page) for page in pages])
        for page in pages:
            self._sums[first : first + len(page)] = self._summed(page)
            first += len(page)

    def read(self, numbers: np.ndarray, memory: np.ndarray, places: np.ndarray) -> None:
        """Units `numbers`, int64 ascending, to rows `places` of memory, uint8 [n, size].

        Raises KVFileError.
        """
        jumps = np.diff(numbers) != 1
        buffers = _cuts(jumps | (np.diff(places) != 1), len(numbers))
        data, size = _bytes(memory), self._size
        call: list[memoryview] = []
        for first, last in buffers:
            at = int(places[first]) * size
            call.append(data[at : at + (last - first) * size])
            if last == len(numbers) or jumps[last - 1]:
                end = self._start + (int(numbers[last - 1]) + 1) * size
                self._file.read(end - sum(map(len, call)), call)
                call = []
        if (self._summed(memory[places]) != self._sums[numbers]).any():
            raise self._file.damaged()

    def _summed(self, units: np.ndarray) -> np.ndarray:
        return np.add.reduce(units.view(self._sums.dtype), axis=1, dtype=self._sums.dtype)


def _bytes(units: np.ndarray) -> memoryview:
    return units.reshape(-1).data


def _cuts(jumps: np.ndarray, n: int) -> list[tuple[int, int]]:
    """The runs of n items, a new one after each jump."""
    ends = [*(np.flatnonzero(jumps) + 1).tolist(), n]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _parts(buffers: list[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """As many buffers as one call takes, and how many bytes are before them."""
    first = 0
    for i in range(0, len(buffers), MOST_BUFFERS):
        part = buffers[i : i + MOST_BUFFERS]
        yield part, first
        first += sum(map(len, part))
