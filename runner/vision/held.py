"""The rows of pictures that sequences may read, by the numbers that stand for them among token ids.

A row of a picture is a negative number among the token ids of a prompt: 31 bits of a digest of the
picture, the encoder and the row. Equal pictures have equal numbers, so that whatever compares
prompts by their ids (prefix reuse, caches on disk) compares pictures, too.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tamis.vision.family import Rows

MOST_BYTES = 1 << 30  # of rows that are held; those of the pictures used longest ago are dropped


class Run(NamedTuple):
    """Neighbouring ids of a prompt: of text, or of one picture."""

    start: int
    stop: int
    rows: Rows | None = None  # of the picture; None: text
    first: int = 0  # the picture's row at `start`


def row_ids(key: bytes, n: int) -> list[int]:
    """The ids of the n rows of a picture, from its digest."""
    digest = hashlib.shake_256(key).digest(4 * n)
    ids: list[int] = (-1 - (np.frombuffer(digest, "<u4") >> 1).astype(np.int64)).tolist()
    return ids


class Pictures:
    """Rows of pictures by their ids; several threads may use it."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most, self._n_bytes = most, 0
        self._held: OrderedDict[bytes, tuple[Rows, list[int]]] = OrderedDict()
        self._at: dict[int, tuple[bytes, int]] = {}  # by id: the picture's key and the row
        self._given: set[int] = set()  # ids of all pictures, also of those that are not held now
        self._lock = threading.Lock()

    def stand_in(self, ids: Sequence[int]) -> bool:
        """Whether any of these ids stands for a row of a picture, held or not."""
        return not self._given.isdisjoint(ids)

    def hold(self, ids: Sequence[int]) -> bool:
        """Whether the rows of all ids below 0 are held."""
        with self._lock:
            return all(number in self._at for number in ids if number < 0)

    @property
    def has_any(self) -> bool:
        """Whether rows of a picture are held."""
        return bool(self._held)

    def add(self, rows: Rows) -> list[int]:
        """Hold the rows of a picture; returns their ids."""
        with self._lock:
            if rows.key in self._held:
                self._held.move_to_end(rows.key)
                return list(self._held[rows.key][1])
            ids = row_ids(rows.key, len(rows.values))
            self._held[rows.key] = rows, ids
            self._given.update(ids)
            self._at |= {number: (rows.key, i) for i, number in enumerate(ids)}
            self._n_bytes += rows.values.nbytes
            while self._n_bytes > self._most and len(self._held) > 1:
                _, (old, numbers) = self._held.popitem(last=False)
                self._n_bytes -= old.values.nbytes
                for number in numbers:
                    if self._at.get(number, (b"",))[0] == old.key:
                        del self._at[number]
            return list(ids)

    def runs(self, ids: Sequence[int]) -> Iterator[Run]:
        """Split ids into runs. Raises ValueError for the id of no picture that is held."""
        start = 0
        while start < len(ids):
            stop = start + 1
            if ids[start] >= 0:
                while stop < len(ids) and ids[stop] >= 0:
                    stop += 1
                yield Run(start, stop)
            else:
                run = self._picture(ids, start)
                yield run
                stop = run.stop
            start = stop

    def _picture(self, ids: Sequence[int], start: int) -> Run:
        with self._lock:
            key, first = self._at.get(int(ids[start]), (b"", 0))
            if not key:
                raise ValueError(
                    f"id {ids[start]} at {start} is of no picture that is held: encode the picture "
                    "again with engine.picture_ids"
                )
            self._held.move_to_end(key)
            rows, own = self._held[key]
        stop = start
        while stop < len(ids) and first + stop - start < len(own):
            if ids[stop] != own[first + stop - start]:
                break
            stop += 1
        return Run(start, stop, rows, first)


def whole_pictures(ids: Sequence[int], n: int) -> int:
    """The most ids, up to n, after which no picture is cut."""
    if 0 < n < len(ids) and ids[n - 1] < 0 and ids[n] < 0:
        while n > 0 and ids[n - 1] < 0:
            n -= 1
    return n
