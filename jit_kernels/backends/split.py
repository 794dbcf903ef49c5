"""Two backends as one: ops over rows on one device, those over a sequence's keys on another.

Only the rows that a Program's transfers name are transferred, no part of the KV cache.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.compile.workers import Progress
from tamis.jit_kernels.contract.program import KernelSpec, Program, Transfer


class _Segment(NamedTuple):
    transfer: Transfer | None  # the transfer at its beginning
    side: int
    ops: range  # of the whole Program
    shift: int  # the offset to their numbers in the Program of their side


class SplitProgram:
    """A Program whose sides are linked separately, which `SplitBackend.run` replays."""

    def __init__(self, program: Program, sides: tuple[Any, Any]) -> None:
        self.program, self.sides = program, sides
        self.segments, done = [], [0, 0]
        for i, (transfer, ops) in enumerate(
            zip([None, *program.transfers], program.segments, strict=True)
        ):
            self.segments.append(_Segment(transfer, i % 2, ops, done[i % 2] - ops.start))
            done[i % 2] += len(ops)

    def __len__(self) -> int:
        return len(self.program)


class SplitBackend(Backend):
    """Runs the ops over rows on one backend and the others (see Transfer) on another, alternately.

    Each has copies of its own side's arrays only, if it has copies: `send` updates both.
    """

    def __init__(self, rows: Backend, own: Backend) -> None:
        self.rows, self.own = rows, own
        self.name, self.on_host, self.clock = rows.name, False, None
        # the number for which a workspace has scratch
        self.n_thread = max(rows.n_thread, own.n_thread)
        self.timed = False
        self.n_part, self.kv_types, self.strips = own.n_part, own.kv_types, rows.strips

    @property
    def sides(self) -> tuple[Backend, Backend]:
        """The backend of the ops over rows, and the other one."""
        return self.rows, self.own

    def load(
        self,
        rows: Iterable[KernelSpec],
        own: Iterable[KernelSpec] = (),
        progress: Progress | None = None,
    ) -> None:
        """Prepare each side's kernels before `link`. Raises CompileError."""
        self.rows.load(rows, progress=progress)
        self.own.load(own, progress=progress)

    def link(self, program: Program) -> SplitProgram:
        """Link each side of a recorded Program with its backend. Raises MemoryError."""
        rows, own = program.sides()
        return SplitProgram(program, (self.rows.link(rows), self.own.link(own)))

    def run(self, linked: SplitProgram, first: int = 0, last: int | None = None) -> None:
        """Replay ops first..last (all by default); the last ones may still be running.

        Rows are transferred if a transfer is among these ops: a later start does not need them.
        """
        last, both = len(linked) if last is None else last, (self.rows, self.own)
        for transfer, side, ops, shift in linked.segments:
            if transfer is not None and transfer.rows and first <= transfer.at < last:
                rows = [array[: transfer.step[0]] for array in transfer.rows]
                both[1 - side].fetch(*rows)
                both[side].send(*rows)
            begin, end = max(first, ops.start), min(last, ops.stop)
            if begin < end:
                both[side].run(linked.sides[side], begin + shift, end + shift)

    def send(self, *arrays: np.ndarray) -> None:
        """Copy what Python wrote to these arrays to their devices."""
        self.rows.send(*arrays)
        self.own.send(*arrays)

    def fetch(self, *arrays: np.ndarray) -> None:
        """Copy what kernels wrote to these arrays to the host; each array belongs to one side."""
        self.rows.fetch(*arrays)
        self.own.fetch(*arrays)

    def mapped(self, array: np.ndarray, /) -> Any:
        """Map the memory of an array on the backend of the KV cache's ops."""
        return self.own.mapped(array)

    def free_bytes(self, n_weight: int = 0, /) -> int:
        """The bytes that are free on the device of the weights."""
        return self.rows.free_bytes(n_weight)

    def close(self) -> None:
        """Free the resources of both."""
        self.rows.close()
        self.own.close()
