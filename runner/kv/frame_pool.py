"""Keys, or values, of a few pages in memory: each frame holds a page of one layer.

The rest is in a file. A frame has room for its whole page; valid are those units that were read.
All bookkeeping is done in the caller's thread; only `Load.run` may run in another one.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.kv.unit_file import KVFile, Units
from tamis.model.hparams import HParams
from tamis.platform.memory import huge_zeros


class OutOfFramesError(RuntimeError):
    """More pages are needed at once than there are frames; `n` is the number missing."""

    def __init__(self, n: int) -> None:
        super().__init__(f"{n} frames are missing")
        self.n = n


class Load(NamedTuple):
    """Units to read: their numbers in the file, ascending, and their rows in the frames' memory."""

    numbers: np.ndarray  # int64 [n]
    rows: np.ndarray  # int64 [n]
    read: Callable[[np.ndarray, np.ndarray], None]

    def run(self, part: int = 0, n_part: int = 1) -> None:
        """Read one of n_part parts. Raises KVFileError."""
        n = len(self.numbers)
        some = slice(n * part // n_part, n * (part + 1) // n_part)
        if some.start < some.stop:
            self.read(self.numbers[some], self.rows[some])


class Frames:
    """The frames of keys, or of values, and the table of pages in them."""

    def __init__(
        self, hp: HParams, type: str, n_frame: int, n_page: int, unit: int, file: tuple[KVFile, int]
    ) -> None:
        """Make the frames; unit: in tokens; file: with the offset of these pages."""
        row = kv_row(type, hp.head_dim)
        self._n_layer, self._n_page, self._per_page = (
            hp.n_layer,
            n_page,
            hp.n_head_kv * PAGE // unit,
        )
        self.unit_bytes = unit * row.itemsize
        _, self.frames = huge_zeros((n_frame, hp.n_head_kv, PAGE), row)
        self._memory = self.frames.view(np.uint8).reshape(-1, self.unit_bytes)
        n_unit = hp.n_layer * n_page * self._per_page
        self._units = Units(*file, n_unit, self.unit_bytes)
        self.table = np.full((hp.n_layer, n_page), -1, np.int32)
        self._owner = np.full(n_frame, -1, np.int64)  # layer * n_page + page
        self._valid = np.zeros((n_frame, self._per_page), bool)
        self._used = np.zeros(n_frame, np.int64)  # the step that last asked for it
        # the step that last asked for pages of the layer
        self._asked = np.zeros(hp.n_layer, np.int64)
        self._dirty = np.zeros(n_frame, bool)  # the file does not have it
        self._pinned = np.zeros(n_frame, bool)  # being read or waited for
        self._kept = np.zeros(n_frame, bool)  # see keep
        self._free = list(range(n_frame - 1, -1, -1))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self._per_page * self.unit_bytes

    def lookup(self, layer: int, need: np.ndarray, step: int, ahead: bool = False) -> Load:
        """Give frames to the pages of `need`, bool [n_page, units of a page]; returns what to read.

        The frames stay until `unpin`; the units are valid once the Load has run and `loaded` was
        called. ahead: take only frames that nothing needs sooner, as many as there are. Raises
        OutOfFramesError; then nothing has changed except evicted pages.
        """
        pages = np.flatnonzero(need.any(axis=1))
        frames = self.table[layer, pages]
        held = frames >= 0
        self._pinned[frames[held]] = True
        absent = pages[~held]
        if ahead:
            absent = absent[: len(self._free) + len(self._idle())]
            pages = np.concatenate([pages[held], absent])
        else:
            self._asked[layer] = step
        taken = np.array(self._take(len(absent), layer), np.int64)
        self._owner[taken] = layer * self._n_page + absent
        self.table[layer, absent] = taken
        self._pinned[taken] = True
        pages.sort()
        frames = self.table[layer, pages].astype(np.int64)
        self._used[frames] = self._asked[layer]
        rows, columns = np.nonzero(need[pages] & ~self._valid[frames])
        numbers = (layer * self._n_page + pages[rows]) * self._per_page + columns
        memory_rows = frames[rows] * self._per_page + columns
        return Load(numbers, memory_rows, lambda n, p: self._units.read(n, self._memory, p))

    def loaded(self, load: Load) -> None:
        """Note that a Load's units are valid."""
        self._valid.reshape(-1)[load.rows] = True

    def limit(self, n_frame: int) -> None:
        """Use only the first n_frame frames; call it before any is used."""
        assert len(self._free) == len(self._owner)
        self._free = self._free[-n_frame:]

    def keep(self, layer: int, pages: np.ndarray) -> None:
        """Keep pages that are in memory until `release`."""
        self._kept[self.table[layer, pages]] = True

    def release(self) -> None:
        """Allow the eviction of kept pages again."""
        self._kept[:] = False

    @property
    def first_byte(self) -> int:
        """The offset of these pages in the file."""
        return self._units.start

    @property
    def sums(self) -> np.ndarray:
        """Checksums of the file's units, uint32, in order."""
        return self._units.sums

    def unpin(self) -> None:
        """Allow the eviction of frames that were looked up."""
        self._pinned[:] = False

    def allocate(self, layer: int, pages: np.ndarray) -> None:
        """Give frames to pages that will be written; they stay until `clean` is called."""
        absent = pages[self.table[layer, pages] < 0]
        taken = np.array(self._take(len(absent), layer), np.int64)
        self._owner[taken] = layer * self._n_page + absent
        self.table[layer, absent] = taken
        frames = self.table[layer, pages]
        self._dirty[frames], self._valid[frames] = True, True

    def n_spare(self) -> int:
        """The number of frames that are free, or not asked for at their layer's last step."""
        idle = self._idle()
        asked = self._asked[self._owner[idle] // self._n_page]
        return len(self._free) + int((asked > self._used[idle]).sum())

    def is_dirty(self, layer: int, page: int) -> bool:
        """Whether a page is in memory as a whole while the file does not have it."""
        frame = self.table[layer, page]
        return bool(frame >= 0 and self._dirty[frame])

    def dirty_pages(self, layer: int, end: int) -> np.ndarray:
        """The pages of a layer below `end` that the file does not have."""
        frames = self.table[layer, :end]  # index -1 reads the last frame's flag
        return np.flatnonzero((frames >= 0) & self._dirty[frames])

    def write(self, layer: int, pages: np.ndarray) -> None:
        """Put pages that have frames into the file. Raises KVFileError."""
        for page in pages:
            frame = int(self.table[layer, page])
            first = frame * self._per_page
            self.write_page(layer, int(page), self._memory[first : first + self._per_page])

    def write_page(self, layer: int, page: int, units: np.ndarray) -> None:
        """Put a page, uint8 [units of a page, unit_bytes], into the file. Raises KVFileError."""
        self._units.write((layer * self._n_page + page) * self._per_page, [units])

    def clean(self, layer: int, pages: np.ndarray) -> None:
        """Note that the file has these pages."""
        self._dirty[self.table[layer, pages]] = False

    def drop(self, layer: int, first: int) -> None:
        """Drop a layer's pages from `first` on."""
        frames = self.table[layer, first:]
        self._release(frames[frames >= 0].astype(np.int64))

    def read_page(self, layer: int, page: int, out: np.ndarray) -> None:
        """Copy a page, from its frame or from the file, to uint8 [units of a page, unit_bytes].

        Raises KVFileError.
        """
        frame, n = int(self.table[layer, page]), self._per_page
        if frame >= 0 and self._valid[frame].all():
            out[:] = self._memory[frame * n : (frame + 1) * n]
        else:
            numbers = (layer * self._n_page + page) * n + np.arange(n)
            self._units.read(numbers, out, np.arange(n))

    def _take(self, n: int, layer: int) -> list[int]:
        if n > len(self._free):
            self._evict(n - len(self._free), layer)
        return [self._free.pop() for _ in range(n)]

    def _idle(self) -> np.ndarray:
        return np.flatnonzero((self._owner >= 0) & ~(self._dirty | self._pinned | self._kept))

    def _evict(self, n: int, layer: int) -> None:
        """Evict the n frames whose pages their layers have not asked for the longest.

        Last come frames that their layer asked for at its last step: of these, first the ones whose
        layer is the last to run again after `layer`.
        """
        idle = self._idle()
        if len(idle) < n:
            raise OutOfFramesError(n - len(idle))
        owner = self._owner[idle] // self._n_page
        age = self._asked[owner] - self._used[idle]
        wait = (owner - layer - 1) % self._n_layer + np.where(age > 0, self._n_layer + age, 0)
        self._release(idle[np.argpartition(-wait, n - 1)[:n]])

    def _release(self, frames: np.ndarray) -> None:
        layer, page = np.divmod(self._owner[frames], self._n_page)
        self.table[layer, page] = -1
        self._owner[frames] = -1
        self._valid[frames], self._dirty[frames] = False, False
        self._free += frames.tolist()
