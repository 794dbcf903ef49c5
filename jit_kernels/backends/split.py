"""Two backends as one: ops over rows on a device, those over a sequence's keys on another.

Between them go the rows that a Program's transfers name, and no key or value of the context.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.compile.workers import Progress
from tamis.jit_kernels.contract.program import KernelSpec, Program, Transfer


class _Segment(NamedTuple):
    transfer: Transfer | None  # that it begins with
    side: int
    ops: range  # of the whole Program
    shift: int  # to their numbers in the Program of their side


class SplitProgram:
    """A Program whose sides are linked apart: what `SplitBackend.run` replays."""

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
    """Runs the ops over rows on one backend and the others (see Transfer) on another, in turn.

    Each has its own copies of arrays, where it has any, of its own side's only: `send` shows both.
    """

    def __init__(self, rows: Backend, own: Backend) -> None:
        self.rows, self.own = rows, own
        self.name, self.on_host, self.clock = rows.name, False, None
        self.n_thread = max(rows.n_thread, own.n_thread)  # that a workspace has scratch for
        self.timed = False
        self.n_part, self.kv_types, self.strips = own.n_part, own.kv_types, rows.strips

    @property
    def sides(self) -> tuple[Backend, Backend]:
        """The one that runs ops over rows, and the other."""
        return self.rows, self.own

    def load(
        self,
        rows: Iterable[KernelSpec],
        own: Iterable[KernelSpec] = (),
        progress: Progress | None = None,
    ) -> None:
        """Make each side's kernels ready ahead of `link`. Raises CompileError."""
        self.rows.load(rows, progress=progress)
        self.own.load(own, progress=progress)

    def link(self, program: Program) -> SplitProgram:
        """Link each side of a recorded Program with its backend. Raises MemoryError."""
        rows, own = program.sides()
        return SplitProgram(program, (self.rows.link(rows), self.own.link(own)))

    def run(self, linked: SplitProgram, first: int = 0, last: int | None = None) -> None:
        """Replay ops first..last (all by default); the last ones may still run.

        Rows go where a transfer is among these ops: who starts behind it has no use for them.
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
        """Show kernels what Python wrote to these arrays."""
        self.rows.send(*arrays)
        self.own.send(*arrays)

    def fetch(self, *arrays: np.ndarray) -> None:
        """Show Python what kernels wrote to these arrays, each of which is of one side."""
        self.rows.fetch(*arrays)
        self.own.fetch(*arrays)

    def mapped(self, array: np.ndarray, /) -> Any:
        """As the backend of the KV cache's ops does."""
        return self.own.mapped(array)

    def free_bytes(self, n_weight: int = 0, /) -> int:
        """Bytes that can be taken where the weights are."""
        return self.rows.free_bytes(n_weight)

    def close(self) -> None:
        """Give back what both hold."""
        self.rows.close()
        self.own.close()
