"""Protocols of a backend, which runs Programs, and of a Program that it has linked."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from tamis.jit_kernels.contract.program import KernelSpec, OpCost, Program


class LinkedProgram(Protocol):
    """A Program that a backend of one device has linked and replays."""

    program: Program

    def __len__(self) -> int:
        """The number of ops of the Program."""
        ...

    def count(self, n_tok: int, pos: int, first: int = 0, last: int | None = None) -> None:
        """Add the counts of ops first..last in the last replay, of n_tok rows from pos on."""
        ...

    def costs(self) -> list[OpCost]:
        """The cost of each op since `reset_costs`, in recorded order."""
        ...

    def reset_costs(self) -> None:
        """Set all costs to zero."""
        ...


# Steps run one after another; the n-th ops of a step's segments run in parallel.
Segments = Sequence[Sequence[tuple[Any, range]]]


class Backend(Protocol):
    """A device that runs Programs (`CpuBackend`, `CudaBackend`), or two of them (`SplitBackend`).

    `link` returns an object that only `run` of the same backend replays.
    """

    name: str  # the device, in messages and records: one of DEVICES
    on_host: bool  # whether kernels use Python's own arrays in RAM; otherwise they use copies
    n_thread: int  # the number of threads that share an op's work
    n_part: int  # the fastest number of split-KV parts of a decode step
    kv_types: tuple[str, ...]  # KV cache types that it has kernels for
    strips: bool  # whether products are faster with weights that REPACK has copied
    timed: bool  # whether replays measure costs; a CPU's always do
    clock: float | None  # cycles per second of an OpCost; None: `roofline.measure` returns it
    layout: str = ""  # of strips: copies in another layout are not read
    joins: int = 0  # the most rows that it can `join`; 0: it cannot
    joins_alike: bool = False  # whether joined segments must have the same kernels
    pads: int = 1  # the number of rows up to which quantised products take no longer

    @property
    def sides(self) -> "tuple[Backend, Backend]":
        """The backends of the ops over rows, and of those over a sequence (see Transfer)."""
        return self, self

    def load(
        self,
        rows: Iterable[KernelSpec],
        own: Iterable[KernelSpec] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Prepare kernels before `link`: of ops over rows, and over a sequence (see Transfer).

        Raises CompileError.
        """

    def link(self, program: Program) -> Any:
        """An object that `run` replays, with everything that the Program needs."""

    def join(self, steps: Segments, before: Any = None) -> Any:
        """Segments of linked Programs joined into one object that `run` replays, if it `joins`.

        before: an earlier result for other rows of the same kernels, whose memory may be reused; it
        must not be run any more.
        """
        raise TypeError(f"{self.name} joins no Programs")

    def run(self, linked: Any, first: int = 0, last: int | None = None) -> None:
        """Replay ops first..last (all by default); they may still be running when this returns."""

    def send(self, *arrays: np.ndarray) -> None:
        """Copy what Python wrote to these arrays to the device; nothing to do `on_host`."""
        ...

    def fetch(self, *arrays: np.ndarray) -> None:
        """Copy what kernels wrote to these arrays to the host; nothing to do `on_host`."""
        ...

    def mapped(self, array: np.ndarray, /) -> Any:
        """Map the memory of an array for kernels, as long as the result is held.

        It must be called before any Program names the array; `on_host` it returns the array itself.
        Raises MemoryError.
        """
        return array

    def free_bytes(self, n_weight: int = 0, /) -> int:
        """The bytes of memory that are free beside n bytes of the file's weights."""
        ...

    def close(self) -> None:
        """Free all resources."""
