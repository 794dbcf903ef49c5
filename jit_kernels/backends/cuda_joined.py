"""Steps of several sequences as one CUDA graph: the result of `CudaBackend.join`.

An op over rows runs once for all of them. An op of a sequence's own is launched once, too: each row
has separate blocks, which find the op's fields in a table in device memory. A sequence that joins
or leaves changes its row of the table, not the graph. There are graphs for 1, 2, 4, 8, 16, 32 and
64 rows; surplus blocks do nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tamis.jit_kernels.backends.base import Segments
from tamis.jit_kernels.backends.cuda_program import CudaProgram, Launches
from tamis.jit_kernels.backends.fusion import Step, merges_nothing, of_rows
from tamis.jit_kernels.contract.op import each
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cuda.lang.scratch import COUNTERS
from tamis.jit_kernels.cuda.runtime.driver import Graph

MOST_ROWS = 64
HEADER = 64  # bytes of the table before its rows: the number of rows
SPREAD = 2  # this many times the blocks of an op with one row are enough for any number of rows


class _Part(NamedTuple):
    """Ops that run one after another: of one Program for all rows, or of each row's own."""

    linked: CudaProgram | None  # None: each row's own
    ops: range


def kinds_of(linked: CudaProgram, ops: range) -> tuple[KernelSpec, ...]:
    """The kernels of some ops, which must be equal for rows that are launched together."""
    return tuple(call.spec for call in linked.program.calls[ops.start : ops.stop])


class RowTable:
    """The fields of the ops of every row, in host and in device memory."""

    def __init__(self, backend: Launches, n_field: int) -> None:
        self._backend, self.stride = backend, max(8, 8 * n_field)
        self._host = np.zeros(HEADER + MOST_ROWS * self.stride, np.uint8)
        self._buffer = backend.device.allocate(len(self._host))
        self._counters = backend.device.allocate(MOST_ROWS * COUNTERS)
        self._owners: list[CudaProgram] = []
        self._shown: Sequence[CudaProgram] = []

    @property
    def n_row(self) -> int:
        """The address of the number of rows."""
        return self._buffer.address

    def of(self, at: int) -> int:
        """The address of the first row's fields, starting from field `at`."""
        return self._buffer.address + HEADER + 8 * at

    def show(self, owners: Sequence[CudaProgram], parts: Sequence[range]) -> None:
        """Send the rows' fields to kernels, if the rows have changed since the last call.

        parts: for each row its ops, which are launched as of_rows says.
        """
        if owners is self._shown:
            return
        if len(owners) != len(self._owners):
            self._host[:8].view(np.int64)[0] = len(owners)
            self._upload(0, HEADER)
        for row, owner in enumerate(owners):
            if row >= len(self._owners) or self._owners[row] is not owner:
                first = HEADER + row * self.stride
                record = self._record(of_rows(owner.steps, parts), row)
                self._host[first : first + len(record)] = record
                self._upload(first, len(record))
        self._shown, self._owners = owners, list(owners)

    def _upload(self, first: int, n_byte: int) -> None:
        here = self._host[first:].ctypes.data
        self._backend.device.upload(self._buffer.address + first, here, n_byte)

    def _record(self, steps: list[Step], row: int) -> np.ndarray:
        """A row's fields, uint8; its counters are its own."""
        found = np.zeros(self.stride // 8, np.int64)
        at = 0
        for step in steps:
            for name, value in step.fields.items():
                if name == "scratch":
                    found[at] = self._counters.address + row * COUNTERS + COUNTERS
                elif name in step.spec.op.floats:
                    found[at : at + 1].view(np.float32)[0] = value
                else:
                    found[at] = value
                at += 1
        return found.view(np.uint8)


class JoinedProgram:
    """Segments of Programs joined into one, which `CudaBackend.run` replays.

    The segments of a step have the same ops; a step of one segment covers all rows. It owns its
    memory and keeps that of the Programs alive.
    """

    def __init__(
        self, backend: Launches, steps: Segments, before: "JoinedProgram | None" = None
    ) -> None:
        """Join steps.

        before: an earlier result for other rows of the same ops, whose graphs are reused.
        """
        own = next((step for step in steps if len(step) > 1), [])
        self.rows: list[CudaProgram] = [linked for linked, _ in own]
        parts = [_Part(step[0][0] if len(step) == 1 else None, step[0][1]) for step in steps]
        for step in steps:
            alike = {kinds_of(linked, ops) for linked, ops in step}
            assert len(alike) == 1, "rows of a step are of the same ops"
        first = self.rows[0]
        kinds = tuple(kinds_of(first, part.ops) for part in parts if part.linked is None)
        self.parts, self.kinds = parts, kinds
        if before is not None and (before.parts, before.kinds) != (parts, kinds):
            before = None
        self._of_all = {part.linked for part in parts if part.linked is not None}
        self._own_parts = [part.ops for part in parts if part.linked is None]
        self._early = self._own_parts if backend.device.target.overlaps else []
        self._steps = of_rows(first.steps, self._early)
        n_field = sum(len(step.fields) for step in self._steps)
        self.table: RowTable = before.table if before else RowTable(backend, n_field)
        self._graphs: dict[tuple[int, str], Graph] = before._graphs if before else {}

    def __len__(self) -> int:
        return sum(len(part.ops) for part in self.parts)

    @property
    def specs(self) -> set[KernelSpec]:
        """The kernels of ops that are launched for every row."""
        every = (self._steps[i].spec for part in self._own_parts for i in part)
        own = {spec for spec in every if not merges_nothing(spec)}
        return {spec._replace(op=each(spec.op)) for spec in own}

    def start(self, backend: Launches) -> None:
        """Start a replay for the current number of rows."""
        self.table.show(self.rows, self._early)
        slots = next(n for n in (1 << i for i in range(7)) if n >= len(self.rows))
        classes = {linked.rows for linked in self._of_all}
        key = slots, " ".join(sorted(classes))
        if key not in self._graphs:
            self._graphs[key] = self._captured(backend, slots)
        backend.device.start(self._graphs[key])

    def _captured(self, backend: Launches, n_slot: int) -> Graph:
        with backend.device.capture() as captured:
            for part in self.parts:
                if part.linked is not None:
                    part.linked.launch(backend, part.ops.start, part.ops.stop)
                else:
                    backend.launch(self._own(part.ops, n_slot), times=min(n_slot, SPREAD))
        return captured[0]

    def _own(self, ops: range, n_slot: int) -> list[Step]:
        """The launches of every row's own ops."""
        steps, found = self._steps, []
        starts = np.cumsum([0, *(len(step.fields) for step in steps)])
        for i in ops:
            spec, _, sync = steps[i]
            if merges_nothing(spec):
                continue
            fields = {
                "n_row": self.table.n_row,
                "records": self.table.of(int(starts[i])),
                "stride": self.table.stride,
                "n_slot": n_slot,
            }
            found.append(Step(spec._replace(op=each(spec.op)), fields, sync))
        return found
