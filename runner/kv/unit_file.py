"""The file of a KV cache that exceeds memory: numbered units with checksums.

It has no name in its folder, so that it vanishes with the process in any case. Reads are checked: a
unit that differs from what was written is an error and never used as keys.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tamis.jit_kernels.compile.library import shared
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.platform.memory import evict_file, read_at_random

CRC32C = KernelSpec(ops.CRC32C, ())
MOST_BUFFERS = 1024  # in one call, the limit of Linux


class KVFileError(RuntimeError):
    """The disk has no room, or the file was changed; the message has the remedy."""


class KVFile:
    """A nameless file in a folder. Raises OSError if none can be made there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        # Read only what is asked for: what lies beside a unit is not what comes next.
        read_at_random(self._file.fileno())

    def write(self, at: int, buffers: list[memoryview]) -> None:
        """Write buffers from byte `at` on. Raises KVFileError."""
        try:
            for part, first in _parts(buffers):
                self._all(os.pwritev, part, at + first)
        except OSError as error:
            raise KVFileError(
                f"the KV cache cannot be written to {self.folder}: {error.strerror}; make room "
                "there, or start again with another kv_dir or a smaller n_ctx"
            ) from error

    def read(self, at: int, buffers: list[memoryview]) -> None:
        """Fill buffers from byte `at` on. Raises KVFileError."""
        try:
            for part, first in _parts(buffers):
                if not self._all(os.preadv, part, at + first):
                    raise self.damaged()
        except OSError as error:
            raise KVFileError(
                f"the KV cache cannot be read from {self.folder}: {error.strerror}"
            ) from error

    def _all(self, move: Callable[..., int], buffers: list[memoryview], at: int) -> bool:
        """Call `move` until all bytes are moved; returns False if the file ends before.

        A disk that is full accepts a part first, and then fails; a signal shortens a call.
        """
        n, size = 0, sum(map(len, buffers))
        while n < size:
            done = move(self._file.fileno(), _after(buffers, n), at + n)
            if done == 0:
                return False
            n += done
        return True

    @property
    def handle(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def damaged(self) -> KVFileError:
        """The error of a file that another program wrote to."""
        return KVFileError(
            f"the KV cache's file in {self.folder} was changed: the context of this "
            "session is lost; start again (/reset) or load a saved one"
        )

    def drop_cached(self) -> None:
        """Drop the system's cached copies, so that a measurement reads the disk."""
        os.fdatasync(self._file.fileno())
        evict_file(self._file.fileno())

    def close(self) -> None:
        """Release the space on disk."""
        self._file.close()


class Units:
    """A part of a file, from byte `start` on: n_unit units of `size` bytes.

    Raises CompileError if there is no kernel for their checksums.
    """

    def __init__(self, file: KVFile, start: int, n_unit: int, size: int) -> None:
        self._file, self.start, self._size = file, start, size
        self.sums = np.zeros(n_unit, np.uint32)  # checksums
        shared().load([CRC32C])

    def write(self, first: int, pages: list[np.ndarray]) -> None:
        """Write units from `first` on from pages, each uint8 [n, size]. Raises KVFileError."""
        self._file.write(self.start + first * self._size, [_bytes(page) for page in pages])
        for page in pages:
            rows = np.arange(len(page), dtype=np.int64)
            self.sums[first : first + len(page)] = checksums(page, rows)
            first += len(page)

    def read(self, numbers: np.ndarray, memory: np.ndarray, rows: np.ndarray) -> None:
        """Read units `numbers`, int64 ascending, to these rows of memory, uint8 [n, size].

        Raises KVFileError.
        """
        jumps = np.not_equal(np.diff(numbers), 1)
        buffers = _cuts(jumps | np.not_equal(np.diff(rows), 1), len(numbers))
        data, size = _bytes(memory), self._size
        call: list[memoryview] = []
        for first, last in buffers:
            at = int(rows[first]) * size
            call.append(data[at : at + (last - first) * size])
            if last == len(numbers) or jumps[last - 1]:
                end = self.start + (int(numbers[last - 1]) + 1) * size
                self._file.read(end - sum(map(len, call)), call)
                call = []
        if not np.array_equal(checksums(memory, rows), self.sums[numbers]):
            raise self._file.damaged()


def checksums(memory: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """CRC-32C of rows, int64 [n], of memory, uint8 [.., size]: uint32 [n]. Releases the GIL."""
    assert memory.flags.c_contiguous
    rows = np.ascontiguousarray(rows, np.int64)
    assert not len(rows) or 0 <= rows.min() <= rows.max() < len(memory)
    sums = np.zeros(len(rows), np.uint32)
    fields = memory.ctypes.data, rows.ctypes.data, sums.ctypes.data, len(rows), memory.shape[1]
    args = np.array([0, *fields], np.int64)  # 0: see layout.TURNS
    shared().function(CRC32C)(0, 1, args.ctypes.data)
    return sums


def _bytes(units: np.ndarray) -> memoryview:
    return units.reshape(-1).data


def _after(buffers: list[memoryview], n: int) -> list[memoryview]:
    """The buffers without their first n bytes."""
    for i, buffer in enumerate(buffers):
        if n < len(buffer):
            return [buffer[n:], *buffers[i + 1 :]]
        n -= len(buffer)
    return []


def _cuts(jumps: np.ndarray, n: int) -> list[tuple[int, int]]:
    """The runs of n items; a new one begins after each jump."""
    ends = [*(np.flatnonzero(jumps) + 1).tolist(), n]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _parts(buffers: list[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """Yield as many buffers as one call takes, and the number of bytes before them."""
    first = 0
    for i in range(0, len(buffers), MOST_BUFFERS):
        part = buffers[i : i + MOST_BUFFERS]
        yield part, first
        first += sum(map(len, part))
