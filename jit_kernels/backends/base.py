"""What runs Programs: the protocol of a backend, and of a Program that it has linked."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from tamis.jit_kernels.contract.program import KernelSpec, OpCost, Program


class LinkedProgram(Protocol):
    """What a backend of one device makes of a Program, and replays."""

    program: Program

    def __len__(self) -> int:
        """Ops of the Program."""
        ...

    def count(self, n_tok: int, pos: int, first: int = 0, last: int | None = None) -> None:
        """Add what ops first..last moved in the replay just made, of n_tok rows from pos on."""
        ...

    def costs(self) -> list[OpCost]:
        """What each op has cost since `reset_costs`, in recorded order."""
        ...

    def reset_costs(self) -> None:
        """Start counting anew."""
        ...


# Steps that run one after another; the n-th ops of a step's segments run in parallel.
Segments = Sequence[Sequence[tuple[Any, range]]]


class Backend(Protocol):
    """A device that runs Programs (`CpuBackend`, `CudaBackend`), or two of them (`SplitBackend`).

    `link` gives what `run` replays; between them lies only the backend's own kind of Program.
    """

    name: str  # of the device, for people and records: one of DEVICES
    on_host: bool  # kernels read and write Python's own arrays in RAM; otherwise copies of them
    n_thread: int  # that an op's work is shared by
    n_part: int  # split-KV parts of a decode step that are fastest
    kv_types: tuple[str, ...]  # KV cache types that it has kernels for
    strips: bool  # whether products are faster with weights that REPACK has copied
    timed: bool  # whether replays measure what `costs` tells; a CPU's always do
    clock: float | None  # cycles a second of an OpCost; None: `roofline.measure` tells
    layout: str = ""  # of strips: copies of another one are not read
    joins: int = 0  # most rows of what it can `join`; 0: it cannot
    joins_alike: bool = False  # whether those are of the same kernels
    pads: int = 1  # rows of quantised products that take as long as fewer, or less

    @property
    def sides(self) -> "tuple[Backend, Backend]":
        """What runs the ops over rows, and what runs those over a sequence (see Transfer)."""
        return self, self

    def load(
        self,
        rows: Iterable[KernelSpec],
        own: Iterable[KernelSpec] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Make kernels ready ahead of `link`: of ops over rows, and over a sequence (see Transfer).

        Raises CompileError.
        """

    def link(self, program: Program) -> Any:
        """What `run` replays, with all that the Program needs."""

    def join(self, steps: Segments, before: Any = None) -> Any:
        """Segments of linked Programs as one that `run` replays, where it `joins`.

        before: what it made of other rows of the same kernels, whose memory may be used again; it
        does not run any more.
        """
        raise TypeError(f"{self.name} joins no Programs")

    def run(self, linked: Any, first: int = 0, last: int | None = None) -> None:
        """Replay ops first..last (all by default); they may still run when this returns."""

    def send(self, *arrays: np.ndarray) -> None:
        """Show kernels what Python wrote to these arrays; nothing to do `on_host`."""
        ...

    def fetch(self, *arrays: np.ndarray) -> None:
        """Show Python what kernels wrote to these arrays; nothing to do `on_host`."""
        ...

    def mapped(self, array: np.ndarray, /) -> Any:
        """Let kernels see the memory of an array itself, as long as what this gives is held.

        To be asked before any Program names it; the array itself `on_host`. Raises MemoryError.
        """
        return array

    def free_bytes(self, n_weight: int = 0, /) -> int:
        """Bytes of memory that can be taken beside so many of the file's weights."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
