"""The KV cache of one sequence in several parts: one per device, or per shape of heads."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, KVView
from tamis.kv.cache import KVCache, KVCounts


class CompositeKV(KVCache):
    """Calls for one layer go to the part that has it, those for the whole sequence to all parts."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], KVCache]]) -> None:
        """Combine parts: for each, the layers (counted over all parts), and their cache."""
        self._caches = [kv for _, kv in parts]
        self._of = {layer: (kv, i) for layers, kv in parts for i, layer in enumerate(layers)}
        self._by_table: dict[int, KVCache] = {}
        for kv, i in self._of.values():
            self._by_table[kv.view(i).k_table.ctypes.data] = kv
        # For a Program, the part that each of its stops belongs to.
        self._stops: WeakKeyDictionary[Program, dict[int, KVCache]] = WeakKeyDictionary()
        self.types = self._caches[0].types
        self.resident = all(kv.resident for kv in self._caches)
        self.kv_ram = _sum([kv.kv_ram for kv in self._caches])
        self.kv_vram = _sum([kv.kv_vram for kv in self._caches])

    # ---- positions -------------------------------------------------------------------------------
    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        return min(kv.capacity for kv in self._caches)

    def reserve(self, first: int, n_tokens: int) -> None:
        """Make positions first .. n_tokens - 1 writable. Raises OutOfPagesError."""
        for kv in self._caches:
            kv.reserve(first, n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Release the pages that hold no position below n_tokens."""
        for kv in self._caches:
            kv.truncate(n_tokens)

    def share(self, other: KVCache, n_tokens: int) -> bool:
        """Hold the first n_tokens positions of another sequence, without copying.

        Returns False if that is impossible; this cache is then empty.
        """
        if not isinstance(other, CompositeKV) or len(self._caches) != len(other._caches):
            return False
        pairs = zip(self._caches, other._caches, strict=True)
        if all(mine.share(theirs, n_tokens) for mine, theirs in pairs):
            return True
        self.truncate(0)
        return False

    # ---- Python's side ---------------------------------------------------------------------------
    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that `read` and `write` use: to be fetched before, and sent after."""
        return tuple(array for kv in self._caches for array in kv.arrays)

    def read(self, layer: int, n_tokens: int, page: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V from a page on to position n_tokens, kv_row [n, n_head_kv]."""
        kv, at = self._of[layer]
        return kv.read(at, n_tokens, page)

    def write(self, layer: int, k: np.ndarray, v: np.ndarray, page: int = 0) -> None:
        """Set K and V from the first position of a page on; other types are converted."""
        self.reserve(page * PAGE, page * PAGE + len(k))  # also needed if no layer has keys
        kv, at = self._of[layer]
        kv.write(at, k, v, page)

    def pages_from(self, first: int) -> list[Any]:
        """A copy of all layers' pages that hold positions from `first` on, for `put_back`."""
        return [kv.pages_from(first) for kv in self._caches]

    def put_back(self, first: int, pages: list[Any]) -> None:
        """Undo the writes since `pages_from(first)`; the same pages must be held."""
        for kv, kept in zip(self._caches, pages, strict=True):
            kv.put_back(first, kept)

    # ---- kernels' side ---------------------------------------------------------------------------
    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """The page tables that Python writes; they must be sent to kernels."""
        return tuple(table for kv in self._caches for table in kv.tables)

    def view(self, layer: int) -> KVView:
        """The view of a layer that kernels use."""
        kv, at = self._of[layer]
        return kv.view(at)

    def expect(self, *, choosing: bool) -> None:
        """Announce, before recording, whether a method selects what decode steps read."""
        for kv in self._caches:
            kv.expect(choosing=choosing)

    def before(
        self, program: Program, step: np.ndarray, op: ops.Op, constants: Any, fields: dict[str, Any]
    ) -> dict[str, Any]:
        """Record what must precede an op that reads keys.

        Returns the fields with which it reads them.
        """
        kv = self._by_table[fields["k_table"].ctypes.data]
        return kv.before(program, step, op, constants, fields)

    def record_begin(self, program: Program, step: np.ndarray) -> None:
        """Record what must precede the writes of K and V in a pass."""
        for kv in self._caches:
            kv.record_begin(program, step)

    def record_end(self, program: Program, step: np.ndarray) -> None:
        """Record what must follow the writes of K and V of all layers in a pass."""
        for kv in self._caches:
            kv.record_end(program, step)

    def stops(self, program: Program) -> list[int]:
        """The calls before which `fetch` may have to be called. Raises ValueError if impossible."""
        owners = {at: kv for kv in self._caches for at in kv.stops(program)}
        self._stops[program] = owners
        return sorted(owners)

    def due(self, program: Program, stops: list[int]) -> list[int]:
        """Those of `stops` that this pass needs. Raises KVFileError, ValueError."""
        of, due = self._stops[program], list[int]()
        for kv in self._caches:
            due += kv.due(program, [at for at in stops if of[at] is kv])
        return sorted(due)

    def begin(self, pos: int, n_tok: int) -> None:
        """Begin a pass that writes positions pos .. pos + n_tok - 1."""
        for kv in self._caches:
            kv.begin(pos, n_tok)

    def fetch(self, program: Program, at: int) -> None:
        """Fetch the data that a call reads to where it reads it. Raises KVFileError, ValueError."""
        self._stops[program][at].fetch(program, at)

    def finish(self, pos: int, n_tok: int) -> None:
        """Note that positions pos .. pos + n_tok - 1 are written in all layers."""
        for kv in self._caches:
            kv.finish(pos, n_tok)

    def drop_cached(self) -> None:
        """Drop the system's cached copies of files, for measurements."""
        for kv in self._caches:
            kv.drop_cached()

    # ---- measurements ----------------------------------------------------------------------------
    @property
    def counters(self) -> tuple[np.ndarray, ...]:
        """The counters of kernels, to be fetched before `counts`."""
        return tuple(array for kv in self._caches for array in kv.counters)

    @property
    def counts(self) -> KVCounts | None:
        """The sums of all files' and frames' counters; None if there are none."""
        counted = [kv.counts for kv in self._caches if kv.counts is not None]
        if not counted:
            return None
        names = KVCounts.__slots__
        return KVCounts(*(sum(getattr(counts, name) for counts in counted) for name in names))


def divided(n_bytes: int, sizes: Sequence[int]) -> list[int]:
    """The bytes of memory that each of several caches gets, in proportion to their sizes."""
    return [n_bytes * size // sum(sizes) for size in sizes]


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return sum(known) if known else None
