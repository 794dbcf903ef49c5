"""What a session asks of its KV cache, wherever the pages are: the protocol of all of them.

`PagedKV` has all pages where kernels read them, `DiskTier` some in memory and all in a file,
`GpuPageCache` some on a GPU and all in RAM, `CompositeKV` is some of these together. The defaults
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
    """What was asked of a tier since it was made. Units are of keys or values of a KV head.

    Of a GPU's frames (kv/gpu_page_cache.py) units are pages, and what is not read from there is 0.
    """

    n_hit: int = 0  # units that were in memory when they were asked for
    n_miss: int = 0  # units that had to be waited for
    n_ahead: int = 0  # units read ahead
    n_read: int = 0  # bytes read, ahead or not
    n_written: int = 0  # bytes written
    n_chosen: int = 0  # bytes of the KV rows that were asked for
    n_covered: int = 0  # bytes of the units that hold them

    @property
    def hit_rate(self) -> float:
        """The share of units that were in memory, and not only because they were read ahead."""
        return max(0, self.n_hit - self.n_ahead) / max(1, self.n_hit + self.n_miss)

    @property
    def amplification(self) -> float:
        """How many times more the units hold than was asked for."""
        return self.n_covered / max(1, self.n_chosen)


class KVCache(Protocol):
    """The KV cache of one sequence of up to `capacity` tokens, its layers counted from 0."""

    types: KVTypes  # of K and of V
    resident: bool = False  # whether a pass needs nothing but `reserve`: no call of the others
    kv_ram: int | None = None  # bytes of memory that it has, where the rest is in a file
    kv_vram: int | None = None  # bytes of a GPU's memory that it has, where the rest is in RAM

    # ---- positions -------------------------------------------------------------------------------
    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        ...

    def reserve(self, first: int, n_tokens: int) -> None:
        """Make positions first .. n_tokens - 1 writable. Raises OutOfPagesError."""
        ...

    def truncate(self, n_tokens: int) -> None:
        """Give back the pages that hold no position below n_tokens."""
        ...

    def share(self, other: "KVCache", n_tokens: int) -> bool:
        """Hold what another sequence holds of its first n_tokens positions, without copying.

        False, and no change, where that cannot be: the caller copies them.
        """
        return False

    # ---- Python's side: what is fetched before a read, and sent after a write --------------------
    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What `read` and `write` see: to be fetched before, and sent after."""
        return ()

    def read(self, layer: int, n_tokens: int, page: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V from a page on to position n_tokens, kv_row [n, n_head_kv].

        Raises KVFileError.
        """
        ...

    def write(self, layer: int, k: np.ndarray, v: np.ndarray, page: int = 0) -> None:
        """Set K and V from the first position of a page on, as `read` gives them.

        Rows of another type are converted. Raises KVFileError.
        """
        ...

    def pages_from(self, first: int) -> list[Any]:
        """Copies of all layers' pages that hold positions from `first` on, for `put_back`."""
        ...

    def put_back(self, first: int, pages: list[Any]) -> None:
        """Undo what was written since `pages_from(first)`; the same pages must be held."""
        ...

    # ---- kernels' side ---------------------------------------------------------------------------
    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """The page tables of all views that Python writes, which kernels are to be shown."""
        ...

    def view(self, layer: int) -> KVView:
        """What kernels see of a layer: pages that are not there are -1. Its arrays stay."""
        ...

    def expect(self, *, choosing: bool) -> None:
        """Told before anything is recorded: whether a method chooses what decode reads."""
        return

    def program(self, step: np.ndarray) -> Program:
        """An empty Program for passes that `step` tells of; `before` is asked for its ops."""
        return _ReadingProgram(self, step)

    def before(
        self,
        program: Program,
        step: np.ndarray,
        op: ops.Op,
        constants: dict[str, Any],
        fields: dict[str, Any],
    ) -> dict[str, Any]:
        """Record what an op that reads keys needs before it; its fields as it reads them."""
        return fields

    def record_begin(self, program: Program, step: np.ndarray) -> None:
        """Record what a pass needs before its K and V are written: nothing."""
        return

    def record_end(self, program: Program, step: np.ndarray) -> None:
        """Record what a pass needs after its K and V of all layers are written: nothing."""
        return

    def stops(self, program: Program) -> list[int]:
        """The calls before which `fetch` must be called: none. Raises ValueError: cannot be."""
        return []

    def due(self, program: Program, stops: list[int]) -> list[int]:
        """Those of `stops` that the pass that has begun needs. Raises KVFileError, ValueError."""
        return stops

    def begin(self, pos: int, n_tok: int) -> None:
        """A pass begins that writes positions pos .. pos + n_tok - 1. Raises KVFileError."""
        return

    def fetch(self, program: Program, at: int) -> None:
        """Fetch what a call reads to where it reads it. Raises KVFileError, ValueError."""
        return

    def finish(self, pos: int, n_tok: int) -> None:
        """Positions pos .. pos + n_tok - 1 are written in all layers."""
        return

    # ---- measurements ----------------------------------------------------------------------------
    def drop_cached(self) -> None:
        """Let the system drop its copies of what is in a file."""
        return

    @property
    def counters(self) -> tuple[np.ndarray, ...]:
        """What kernels count in: to be fetched before `counts`."""
        return ()

    @property
    def counts(self) -> KVCounts | None:
        """What the file or the frames have been asked for; None where there are none."""
        return None


class _ReadingProgram(Program):
    """A Program that asks a KV cache before each op that reads keys."""

    def __init__(self, kv: KVCache, step: np.ndarray) -> None:
        super().__init__()
        self._kv, self._step = kv, step

    def add(self, op: ops.Op, constants: Any = (), **how: Any) -> None:
        if op.reads is not ops.READS_NOTHING:
            named = dict(zip(op.constants, constants, strict=True))
            how = self._kv.before(self, self._step, op, named, how)
        super().add(op, constants, **how)
