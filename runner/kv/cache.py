"""The interface of a session's KV cache, wherever its pages are.

`PagedKV` has all pages where kernels read them, `DiskTier` some in memory and all in a file,
`GpuPageCache` some on a GPU and all in RAM, `CompositeKV` combines several of these. The defaults
here are those of a cache that a Program may read at any time.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import KVView
from tamis.kv.types import KVTypes


@dataclass(slots=True)
class KVCounts:
    """Counters of a tier since it was made. Units are of keys or values of a KV head.

    For a GPU's frames (kv/gpu_page_cache.py) units are pages, and counters that do not apply are 0.
    """

    n_hit: int = 0  # units that were in memory when they were asked for
    n_miss: int = 0  # units that an op waited for
    n_ahead: int = 0  # units read ahead
    n_read: int = 0  # bytes read, including prefetches
    n_written: int = 0  # bytes written
    n_chosen: int = 0  # bytes of the KV rows that were asked for
    n_covered: int = 0  # bytes of the units that hold these rows

    @property
    def hit_rate(self) -> float:
        """The share of units that were in memory without a prefetch."""
        return max(0, self.n_hit - self.n_ahead) / max(1, self.n_hit + self.n_miss)

    @property
    def amplification(self) -> float:
        """The ratio of the units' bytes to those that were asked for."""
        return self.n_covered / max(1, self.n_chosen)


class KVCache(Protocol):
    """The KV cache of one sequence of up to `capacity` tokens, its layers counted from 0."""

    types: KVTypes  # of K and V
    resident: bool = False  # whether a pass needs only `reserve` and none of the other calls
    kv_ram: int | None = None  # its bytes of memory, if the rest is in a file
    kv_vram: int | None = None  # its bytes of a GPU's memory, if the rest is in RAM

    # ---- positions -------------------------------------------------------------------------------
    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        ...

    def reserve(self, first: int, n_tokens: int) -> None:
        """Make positions first .. n_tokens - 1 writable. Raises OutOfPagesError."""
        ...

    def truncate(self, n_tokens: int) -> None:
        """Release the pages that hold no position below n_tokens."""
        ...

    def share(self, other: "KVCache", n_tokens: int) -> bool:
        """Hold the first n_tokens positions of another sequence, without copying.

        Returns False, without a change, if that is impossible: the caller then copies them.
        """
        return False

    # ---- Python's side: fetched before a read, sent after a write --------------------
    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that `read` and `write` use: to be fetched before, and sent after."""
        return ()

    def read(self, layer: int, n_tokens: int, page: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V from a page on to position n_tokens, kv_row [n, n_head_kv].

        Raises KVFileError.
        """
        ...

    def write(self, layer: int, k: np.ndarray, v: np.ndarray, page: int = 0) -> None:
        """Set K and V from the first position of a page on, in the form that `read` returns.

        Rows of another type are converted. Raises KVFileError.
        """
        ...

    def pages_from(self, first: int) -> list[Any]:
        """Copies of all layers' pages that hold positions from `first` on, for `put_back`."""
        ...

    def put_back(self, first: int, pages: list[Any]) -> None:
        """Undo the writes since `pages_from(first)`; the same pages must be held."""
        ...

    # ---- kernels' side ---------------------------------------------------------------------------
    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """The page tables of all views that Python writes; they must be sent to kernels."""
        ...

    def view(self, layer: int) -> KVView:
        """The view of a layer that kernels use; pages that are not there are -1.

        Its arrays stay the same for the cache's life.
        """
        ...

    def expect(self, *, choosing: bool) -> None:
        """Announce, before recording, whether a method selects what decode steps read."""
        return

    def program(self, step: np.ndarray) -> Program:
        """An empty Program for passes described by `step`; it calls `before` for its ops."""
        return _ReadingProgram(self, step)

    def before(
        self,
        program: Program,
        step: np.ndarray,
        op: ops.Op,
        constants: dict[str, Any],
        fields: dict[str, Any],
    ) -> dict[str, Any]:
        """Record what must precede an op that reads keys.

        Returns the fields with which it reads them.
        """
        return fields

    def record_begin(self, program: Program, step: np.ndarray) -> None:
        """Record what must precede the writes of K and V in a pass: by default nothing."""
        return

    def record_end(self, program: Program, step: np.ndarray) -> None:
        """Record what must follow a pass's writes of K and V of all layers: by default nothing."""
        return

    def stops(self, program: Program) -> list[int]:
        """The calls before which `fetch` must be called: by default none.

        Raises ValueError if impossible.
        """
        return []

    def due(self, program: Program, stops: list[int]) -> list[int]:
        """Those of `stops` that the current pass needs. Raises KVFileError, ValueError."""
        return stops

    def begin(self, pos: int, n_tok: int) -> None:
        """Begin a pass that writes positions pos .. pos + n_tok - 1. Raises KVFileError."""
        return

    def fetch(self, program: Program, at: int) -> None:
        """Fetch the data that a call reads to where it reads it. Raises KVFileError, ValueError."""
        return

    def finish(self, pos: int, n_tok: int) -> None:
        """Note that positions pos .. pos + n_tok - 1 are written in all layers."""
        return

    # ---- measurements ----------------------------------------------------------------------------
    def drop_cached(self) -> None:
        """Drop the system's cached copies of the file."""
        return

    @property
    def counters(self) -> tuple[np.ndarray, ...]:
        """The counters of kernels, to be fetched before `counts`."""
        return ()

    @property
    def counts(self) -> KVCounts | None:
        """The counters of the file or the frames; None if there are none."""
        return None


class _ReadingProgram(Program):
    """A Program that calls a KV cache before each op that reads keys."""

    def __init__(self, kv: KVCache, step: np.ndarray) -> None:
        super().__init__()
        self._kv, self._step = kv, step

    def add(self, op: ops.Op, constants: Any = (), **how: Any) -> None:
        if op.reads is not ops.READS_NOTHING:
            named = dict(zip(op.constants, constants, strict=True))
            how = self._kv.before(self, self._step, op, named, how)
        super().add(op, constants, **how)
